"""The interface of queues that copy runs on a device.

The classes are abstract, so that their callers can be tested without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing.run_grids import BlockIds, SpanPattern
from kvatlas.specs.cell_formats import ElementCast

Tables = Mapping[int, BlockIds]
"""Block ids by group."""


class AddressRuns(NamedTuple):
    """Runs between two addresses: one run for each combination of a start and a span.

    At the source and at the target, a run begins at address + start offset + span offset.
    """

    source: int
    target: int
    starts: tuple[Int64s, Int64s]
    """(Start offsets at the source, start offsets at the target). A queue uploads them once."""
    spans: tuple[Int64s, Int64s, Int64s]
    """(Span offsets at the source, span offsets at the target, lengths)."""
    cast: ElementCast | None = None
    """The cast of each element; None to copy bytes. With a cast, offsets count elements."""
    scales: Int64s | None = None
    """The index of each start's scale in the cast; None if all have the same scale."""

    def between(self, source: int, target: int) -> AddressRuns:
        """Return the same runs with `source` and `target` added to the two addresses."""
        return self._replace(source=self.source + source, target=self.target + target)

    @property
    def nbytes(self) -> int:
        """The number of bytes read, or the number of bytes written if that is larger."""
        count = len(self.starts[0]) * int(self.spans[2].sum())
        return count * (1 if self.cast is None else max(self.cast.items))


class AddressPattern(NamedTuple):
    """Runs between two addresses, complete except for the block ids that each request supplies."""

    source: int
    target: int
    pattern: SpanPattern
    blocks: int
    """The number of blocks of the source."""


class Posted(ABC):
    """Copy operations that were posted to a queue."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the device has completed the copies; raise an error if it has failed."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the copies are complete."""


class DeviceQueue(ABC):
    """A queue of copy operations on one device. They run in order on a separate stream."""

    @abstractmethod
    def after(self, event: int) -> None:
        """Make copies that are posted later wait for the last recording of an event."""

    @abstractmethod
    def after_caller(self) -> None:
        """Make copies that are posted later wait for the work on the caller's current stream."""

    @abstractmethod
    def post(self, runs: Sequence[AddressRuns]) -> Posted:
        """Queue copy operations for all runs, without waiting for their completion."""

    def converts(self, cast: ElementCast) -> bool:
        """Return whether runs with this cast can be posted."""
        del cast
        return False

    @abstractmethod
    def close(self) -> None:
        """Release the stream. Posted copies continue; nothing else can be posted."""

    def prepare(self, patterns: Sequence[AddressPattern]) -> PreparedRuns | None:
        """Prepare copy operations for requests that differ only in block ids.

        Return None if such a request has too many block ids.
        """
        return _PostedAsRuns(self, patterns)


class PreparedRuns(ABC):
    """Copy operations that were prepared for requests that differ only in block ids."""

    @abstractmethod
    def post(self, source: Tables, destination: Tables) -> Posted | None:
        """Queue a copy from the blocks with ids `source` to the blocks with ids `destination`.

        The copy runs after the work that is queued on the caller's current stream.

        The destination's ids must be valid. The source's ids come from a peer, as unsigned
        integers, and are not trusted: an id that is not below the number of source blocks is
        replaced by 0, so no memory outside the source pool is read. Return None, and copy nothing,
        if too many prepared copies are in flight.
        """


class _PostedAsRuns(PreparedRuns):
    """`PreparedRuns` for queues that prepare nothing: `post` computes the runs of a request."""

    def __init__(self, queue: DeviceQueue, patterns: Sequence[AddressPattern]) -> None:
        self._queue, self._patterns = queue, patterns

    def post(self, source: Tables, destination: Tables) -> Posted | None:
        """Compute the runs of one request and post them."""
        runs = []
        for read_at, write_at, pattern, blocks in self._patterns:
            known = {group: np.where(ids < blocks, ids, 0) for group, ids in source.items()}
            grid = pattern.grid(known, destination)
            starts, spans = (
                (grid.starts.source, grid.starts.destination),
                (grid.source, grid.destination, grid.length),
            )
            about = pattern.cast, grid.starts.scales
            runs.append(AddressRuns(read_at, write_at, starts, spans, *about))
        self._queue.after_caller()
        return self._queue.post(runs)
