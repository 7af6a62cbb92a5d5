"""A link of the `cuda` transport: a peer's memory mapped into this process, and copies from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar, NamedTuple

from kvatlas.copying.cuda_driver import CudaDriver, DriverError
from kvatlas.copying.device_marks import EVENTS, DeviceMarks
from kvatlas.copying.device_queue import (
    AddressPattern,
    AddressRuns,
    DeviceQueue,
    Posted,
)
from kvatlas.copying.memory import Memory
from kvatlas.routing import Copy, RequestShape
from kvatlas.specs.cell_formats import ElementCast
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.base import Link, PreparedRead, Transport
from kvatlas.wire.transports.cuda_copy import CopyPace, CudaCopy, CudaPreparedRead
from kvatlas.wire.transports.cuda_published import PublishedMemory
from kvatlas.wire.transports.handles import Handle
from kvatlas.wire.transports.offer_board import PeerBoard, open_board
from kvatlas.wire.transports.opened_memory import (
    ForeignAllocation,
    MappedAllocation,
    OpenedMemory,
)


class CudaEnd(NamedTuple):
    """The resources that a link uses in this process."""

    driver: CudaDriver
    device: int
    opened: OpenedMemory
    queue: DeviceQueue
    pace: CopyPace
    marks_here: Callable[[], DeviceMarks | None]
    """Returns the peer's GPU events if the peer is in this process; otherwise None.

    The addresses of such a peer need no mapping.
    """


class _PeerMarks:
    """The GPU events of a peer. Each is opened over CUDA IPC when it is first needed."""

    def __init__(self, end: CudaEnd, handles: Sequence[bytes], board: PeerBoard | None) -> None:
        self._end, self._handles, self._board = end, handles, board
        self._events: dict[int, int] = {}
        self._lock = threading.Lock()

    def passed(self, mark: int | None) -> bool:
        """Whether the peer's GPU event `mark` has completed; True for None."""
        if mark is None:
            return True
        if (here := self._end.marks_here()) is not None:
            return here.passed(mark)
        if self._board is not None and mark <= self._board.marks_done:
            return True
        try:
            return self._end.driver.finished(self._end.device, self.open(mark))
        except DriverError as problem:
            raise errors.peer_lost(f"an event that cannot be queried: {problem}") from problem

    def open(self, mark: int) -> int:
        """Return the CUDA event for a mark that a peer in another process recorded."""
        number = mark % EVENTS
        with self._lock:
            if number not in self._events:
                driver, device = self._end.driver, self._end.device
                try:
                    self._events[number] = driver.open_event(device, self._handles[number])
                except DriverError as problem:
                    got = f"an event that can no longer be opened: {problem}"
                    raise errors.peer_lost(got) from problem
            return self._events[number]

    def warm_up(self) -> None:
        """Open and query all events now, because the first use of an event is slow."""
        if len(self._events) < EVENTS:
            for number in range(EVENTS):
                self._end.driver.finished(self._end.device, self.open(number))

    def close(self) -> None:
        """Close the events."""
        with self._lock:
            events, self._events = self._events, {}
        for event in events.values():
            with suppress(DriverError):
                self._end.driver.end_event(self._end.device, event)


class CudaLink(Link):
    """A connection to the memory of one peer."""

    adds: ClassVar[bool] = True

    def __init__(
        self,
        owner: Transport,
        end: CudaEnd,
        published: PublishedMemory,
        peer_memory: Mapping[int, Memory],
    ) -> None:
        super().__init__(owner, peer_memory)
        self._end, self._queue = end, end.queue
        self._token, self._regions = published.token, published.regions
        self._allocations = [
            ForeignAllocation(published.token, one.handle, one.nbytes)
            for one in published.allocations
        ]
        self.board = None if published.board is None else open_board(published.board)
        self._marks = _PeerMarks(end, published.events, self.board)
        if end.marks_here() is None:
            # Map everything once, so that a stale handle raises an error here, not during a copy.
            for one in self._allocations:
                end.opened.release([end.opened.map(one)])

    def follow(self, mark: int | None) -> None:
        """Make later copies wait on the GPU for an event of this process. Does not block."""
        if mark is not None and self.owner.marks is not None:
            self._queue.after(self.owner.marks.event(mark))

    def _read(self, copies: Sequence[Copy], after: int | None, lease: bytes) -> Handle:
        """Read runs with a kernel, which is launched once the peer's GPU event `after` completes.

        The host polls the event. If a stream waited for the event and the peer died first, the
        stream would wait forever, and so would every thread that synchronizes the GPU.
        """
        del lease
        runs = [_runs_of(copy) for copy in copies]
        pools = [(copy.source_pool, copy.destination_pool) for copy in copies]
        launch, may_begin = partial(self._launch, runs, pools), partial(self._marks.passed, after)

        def nbytes() -> int:
            return sum(one.nbytes for one in runs)

        copy = CudaCopy(launch, may_begin, self.check, self._end.pace, nbytes)
        copy.begin()
        return copy

    def converts(self, copies: Sequence[Copy]) -> bool:
        """Whether the GPU supports the element types, and the pools are aligned to the elements."""
        return all(
            self._can_cast(copy.cast, copy.source_pool, copy.destination_pool) for copy in copies
        )

    def _can_cast(self, cast: ElementCast | None, source: int, destination: int) -> bool:
        """Whether `cast` is possible between two pools; True if `cast` is None."""
        if cast is None:
            return True
        far, near = self._alignment(source), self.own_memory[destination].address
        aligned = not far % cast.source.item and not near % cast.target.item
        return aligned and self._queue.converts(cast)

    def _alignment(self, pool: int) -> int:
        """Return a number with the same alignment as the address of a peer's pool.

        The number is the pool's offset in its allocation, or its address if the peer is in this
        process.
        """
        here = self._end.marks_here() is not None
        return self.peer_memory[pool].address if here else self._regions[pool].offset

    def prepare(self, shape: RequestShape) -> PreparedRead | None:
        """Prepare reads for requests that differ only in block ids.

        Return None if a run could leave its pool, if the GPU does not support a cast, or if this
        link has no fast path.
        """
        self.check()
        regions, ends = (self.peer_memory, self.own_memory), (shape.source, shape.destination)
        for pattern in shape.patterns:
            for end, pool in enumerate(pattern.pools):
                first, stop = pattern.reach(end, ends[end].blocks[pool])
                if pool not in regions[end] or first < 0 or stop > regions[end][pool].nbytes:
                    return None
            if not self._can_cast(pattern.cast, *pattern.pools):
                return None
        return self._prepared(shape)

    def _prepared(self, shape: RequestShape) -> PreparedRead | None:
        end = self._end
        if self.board is None or end.marks_here() is not None:
            return None  # without a board, or in one process, waiting for marks is slow
        self._marks.warm_up()
        pools = {pattern.pools[0] for pattern in shape.patterns}
        mapped: list[MappedAllocation] = []
        try:
            addresses = self._map(pools, mapped)
            patterns = []
            for pattern in shape.patterns:
                source, mine = pattern.pools[0], self.own_memory[pattern.pools[1]]
                blocks = shape.source.blocks[source]
                patterns.append(AddressPattern(addresses[source], mine.address, pattern, blocks))
            runs = self._queue.prepare(patterns)
        finally:
            end.opened.release(mapped)
        if runs is None:
            return None
        about = (end.opened, mapped, self._marks.passed, end.pace, self.check)
        return CudaPreparedRead(runs, *about, sum(one.nbytes for one in shape.patterns))

    def _launch(
        self, runs: Sequence[AddressRuns], pools: Sequence[tuple[int, int]]
    ) -> tuple[Posted, Callable[[], None]]:
        """Launch runs between pools. Return (posted work, function to call after its end).

        `pools` contains (source pool, destination pool) for each item of `runs`. The offsets of the
        runs are relative to these pools. The peer is the source.
        """
        mapped: list[MappedAllocation] = []
        unused = partial(self._end.opened.release, mapped)
        try:
            far = self._map({source for source, _ in pools}, mapped)
            placed = [
                one.between(far[source], self.own_memory[destination].address)
                for one, (source, destination) in zip(runs, pools, strict=True)
            ]
            return self._queue.post(placed), unused
        except BaseException:
            unused()
            raise

    def _map(self, pools: Iterable[int], mapped: list[MappedAllocation]) -> dict[int, int]:
        """Map regions of the peer. Return their addresses in this process, by pool index.

        The regions stay mapped until their allocations, which are appended to `mapped`, are
        released.
        """
        if self._end.marks_here() is not None:
            return {pool: self.peer_memory[pool].address for pool in pools}
        addresses = {}
        for pool in pools:
            region = self._regions[pool]
            mapped.append(self._end.opened.map(self._allocations[region.allocation]))
            addresses[pool] = mapped[-1].address + region.offset
        return addresses

    def _close(self) -> None:
        """Unmap the peer's memory once no copy reads it."""
        self._queue.close()
        self._end.opened.forget(self._token)
        if self.board is not None:
            self.board.close()
        self._marks.close()


def _runs_of(copy: Copy) -> AddressRuns:
    spans = (copy.source, copy.destination, copy.length)
    return AddressRuns(0, 0, copy.starts.ends, spans, copy.cast, copy.starts.scales)
