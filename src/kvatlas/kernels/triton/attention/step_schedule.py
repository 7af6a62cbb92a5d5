"""Schedule of a step: query offsets and tile counts, which all layers of the step share.

A kernel with one program computes the schedule from lengths and query counts on the device. No step
waits for the host, so a captured graph can be replayed with other lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvatlas.kernels.triton import relaunch, tune
from kvatlas.kernels.triton.attention.schedule_device import count_tiles


class WorkSplit(NamedTuple):
    """The division of a batch into tiles, which must be the same in the schedule and kernels."""

    group: int
    """Query heads per kv head."""
    few: int
    """Maximum query rows of a sequence for the decode kernel; with more, prefill is used."""
    tile: int
    """States per tile of the decode kernel."""
    rows: int
    """Query rows per tile of the prefill kernel."""
    align: int
    """A walk over states must start at a multiple of this."""
    mask: str = "causal"
    """Visibility of queries: `causal`, `window`, `chunk`, `sinks` or `full`."""
    size: int = 0
    """Size of the window or chunk."""
    sink_tokens: int = 0


class Partials(NamedTuple):
    """Buffer for the partial results of sequences that several workers share."""

    room: torch.Tensor
    """The weighted sums of all rows, then a (maximum, total) pair for each row."""
    tops: int
    """Offset of the first (maximum, total) pair, in elements."""


class Schedule:
    """The work of a batch, on the device, shared by all layers of a kind in a step.

    It also holds the buffer for partial sums, so layers that share a schedule must run one after
    the other, on one stream. Keep the schedule alive while a graph that uses it may be replayed.
    """

    def __init__(self, ends: torch.Tensor, split: WorkSplit) -> None:
        """Create a schedule from `ends` [3, sequences + 1].

        Its rows are cumulative counts of queries, of decode tiles and of prefill tiles.
        """
        self.ends, self.split = ends, split
        self.sequences = ends.shape[1] - 1
        self._partials: dict[tuple[int, int], Partials] = {}

    def partials(self, rows: int, width: int) -> Partials:
        """Return the buffer for `rows` partial results of `width` columns each; created once."""
        kept = self._partials.get((rows, width))
        if kept is None:
            count = rows * (width + 2)
            room = torch.empty(count, dtype=torch.float32, device=self.ends.device)
            kept = self._partials[rows, width] = Partials(room, rows * width)
        return kept


def fit_of(states: int, tile: int) -> tuple[str, int]:
    """Return (fit, alignment) for pages of `states` states and tiles of `tile` states.

    A state is a cached token. `fit` specifies whether a tile consists of whole pages, or a page
    consists of whole tiles, or neither. A loop over the states of a sequence must start at a
    multiple of `alignment`.

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
    """Compute the schedule of a batch on the device, from query counts or query starts."""
    device = lengths.device
    with tune.on(device):
        return scheduled(split, lengths, queries, starts, tune.dependent_launch(device), {})


def sequences_at_once(count: int) -> int:
    """Return how many sequences the schedule kernel processes at a time, for a batch of `count`.

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
    """Return the schedule of a batch, like `schedule`, with the given launch options.

    The device of the tensors must be the current one.
    """
    count = lengths.shape[0]
    ends = torch.empty((3, count + 1), dtype=torch.int32, device=lengths.device)
    span = sequences_at_once(count)
    relaunch.launch(
        count_tiles, (1, 1, 1), (lengths, queries if starts is None else starts, ends, count),
        {"SPLIT": split, "STARTS": starts is not None, "SPAN": span, "EARLY": early["EARLY"]},
        # A single warp needs no synchronisation to compute cumulative sums.
        {"num_warps": 1 if span <= 128 else 4, **early}, compiled,
    )  # fmt: skip
    return Schedule(ends, split)
