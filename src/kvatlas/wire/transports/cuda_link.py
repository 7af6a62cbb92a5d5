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
from kvatlas.copying.pool_bounds import check_bounds
from kvatlas.routing import Copy, RequestShape
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.base import Done, Handle, Link, PreparedRead, Transport
from kvatlas.wire.transports.cuda_copy import CudaCopy
from kvatlas.wire.transports.cuda_prepared import CudaPreparedRead, MappedMemory, PeerMarks
from kvatlas.wire.transports.cuda_published import PublishedMemory
from kvatlas.wire.transports.offer_board import open_board
from kvatlas.wire.transports.opened_memory import ForeignAllocation, OpenedMemory
from kvatlas.wire.transports.pace import CopyPace


class _PoolRuns(NamedTuple):
    """Runs between a source pool and a destination pool, as offsets from the start of each pool.

    The addresses of the pools are looked up when the runs are launched.
    """

    src: int
    dst: int
    runs: AddressRuns


class CudaEnd(NamedTuple):
    """The resources that a link uses in this process."""

    driver: CudaDriver
    device: int
    opened: OpenedMemory
    queue: DeviceQueue
    pace: CopyPace
    marks_here: Callable[[], DeviceMarks | None]
    """Returns the peer's marks if the peer is in this process; otherwise None.

    The addresses of such a peer need no mapping.
    """


class CudaLink(Link):
    """A connection to the memory of one peer."""

    adds: ClassVar[bool] = True

    def __init__(
        self,
        owner: Transport,
        end: CudaEnd,
        published: PublishedMemory,
        theirs: Mapping[int, Memory],
    ) -> None:
        super().__init__(owner, theirs)
        self._end, self._queue = end, end.queue
        self._token, self._regions = published.token, published.regions
        self._allocations = [
            ForeignAllocation(published.token, one.handle, one.nbytes)
            for one in published.allocations
        ]
        self._handles, self._events = published.events, dict[int, int]()
        self._lock = threading.Lock()
        self.board = None if published.board is None else open_board(published.board)
        self._marks: PeerMarks | None = None
        """The peer's marks; None before their events are opened."""
        if end.marks_here() is None:
            # Map everything once, so that a stale handle raises an error here, not during a copy.
            for allocation in self._allocations:
                end.opened.acquire(allocation)
                end.opened.release(allocation)

    def follow(self, mark: int | None) -> None:
        """Make the queue wait for the mark on the device, without blocking the host."""
        if mark is not None and self.owner.marks is not None:
            self._queue.after(self.owner.marks.event(mark))

    def _event(self, number: int) -> int:
        here = self._end.marks_here()
        if here is not None:
            return here.event(number)
        with self._lock:
            if number not in self._events:
                driver, device = self._end.driver, self._end.device
                try:
                    self._events[number] = driver.open_event(device, self._handles[number])
                except DriverError as problem:
                    got = f"an event that can no longer be opened: {problem}"
                    raise errors.peer_lost(got) from problem
            return self._events[number]

    def read(
        self, copies: Sequence[Copy], after: int | None = None, *, lease: bytes = b""
    ) -> Handle:
        """Read runs with a kernel, which is launched once the peer's mark completes.

        No stream waits for the mark: if the peer died before it, that stream would wait forever,
        and with it every thread that synchronizes the GPU.
        """
        del lease
        self.check()
        copies = [copy for copy in copies if len(copy)]
        check_bounds(copies, self.theirs, self.mine)
        for copy in copies:
            self.owner.check_takes(self.mine[copy.dst_pool])
        if not self.converts(copies):
            casts = {str(copy.cast) for copy in copies if copy.cast is not None}
            problem = "The GPU does not support a cast, or a pool is not aligned to its elements"
            raise errors.failed(", ".join(sorted(casts)), 'Pass how="staged"', problem)
        told = [_runs_of(copy) for copy in copies]
        if after is None:
            return self._copy(told, lambda: True, write=False)
        self._event(after % EVENTS)  # open it now, so that a stale handle raises an error here
        return self._copy(told, lambda: self._passed(after), write=False)

    def converts(self, copies: Sequence[Copy]) -> bool:
        """Whether the GPU supports the element types, and the pools are aligned to them."""
        for copy in copies:
            cast = copy.cast
            if cast is not None:
                far, near = self._place(copy.src_pool), self.mine[copy.dst_pool].address
                if far % cast.source.item or near % cast.target.item:
                    return False
                if not self._queue.converts(cast):
                    return False
        return True

    def _place(self, pool: int) -> int:
        """Return a number with the same alignment as the address of a peer's pool.

        It is the offset in the allocation, unless the peer is in this process.
        """
        here = self._end.marks_here() is not None
        return self.theirs[pool].address if here else self._regions[pool].offset

    def prepare(self, shape: RequestShape) -> PreparedRead | None:
        """Prepare reads of requests of one shape.

        Return None if a block of the shape is outside its pool, or the link prepares nothing.
        """
        self.check()
        regions, ends = (self.theirs, self.mine), (shape.src, shape.dst)
        for pattern in shape.patterns:
            for end, pool in enumerate(pattern.pools):
                first, stop = pattern.reach(end, ends[end].blocks[pool])
                if pool not in regions[end] or first < 0 or stop > regions[end][pool].nbytes:
                    return None
        return self._prepared(shape)

    def _prepared(self, shape: RequestShape) -> PreparedRead | None:
        end = self._end
        if self.board is None or end.marks_here() is not None:
            return None  # only peers in other processes, with a board, have PeerMarks
        if self._marks is None:
            events = [self._event(number) for number in range(EVENTS)]
            for event in events:  # the first query of an event is slow
                end.driver.finished(end.device, event)
            self._marks = PeerMarks(end.driver, end.device, self.board, events)
        used = {self._regions[one.pools[0]].allocation for one in shape.patterns}
        memory = MappedMemory(end.opened, [])
        try:
            for number in sorted(used):
                memory.allocations.append(end.opened.map(self._allocations[number]))
            at = {one.allocation: one.address for one in memory.allocations}
            patterns = []
            for pattern in shape.patterns:
                region, mine = self._regions[pattern.pools[0]], self.mine[pattern.pools[1]]
                source = at[self._allocations[region.allocation]] + region.offset
                blocks = shape.src.blocks[pattern.pools[0]]
                patterns.append(AddressPattern(source, mine.address, pattern, blocks))
            runs = self._queue.prepare(patterns)
        finally:
            memory.let_go()
        if runs is None:
            return None
        return CudaPreparedRead(runs, memory, self._marks, end.pace, self.check, shape.nbytes)

    def mapped(self, pools: Iterable[int]) -> tuple[dict[int, int], Callable[[], None]]:
        """Map the peer's pools. Return their addresses, and a function that unmaps them."""
        used: list[ForeignAllocation] = []
        try:
            return {p: self._address(p, used) for p in pools}, lambda: self._unused(used)
        except BaseException:
            self._unused(used)
            raise

    def _passed(self, mark: int) -> bool:
        """Whether a mark of the peer has completed."""
        here = self._end.marks_here()
        known = here.done if here is not None else self.board.marks_done if self.board else -1
        if mark <= known:
            return True
        try:
            return self._end.driver.finished(self._end.device, self._event(mark % EVENTS))
        except DriverError as problem:
            raise errors.peer_lost(f"an event that cannot be queried: {problem}") from problem

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        told = [_runs_of(copy) for copy in copies]
        return self._copy(told, lambda: True, write=write)

    def _copy(self, told: list[_PoolRuns], may_begin: Callable[[], bool], *, write: bool) -> Handle:
        if not told:
            return Done()
        launch = partial(self._launch, told, write=write)
        copy = CudaCopy(
            launch,
            may_begin,
            self.check,
            self._end.pace,
            lambda: sum(one.runs.nbytes for one in told),
        )
        copy.begin()
        return copy

    def _launch(self, told: list[_PoolRuns], *, write: bool) -> tuple[Posted, Callable[[], None]]:
        """Launch the runs. Return the posted work, and a function to call once it has ended."""
        far, over = self.mapped({one.dst if write else one.src for one in told})
        try:
            near = {pool: at.address for pool, at in self.mine.items()}
            src, dst = (near, far) if write else (far, near)
            runs = [one.runs.between(src[one.src], dst[one.dst]) for one in told]
            return self._queue.post(runs), over
        except BaseException:
            over()
            raise

    def _address(self, pool: int, used: list[ForeignAllocation]) -> int:
        """Map a region of the peer, and return its address in this process.

        It stays mapped until its allocation, which is appended to `used`, is released.
        """
        if self._end.marks_here() is not None:
            return self.theirs[pool].address
        region = self._regions[pool]
        allocation = self._allocations[region.allocation]
        base = self._end.opened.acquire(allocation)
        used.append(allocation)
        return base + region.offset

    def _unused(self, used: list[ForeignAllocation]) -> None:
        while used:
            self._end.opened.release(used.pop())

    def _close(self) -> None:
        """Unmap the peer's memory once no copy reads it."""
        self._queue.close()
        self._end.opened.forget(self._token)
        if self.board is not None:
            self.board.close()
        with self._lock:
            events, self._events = self._events, {}
        for event in events.values():
            with suppress(DriverError):
                self._end.driver.end_event(self._end.device, event)


def _runs_of(copy: Copy) -> _PoolRuns:
    spans = (copy.src, copy.dst, copy.length)
    runs = AddressRuns(0, 0, copy.starts.ends, spans, copy.cast, copy.starts.scales)
    return _PoolRuns(copy.src_pool, copy.dst_pool, runs)
