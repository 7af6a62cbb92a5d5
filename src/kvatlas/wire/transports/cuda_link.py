"""A link of the transport `cuda`: a peer's memory as it is mapped here, and copies out of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar, NamedTuple

from kvatlas.geometry import Int64s
from kvatlas.routing import Copy, RunGrid
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.base import (
    Done,
    Handle,
    Link,
    Memory,
    Transport,
)
from kvatlas.wire.transports.bounds import check_grid_bounds
from kvatlas.wire.transports.cuda_driver import CudaDriver, DriverError
from kvatlas.wire.transports.cuda_published import PublishedMemory
from kvatlas.wire.transports.device_marks import EVENTS, DeviceMarks
from kvatlas.wire.transports.device_queue import NO_STARTS, AddressRuns, DeviceQueue, Posted
from kvatlas.wire.transports.offer_board import SeenOffer, open_board
from kvatlas.wire.transports.opened_memory import ForeignAllocation, OpenedMemory
from kvatlas.wire.transports.pace import CopyPace

_Told = tuple[int, int, tuple[Int64s, Int64s], tuple[Int64s, Int64s, Int64s]]
"""Pools at either end, starts, and spans."""

_SPIN = 2e-3
"""Seconds for which a copy is looked at without a pause."""


class CudaEnd(NamedTuple):
    """What a link has of its own end."""

    driver: CudaDriver
    device: int
    opened: OpenedMemory
    queue: DeviceQueue
    pace: CopyPace
    marks_here: Callable[[], DeviceMarks | None]
    """The marks of a peer of this process, whose addresses are good as they are; else None."""


class CudaLink(Link):
    """The memory of one peer."""

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
        self._board = None if published.board is None else open_board(published.board)
        self.sees_offers = self._board is not None
        if end.marks_here() is None:
            # Opened now, so that a handle which is stale is refused before anything moves.
            for allocation in self._allocations:
                end.opened.acquire(allocation)
                end.opened.release(allocation)

    def find_offer(self, request: str) -> SeenOffer | None:
        """On the peer's board, where this process can see it."""
        return None if self._board is None else self._board.find(request)

    def follow(self, mark: int | None) -> None:
        """The queue waits on the device, and no host does."""
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
                    got = f"an event whose handle opens no more: {problem}"
                    raise errors.peer_lost(got) from problem
            return self._events[number]

    def read_grids(self, grids: Sequence[RunGrid], behind: int | None = None) -> Handle:
        """Read runs that are sums: the kernel adds. It is launched once the peer's mark is done.

        No stream waits for that: were the peer to die before, it would wait for ever, and so
        would whoever waits for all that this process's GPU has to do.
        """
        self.check()
        check_grid_bounds(grids, self.theirs, self.mine)
        told = [
            (grid.src_pool, grid.dst_pool, (grid.starts.src, grid.starts.dst),
             (grid.src, grid.dst, grid.length))
            for grid in grids
        ]  # fmt: skip
        if behind is None:
            return self._copy(told, lambda: True, write=False)
        event = self._event(behind % EVENTS)
        return self._copy(told, lambda: self._finished(event), write=False)

    def _finished(self, event: int) -> bool:
        try:
            return self._end.driver.finished(self._end.device, event)
        except DriverError as problem:
            raise errors.peer_lost(f"an event that cannot be looked at: {problem}") from problem

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        told = [(c.src_pool, c.dst_pool, NO_STARTS, (c.src, c.dst, c.length)) for c in copies]
        return self._copy(told, lambda: True, write=write)

    def _copy(self, told: list[_Told], may_begin: Callable[[], bool], *, write: bool) -> Handle:
        if not told:
            return Done()
        launch = partial(self._launch, told, write=write)
        nbytes = partial(_told_bytes, told)
        copy = _CudaCopy(launch, may_begin, self.check, self._end.pace, nbytes)
        copy.begin()
        return copy

    def _launch(self, told: list[_Told], *, write: bool) -> tuple[Posted, Callable[[], None]]:
        """Launch copies; they, and what to call once they are over."""
        pools = {dst if write else src for src, dst, _, _ in told}
        used: list[ForeignAllocation] = []
        try:
            far = {pool: self._address(pool, used) for pool in pools}
            near = {pool: at.address for pool, at in self.mine.items()}
            src, dst = (near, far) if write else (far, near)
            runs = [AddressRuns(src[a], dst[b], starts, spans) for a, b, starts, spans in told]
            return self._queue.post(runs), lambda: self._unused(used)
        except BaseException:
            self._unused(used)
            raise

    def _address(self, pool: int, used: list[ForeignAllocation]) -> int:
        """Where a region of the peer is in this process, which stays mapped while it is used."""
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
        """Unmap what the peer has, once no copy reads it."""
        self._end.opened.forget(self._token)
        if self._board is not None:
            self._board.close()
        with self._lock:
            events, self._events = self._events, {}
        for event in events.values():
            with suppress(DriverError):
                self._end.driver.end_event(self._end.device, event)


def _told_bytes(told: list[_Told]) -> int:
    return sum(len(starts[0]) * int(length.sum()) for _, _, starts, (_, _, length) in told)


class _CudaCopy(Handle):
    """A copy that the GPU carries out; once it was launched, nothing ends it before its time."""

    def __init__(
        self,
        launch: Callable[[], tuple[Posted, Callable[[], None]]],
        may_begin: Callable[[], bool],
        check: Callable[[], None],
        pace: CopyPace,
        nbytes: Callable[[], int],
    ) -> None:
        self._launch, self._may_begin, self._check = launch, may_begin, check
        self._pace, self._launched, self._nbytes = pace, 0.0, nbytes
        self._posted: Posted | None = None
        self._over: Callable[[], None] = lambda: None
        self._given_up = False
        self._begun = time.monotonic()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Launch it if that may be now."""
        with self._lock:
            if self._posted is not None or self._given_up:
                return
            if self._may_begin() and self._pace.may_begin():
                self._begun = self._launched = time.monotonic()
                self._posted, self._over = self._launch()

    def _poll(self) -> bool:
        if self._posted is None:
            self._check()  # the events of a link that was closed are gone
        self.begin()
        if self._is_over():
            return True
        self._check()
        return False

    def _is_over(self) -> bool:
        """Whether it was launched and has ended."""
        posted = self._posted
        if posted is None:
            return False
        try:
            over = posted.done()
        except Exception:
            # The device has failed, and with it all that this process had it do.
            self._over()
            raise
        if over:
            self._over()
            launched, self._launched = self._launched, 0.0
            if launched:
                self._pace.took(launched, time.monotonic(), self._nbytes())
        return over

    def _pause(self, seconds: float) -> None:
        """A gigabyte takes half a millisecond, and the shortest sleep a tenth of one."""
        super()._pause(0.0 if time.monotonic() - self._begun < _SPIN else seconds)

    def _release(self) -> None:
        """Never launched, if it was not yet."""
        self._given_up = True

    def _settle(self) -> bool:
        """Over where the device says so or has failed, or where it is never launched."""
        with self._lock:
            if self._posted is None:
                return self._given_up or self._failure is not None
        try:
            return self._is_over()
        except Exception:
            return True
