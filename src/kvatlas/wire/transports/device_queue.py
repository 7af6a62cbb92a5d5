"""Copies that a device is told to do in order, and how they are told.

An interface, so that everything above it runs without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing.run_grids import BlockIds, SpanPattern
from kvatlas.specs.cell_formats import ElementCast

NO_STARTS = (np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
"""For runs that are told one by one: each span is one."""


Tables = Mapping[int, BlockIds]
"""Block ids by group."""


class AddressRuns(NamedTuple):
    """Runs between two addresses, at every sum of a start and a span."""

    source: int
    target: int
    starts: tuple[Int64s, Int64s]
    """Offsets at the source and at the target; kept on the device as long as they are used."""
    spans: tuple[Int64s, Int64s, Int64s]
    """Offsets at either end, and lengths."""
    cast: ElementCast | None = None
    """How elements change on the way: starts and spans are then counted in elements."""
    scales: Int64s | None = None
    """Which of the cast's scales each start has, where there are several."""

    def between(self, source: int, target: int) -> AddressRuns:
        """The same runs, counted from addresses that were not known before."""
        return self._replace(source=self.source + source, target=self.target + target)

    @property
    def nbytes(self) -> int:
        """Bytes that are read, or written where those are more."""
        count = len(self.starts[0]) * int(self.spans[2].sum())
        return count * (1 if self.cast is None else max(self.cast.items))


class AddressPattern(NamedTuple):
    """Runs between two addresses that only lack block ids."""

    source: int
    target: int
    pattern: SpanPattern
    blocks: int
    """How many blocks the source has."""


class Posted(ABC):
    """Work that a queue was given."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the device has done it; raises where the device has failed."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it is done."""


class DeviceQueue(ABC):
    """A stream of its own on one device: what it is given is done in that order."""

    @abstractmethod
    def after(self, event: int) -> None:
        """What is posted from now on comes after what the event was last recorded behind."""

    @abstractmethod
    def after_caller(self) -> None:
        """What is posted from now on comes after what the caller's current stream has to do."""

    @abstractmethod
    def post(self, runs: Sequence[AddressRuns]) -> Posted:
        """Copy; nobody waits."""

    def converts(self, cast: ElementCast) -> bool:
        """Whether runs whose elements change so can be posted."""
        del cast
        return False

    @abstractmethod
    def close(self) -> None:
        """Give its stream back; what was posted goes on, and nothing more can be."""

    def prepare(self, patterns: Sequence[AddressPattern]) -> PreparedRuns | None:
        """Get ready to copy the same runs of many requests; None where they are too many."""
        return _PostedAsRuns(self, patterns)


class PreparedRuns(ABC):
    """Runs of requests that differ in their block ids alone."""

    @abstractmethod
    def post(self, src: Tables, dst: Tables) -> Posted | None:
        """Copy between blocks of two tables, behind what the caller's current stream has to do.

        Block ids of the destination were checked. Those of the source may be anything: whatever
        is none of its blocks is taken for the first, so that no other memory is touched.
        None where too many such copies are under way: nothing is done then.
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
