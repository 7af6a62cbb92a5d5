"""What every layer of a step shares: where queries start, and how much work there is.

A kernel of one program reads lengths and query counts on the device, so that nothing
waits for the host and a captured graph replays with other lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvatlas.kernels.triton import relaunch, tune
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


class Partials(NamedTuple):
    """Room for what workers leave of sequences that others walk on: flash-decoding's partials."""

    room: torch.Tensor
    """Sums of each row, then a maximum and a total of each."""
    tops: int
    """Where the second begin."""


class Schedule:
    """The work of a batch, on the device: what all layers of a kind share in a step.

    It also has the room in which their workers leave partial sums: layers that share a
    schedule are attended to one after the other, on one stream. A captured graph needs it as
    long as it is replayed.
    """

    def __init__(self, ends: torch.Tensor, split: WorkSplit) -> None:
        """`ends` [3, sequences + 1] of int32: of queries, and of tiles of decode and of prefill."""
        self.ends, self.split = ends, split
        self.sequences = ends.shape[1] - 1
        self._partials: dict[tuple[int, int], Partials] = {}

    def partials(self, rows: int, width: int) -> Partials:
        """Room for so many rows; the same at every call."""
        kept = self._partials.get((rows, width))
        if kept is None:
            count = rows * (width + 2)
            room = torch.empty(count, dtype=torch.float32, device=self.ends.device)
            kept = self._partials[rows, width] = Partials(room, rows * width)
        return kept


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
    device = lengths.device
    with tune.on(device):
        return scheduled(split, lengths, queries, starts, tune.dependent_launch(device), {})


def sequences_at_once(count: int) -> int:
    """Sequences whose tiles are counted together, in a batch of so many.

    >>> [sequences_at_once(count) for count in (0, 1, 16, 17, 9000)]
    [16, 16, 16, 32, 1024]
    """
    return min(1024, 1 << max(4, (count - 1).bit_length()))


def scheduled(
    split: WorkSplit,
    lengths: torch.Tensor,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    early: dict[str, Any],
    compiled: relaunch.Compiled,
) -> Schedule:
    """The same on the current device, by a launch with such options."""
    count = lengths.shape[0]
    ends = torch.empty((3, count + 1), dtype=torch.int32, device=lengths.device)
    span = sequences_at_once(count)
    relaunch.launch(
        count_tiles, (1, 1, 1), (lengths, queries if starts is None else starts, ends, count),
        {"SPLIT": split, "STARTS": starts is not None, "SPAN": span, "EARLY": early["EARLY"]},
        # One warp sums without waiting for others.
        {"num_warps": 1 if span <= 128 else 4, **early}, compiled,
    )  # fmt: skip
    return Schedule(ends, split)
