"""What every layer of a step shares: where queries start, and how much work there is.

A kernel of one program reads lengths and query counts on the device, so that nothing
waits for the host and a captured graph replays with other lengths.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvatlas.kernels.triton.attention.walk_device import first_seen
from kvatlas.kernels.triton.dependent_launch_device import after_previous, before_next, early


class Cut(NamedTuple):
    """How a batch is cut: what the kernels that follow take for granted."""

    group: int
    """Query heads that share a kv head."""
    few: int
    """Rows up to which a sequence is decoded; with more it is prefilled."""
    tile: int
    """States in a tile of a decoded sequence."""
    rows: int
    """Rows in a tile of a prefilled one."""
    align: int
    """What states a walk starts at multiples of."""
    bound: str = "none"
    size: int = 0
    """Window or chunk."""
    kept: int = 0
    """First states that stay in sight of a window."""


class Schedule(NamedTuple):
    """Ends of queries, decode tiles and prefill tiles, sequence by sequence, on the device."""

    ends: torch.Tensor
    """[3, sequences + 1] of int32, each row from 0, or from where queries start."""
    cut: Cut


@triton.jit
def _plan(
    lengths, queries, given, ends, sequences, few, rows, bound, kept, GROUP: tl.constexpr,
    TILE: tl.constexpr, ALIGN: tl.constexpr, BOUND: tl.constexpr, STARTS: tl.constexpr,
    SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    before_next(EARLY)
    tokens = 0
    if STARTS:
        tokens += tl.load(given).to(tl.int32)
    tiles = 0
    units = 0
    width = sequences + 1
    tl.store(ends, tokens)
    for row in tl.static_range(1, 3):
        tl.store(ends + row * width, 0)
    for begin in range(0, sequences, SPAN):
        at = begin + tl.arange(0, SPAN)
        there = at < sequences
        length = tl.load(lengths + at, mask=there, other=0).to(tl.int32)
        if STARTS:
            count = tl.load(given + at + 1, mask=there, other=0)
            count = (count - tl.load(given + at, mask=there, other=0)).to(tl.int32)
        else:
            count = tl.load(queries + at, mask=there, other=0).to(tl.int32)
        low = first_seen(length - count, bound, BOUND)
        short = count * GROUP <= few
        walked = tl.cdiv(length - low // ALIGN * ALIGN, TILE)
        if BOUND == "kept":
            walked += tl.cdiv(tl.minimum(kept, low), TILE)
        walked = tl.where((count > 0) & short, walked, 0)
        packed = tl.where(short, 0, tl.cdiv(count * GROUP, rows))
        tl.store(ends + at + 1, tokens + tl.cumsum(count, 0), mask=there)
        tl.store(ends + width + at + 1, tiles + tl.cumsum(walked, 0), mask=there)
        tl.store(ends + 2 * width + at + 1, units + tl.cumsum(packed, 0), mask=there)
        tokens += tl.sum(count, 0)
        tiles += tl.sum(walked, 0)
        units += tl.sum(packed, 0)


def fit_of(states: int, tile: int) -> tuple[str, int]:
    """How tiles of states meet pages, and what states a walk starts at multiples of.

    >>> fit_of(16, 64), fit_of(64, 64), fit_of(256, 64), fit_of(24, 64)
    (('pages in tile', 16), ('tile in page', 64), ('tile in page', 64), ('neither', 16))
    """
    if states % tile == 0:
        return "tile in page", tile
    if tile % states == 0:
        return "pages in tile", states
    return "neither", 16


def schedule(
    cut: Cut,
    lengths: torch.Tensor,
    queries: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> Schedule:
    """The work of a batch, from counts of queries or from where they start."""
    count = lengths.shape[0]
    ends = torch.empty((3, count + 1), dtype=torch.int32, device=lengths.device)
    with torch.cuda.device(lengths.device) if lengths.is_cuda else nullcontext():
        _plan[(1,)](
            lengths, lengths if queries is None else queries, lengths if starts is None else starts,
            ends, count, cut.few, cut.rows, cut.size, cut.kept, GROUP=cut.group, TILE=cut.tile,
            ALIGN=cut.align,
            BOUND=cut.bound, STARTS=starts is not None,
            SPAN=min(1024, triton.next_power_of_2(max(count, 16))), num_warps=4,
            **early(lengths.device),
        )  # fmt: skip
    return Schedule(ends, cut)
