"""What a figure is: a case that is built, checked against float64, and timed by graph replay."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.replays import (
    LONG,
    Case,
    Player,
    by_turns,
    middle,
    milliseconds,
    ready,
)
from kvatlas.cache import LayerCache
from kvatlas.geometry import ENGINE_LAYOUTS, Layout
from kvatlas.specs import Spec

DEVICE = os.environ.get("KVATLAS_BENCH_DEVICE", "cuda")
"""A CPU runs the cases in Triton's interpreter, which shows that they are right and no more."""
ORDERS = [layout.order for layout in ENGINE_LAYOUTS]
SLOTS = 4
"""Layers in a pool, so that orders which interleave them do."""


class Cell(NamedTuple):
    """One figure of the table."""

    group: str
    name: str
    build: Callable[[dict[str, Any]], Case]
    unit: str = "GB/s"
    ceiling: str = "copy"
    bar: float | None = None
    """The share of the ceiling, or the figure where there is no ceiling, that is wanted."""
    graph: bool = True
    long: float = LONG
    """Milliseconds that are timed, at least."""
    apart: float | None = None
    """How far the cells of the group may lie apart, as a share of the highest."""


class Beside(NamedTuple):
    """A limit that was timed by turns with a cell."""

    milliseconds: float
    work: float
    """What one call of it does."""


class Measured(NamedTuple):
    """A figure, or why there is none."""

    cell: Cell
    figure: float | None
    milliseconds: float
    spread: float
    right: bool
    note: str = ""
    beside: Beside | None = None


def layers_of(
    spec: Spec, order: str, *, block: int, blocks: int, device: str = DEVICE, slots: int = SLOTS
) -> list[LayerCache]:
    """The layers of a pool of random bytes; on the host it is pinned."""
    page = spec.page(block)
    placed = page.place(Layout(order), pages=slots, blocks=blocks)
    if device == "cpu" and DEVICE == "cuda":
        buffer = _pinned(1 << (placed.stop - 1).bit_length())[: placed.stop]
    else:
        buffer = torch.empty(placed.stop, dtype=torch.uint8, device=device)
    return [
        LayerCache(f"layers.{i}", spec, page, placed.select("L", i), buffer) for i in range(slots)
    ]


@lru_cache(maxsize=1)
def _pinned(nbytes: int) -> torch.Tensor:
    """Pinned memory that cases use one after the other: to pin it takes longer than to use it."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def small() -> bool:
    """Whether a case is only run so that its kernels are compiled."""
    return bool(os.environ.get("KVATLAS_BENCH_SMALL"))


def shuffled(count: int, of: int, seed: int) -> torch.Tensor:
    """So many different numbers below `of`, on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(of, generator=generator)[:count].to(torch.int32).to(DEVICE)


def measure(
    cell: Cell,
    choice: dict[str, Any] | None = None,
    *,
    repeat: int = 15,
    limit: Player | None = None,
) -> Measured:
    """Check a cell and time it, by turns with its limit where there is one.

    Whatever goes wrong is what the table shows.
    """
    beside = None
    try:
        case = cell.build(choice or {})
        right = case.right()
        torch.cuda.synchronize()
        if limit is None:
            taken, spread = milliseconds(case, graph=cell.graph, repeat=repeat, long=cell.long)
        else:
            player = ready(case, graph=cell.graph)
            own, others = by_turns(player, limit, repeat=repeat, long=cell.long)
            taken, spread = middle(own)
            beside = Beside(statistics.median(others), limit.case.work)
    except Exception as error:
        return Measured(cell, None, 0.0, 0.0, False, f"{type(error).__name__}: {str(error)[:300]}")
    scale = 1e9 if cell.unit == "TFLOP/s" else 1e6
    return Measured(cell, case.work / taken / scale, taken, spread, right, beside=beside)
