"""Calls whose host time is compared between trees: eager ones, which every tree has.

`turns` imports this file by itself, beside either tree's kernels: it asks for nothing but the
public calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cells import DEVICE, layers_of
from kvatlas import kernels
from kvatlas.cache import LayerCache
from kvatlas.specs import FullAttention

GROUP = "host time of a call"
NAMES = ("attend, any batch", "attend, one query each", "write")
_LAYERS = 16
_TURNS = 40


def step_of(name: str) -> Callable[[], None]:
    """A call for each of some layers, of few tokens: the device is never what is waited for."""
    layers = layers_of(
        FullAttention(heads=8, head_dim=128), "LBNHC", block=16, blocks=64, slots=_LAYERS
    )
    numbers = torch.arange(16, dtype=torch.int32, device=DEVICE)
    q = torch.randn(16, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    if name == "write":
        rows, slots = q[:, :8].contiguous(), 16 * numbers.long()
        return partial(_each, layers, lambda layer: kernels.write(layer, rows, rows, slots))
    batch: dict[str, Any] = {
        "tables": numbers[:, None].expand(-1, 2).contiguous(),
        "lengths": torch.full_like(numbers, 20),
        "queries": torch.ones_like(numbers),
        "max_queries": None if name == "attend, any batch" else 1,
    }
    return partial(_each, layers, lambda layer: kernels.attend(layer, q, **batch))


def _each(layers: Sequence[LayerCache], call: Callable[[LayerCache], Any]) -> None:
    for layer in layers:
        call(layer)


def compile_call(name: str) -> None:
    """The kernels of a call."""
    step_of(name)()


def milliseconds(step: Callable[[], None]) -> float:
    """The host's time for one call of a step; the median."""
    taken = []
    for _ in range(_TURNS):
        begin = time.perf_counter()
        step()
        taken.append(1e3 * (time.perf_counter() - begin) / _LAYERS)
        torch.cuda.synchronize()
    return statistics.median(taken)
