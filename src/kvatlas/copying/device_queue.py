"""Queues of copies on a device.

It is an interface, so that the code above it runs without a GPU.
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
    """Runs between two addresses, one for each sum of a start and a span."""

    source: int
    target: int
    starts: tuple[Int64s, Int64s]
    """Start offsets at the source and the target; kept on the device while in use."""
    spans: tuple[Int64s, Int64s, Int64s]
    """Span offsets at the source and the target, and lengths."""
    cast: ElementCast | None = None
    """How elements are cast, if they are. Starts and spans then count elements."""
    scales: Int64s | None = None
    """The index of each start's scale in the cast, if there are several."""

    def between(self, source: int, target: int) -> AddressRuns:
        """Return the same runs relative to other addresses."""
        return self._replace(source=self.source + source, target=self.target + target)

    @property
    def nbytes(self) -> int:
        """The bytes read, or the bytes written if those are more."""
        count = len(self.starts[0]) * int(self.spans[2].sum())
        return count * (1 if self.cast is None else max(self.cast.items))


class AddressPattern(NamedTuple):
    """Runs between two addresses that lack only block ids."""

    source: int
    target: int
    pattern: SpanPattern
    blocks: int
    """The number of blocks of the source."""


class Posted(ABC):
    """Work that was posted to a queue."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the device has completed it. Raises an error if the device has failed."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it is complete."""


class DeviceQueue(ABC):
    """A separate stream on one device, which runs its work in order."""

    @abstractmethod
    def after(self, event: int) -> None:
        """Order later work after the last recorded work of an event."""

    @abstractmethod
    def after_caller(self) -> None:
        """Order later work after the work queued on the caller's current stream."""

    @abstractmethod
    def post(self, runs: Sequence[AddressRuns]) -> Posted:
        """Queue copies without waiting for them."""

    def converts(self, cast: ElementCast) -> bool:
        """Whether runs with this cast can be posted."""
        del cast
        return False

    @abstractmethod
    def close(self) -> None:
        """Return the stream. Posted work continues, and nothing more can be posted."""

    def prepare(self, patterns: Sequence[AddressPattern]) -> PreparedRuns | None:
        """Prepare to copy the same runs for many requests. Return None if there are too many."""
        return _PostedAsRuns(self, patterns)


class PreparedRuns(ABC):
    """Prepared runs of requests that differ only in block ids."""

    @abstractmethod
    def post(self, src: Tables, dst: Tables) -> Posted | None:
        """Copy between blocks of two tables, after the work queued on the caller's current stream.

        The destination's block ids must be valid. The source's may be anything: an invalid id is
        replaced by the first block, so that no other memory is accessed. Returns None, and does
        nothing, if too many such copies are in flight.
        """


class _PostedAsRuns(PreparedRuns):
    """Runs that are made when they are posted, for queues that prepare nothing."""

    def __init__(self, queue: DeviceQueue, patterns: Sequence[AddressPattern]) -> None:
        self._queue, self._patterns = queue, patterns

    def post(self, src: Tables, dst: Tables) -> Posted | None:
        """Make them, and post them."""
        runs = []
        for source, target, pattern, blocks in self._patterns:
            known = {group: np.where(ids < blocks, ids, 0) for group, ids in src.items()}
            grid = pattern.grid(known, dst)
            starts, spans = (grid.starts.src, grid.starts.dst), (grid.src, grid.dst, grid.length)
            runs.append(AddressRuns(source, target, starts, spans))
        self._queue.after_caller()
        return self._queue.post(runs)
