"""What every layer of a step shares: where queries start, and how much work there is.

A kernel of one program reads lengths and query counts on the device, so that nothing
waits for the host and a captured graph replays with other lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from kvatlas.kernels.triton import tune
from kvatlas.kernels.triton.attention.schedule_device import count_tiles


class WorkSplit(NamedTuple):
    """How the work of a batch is split: what the kernels that follow take for granted."""

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
    mask: str = "causal"
    """What queries see: `causal`, `window`, `chunk`, `sinks` or `full`."""
    size: int = 0
    """Window or chunk."""
    sink_tokens: int = 0


class Schedule(NamedTuple):
    """Ends of queries, decode tiles and prefill tiles, sequence by sequence, on the device."""

    ends: torch.Tensor
    """[3, sequences + 1] of int32, each row from 0, or from where queries start."""
    split: WorkSplit


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
    split: WorkSplit,
    lengths: torch.Tensor,
    queries: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> Schedule:
    """The work of a batch, from counts of queries or from where they start."""
    count = lengths.shape[0]
    ends = torch.empty((3, count + 1), dtype=torch.int32, device=lengths.device)
    with tune.on(lengths.device):
        count_tiles[(1,)](
            lengths, queries if starts is None else starts, ends, count, SPLIT=split,
            STARTS=starts is not None, SPAN=min(1024, triton.next_power_of_2(max(count, 16))),
            num_warps=4, **tune.dependent_launch(lengths.device),
        )  # fmt: skip
    return Schedule(ends, split)
