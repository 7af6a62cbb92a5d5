"""Between processes of one host: caches in a GPU's memory, mapped by CUDA IPC, copied by a kernel.

What an end publishes are handles of the allocations that its pools lie in (a framework's
allocator may have put much else there), where in them the pools are, and handles of events.
Whoever connects maps each allocation once. A transfer is then a launch for every kind of run
that a route has, mostly one, that reads the peer's pages in their order and writes this end's
in its own: nothing is staged, and nothing passes through the host.

The copy comes behind the kernels that filled the peer's blocks: it is launched once an event
which the peer recorded when it offered them is seen to be done. That the blocks were held until the
last byte was read is confirmed afterwards by the lease, as over every wire: the memory of a
process that has freed it, or died, may be mapped and read here, and whether it is, and what is
in it, CUDA leaves undefined.
"""

from __future__ import annotations

import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s
from kvatlas.routing import Copy, RunGrid
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.base import (
    HOST,
    Done,
    Handle,
    Link,
    Memory,
    Shared,
    Transport,
    check_grid_bounds,
)
from kvatlas.wire.transports.cuda_driver import (
    HANDLE_BYTES,
    NO_STARTS,
    UUID_BYTES,
    AddressRuns,
    CudaDriver,
    DriverError,
    Posted,
    load_driver,
)
from kvatlas.wire.transports.device_marks import EVENTS
from kvatlas.wire.transports.opened_memory import ForeignAllocation, OpenedMemory

_Told = tuple[int, int, tuple[Int64s, Int64s], tuple[Int64s, Int64s, Int64s]]
"""Pools at either end, starts, and spans."""

_SPIN = 2e-3
"""Seconds for which a copy is looked at without a pause."""
_TOKEN = re.compile(r"[0-9a-f]{32}")
_MAX_ALLOCATIONS = 1024

_here: weakref.WeakValueDictionary[str, CudaTransport] = weakref.WeakValueDictionary()
"""The transports of this process by token: CUDA opens no handle in the process that made it."""


class _Region(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    allocation: int
    offset: int
    nbytes: int


class _Allocation(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    handle: bytes
    nbytes: int


class _Published(msgspec.Struct, tag="cuda", forbid_unknown_fields=True):
    host: str
    token: str
    device: bytes
    allocations: list[_Allocation]
    regions: dict[int, _Region]
    events: list[bytes]


class CudaTransport(Transport):
    """Moves bytes between pools in the memory of GPUs of one host.

    A copy keeps at most `multiprocessors` of the GPU busy, where it is not 0: what else runs
    there goes on meanwhile. All regions of one transport are on one GPU; the two ends of a
    link may be on two, where one can reach the other's memory.
    """

    name: ClassVar[str] = "cuda"
    marks_travel: ClassVar[bool] = True

    def __init__(
        self,
        *,
        multiprocessors: int = 0,
        shared: Shared = "all",
        driver: CudaDriver | None = None,
    ) -> None:
        super().__init__(shared=shared)
        if not isinstance(multiprocessors, int) or multiprocessors < 0:
            got = f"multiprocessors={multiprocessors!r}"
            raise errors.failed(got, hint="Give a number of multiprocessors, or 0 for all")
        self._driver = driver or load_driver()
        self.multiprocessors = multiprocessors
        self.token = secrets.token_hex(16)
        self.device = -1
        """The number of the GPU that the regions are on; -1 before there are any."""
        self._allocations: dict[int, _Allocation] = {}
        self._regions: dict[int, _Region] = {}
        self._opened: OpenedMemory | None = None

    @property
    def driver(self) -> CudaDriver:
        """CUDA's driver."""
        return self._driver

    @property
    def opened(self) -> OpenedMemory:
        """What is mapped of peers."""
        if self._opened is None:
            raise errors.failed("no memory of this end", hint="Register it before connecting")
        return self._opened

    def takes(self, device: str) -> bool:
        """GPUs alone: it has nothing to do on the host."""
        return device != HOST

    def register(self, memory: Mapping[int, Memory]) -> None:
        """Make regions of one GPU known."""
        for region in memory.values():
            self.check_takes(region)
        devices = {region.number for region in memory.values()} | {self.device} - {-1}
        count = len(self._driver.devices())
        if len(devices) > 1 or any(number >= count for number in devices):
            raise AtlasError(
                Code.WRONG_DEVICE,
                "The regions of a transport are on one GPU that is there",
                got=f"GPUs {sorted(devices)} of {count}",
                hint="Make a transport for every GPU, and look at CUDA_VISIBLE_DEVICES",
            )
        self.device = max(devices, default=self.device)
        super().register(memory)

    def _register(self, memory: Mapping[int, Memory]) -> None:
        if self._opened is None:
            self._opened = OpenedMemory(self._driver, self.device)
        for pool, region in memory.items():
            if self.shares(pool):
                self._regions[pool] = self._located(region)
        _here[self.token] = self

    def _located(self, region: Memory) -> _Region:
        """A region in its allocation, of which there is a handle."""
        try:
            base, nbytes = self._driver.allocation(self.device, region.address)
            if base not in self._allocations:
                handle = self._driver.export_memory(self.device, base)
                self._allocations[base] = _Allocation(handle, nbytes)
        except DriverError as problem:
            raise AtlasError(
                Code.WRONG_DEVICE,
                "CUDA gives no handle of this memory to other processes",
                got=f"{region.nbytes:,} bytes on {region.device}: {problem}",
                hint="Allocate it with cudaMalloc: no expandable segments, no managed memory",
            ) from problem
        offset = region.address - base
        if offset + region.nbytes > nbytes:
            got = f"{region.nbytes:,} bytes from byte {offset:,} of an allocation of {nbytes:,}"
            raise AtlasError(
                Code.OUT_OF_BOUNDS, got=got, hint="Pass the memory as it was allocated"
            )
        return _Region(list(self._allocations).index(base), offset, region.nbytes)

    def publish(self) -> bytes:
        """Handles of its allocations and events, and where its regions are."""
        self.check()
        if self.marks is None:
            raise errors.failed("no memory of this end", hint="Register it before publishing")
        return errors.write_metadata(
            _Published(
                _host(),
                self.token,
                self._driver.devices()[self.device],
                list(self._allocations.values()),
                self._regions,
                list(self.marks.export()),
            )
        )

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """Map a peer's allocations."""
        published = errors.read_metadata(metadata, _Published)
        _check_form(published, memory)
        if published.host != _host() or published.device not in self._driver.devices():
            other = published.host != _host()
            raise AtlasError(
                Code.WRONG_DEVICE,
                "The transport cuda reaches GPUs of one host that both processes see",
                got="a peer on another host" if other else "a GPU that this process does not see",
                hint="Use nixl between hosts; let both processes see both GPUs",
            )
        return _CudaLink(self, published, memory)

    def _close(self) -> None:
        """Peers that have its memory mapped notice by their leases."""
        _here.pop(self.token, None)
        self._regions.clear()
        self._allocations.clear()


def _check_form(published: _Published, memory: Mapping[int, Memory]) -> None:
    """Refuse what no transport publishes, or not with these regions."""
    handles = [*(one.handle for one in published.allocations), *published.events]
    if not _TOKEN.fullmatch(published.token) or len(published.device) != UUID_BYTES:
        raise errors.bad_metadata("a token or a device of another length")
    if any(len(handle) != HANDLE_BYTES for handle in handles) or len(published.events) != EVENTS:
        raise errors.bad_metadata("handles of another length, or too few")
    if len(published.allocations) > _MAX_ALLOCATIONS:
        raise errors.bad_metadata(f"{len(published.allocations)} allocations")
    for pool, at in memory.items():
        region = published.regions.get(pool)
        if region is None or region.nbytes != at.nbytes:
            if at.nbytes:
                raise errors.bad_metadata(f"region {pool} that is not the one of the handshake")
            continue
        if not 0 <= region.allocation < len(published.allocations):
            raise errors.bad_metadata(f"region {pool} in an allocation that is not there")
        nbytes = published.allocations[region.allocation].nbytes
        if region.nbytes < 0 or not 0 <= region.offset <= nbytes - region.nbytes:
            raise errors.bad_metadata(f"region {pool} past its allocation")


def _host() -> str:
    """Names this machine since it was started, or its name where that is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class _CudaLink(Link):
    adds: ClassVar[bool] = True
    owner: CudaTransport

    def __init__(
        self, owner: CudaTransport, published: _Published, theirs: Mapping[int, Memory]
    ) -> None:
        super().__init__(owner, theirs)
        self._token, self._regions = published.token, published.regions
        self._allocations = [
            ForeignAllocation(published.token, one.handle, one.nbytes)
            for one in published.allocations
        ]
        self._handles, self._events = published.events, dict[int, int]()
        self._lock = threading.Lock()
        self._queue = owner.driver.queue(owner.device, owner.multiprocessors)
        if self._same_process is None:
            # Opened now, so that a handle which is stale is refused before anything moves.
            for allocation in self._allocations:
                owner.opened.acquire(allocation)
                owner.opened.release(allocation)

    @property
    def _same_process(self) -> CudaTransport | None:
        """The peer where it is of this process, whose addresses are good as they are."""
        peer = _here.get(self._token)
        return peer if peer is not None and peer.driver is self.owner.driver else None

    def follow(self, mark: int | None) -> None:
        """The queue waits on the device, and no host does."""
        if mark is not None and self.owner.marks is not None:
            self._queue.after(self.owner.marks.event(mark))

    def _event(self, number: int) -> int:
        peer = self._same_process
        if peer is not None and peer.marks is not None:
            return peer.marks.event(number)
        with self._lock:
            if number not in self._events:
                driver, device = self.owner.driver, self.owner.device
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
            return self.owner.driver.finished(self.owner.device, event)
        except DriverError as problem:
            raise errors.peer_lost(f"an event that cannot be looked at: {problem}") from problem

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        told = [(c.src_pool, c.dst_pool, NO_STARTS, (c.src, c.dst, c.length)) for c in copies]
        return self._copy(told, lambda: True, write=write)

    def _copy(self, told: list[_Told], may_begin: Callable[[], bool], *, write: bool) -> Handle:
        if not told:
            return Done()
        copy = _CudaCopy(lambda: self._launch(told, write=write), may_begin, self.check)
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
        if self._same_process is not None:
            return self.theirs[pool].address
        region = self._regions[pool]
        allocation = self._allocations[region.allocation]
        base = self.owner.opened.acquire(allocation)
        used.append(allocation)
        return base + region.offset

    def _unused(self, used: list[ForeignAllocation]) -> None:
        while used:
            self.owner.opened.release(used.pop())

    def _close(self) -> None:
        """Unmap what the peer has, once no copy reads it."""
        self.owner.opened.forget(self._token)
        with self._lock:
            events, self._events = self._events, {}
        for event in events.values():
            with suppress(DriverError):
                self.owner.driver.end_event(self.owner.device, event)


class _CudaCopy(Handle):
    """A copy that the GPU carries out; once it was launched, nothing ends it before its time."""

    def __init__(
        self,
        launch: Callable[[], tuple[Posted, Callable[[], None]]],
        may_begin: Callable[[], bool],
        check: Callable[[], None],
    ) -> None:
        self._launch, self._may_begin, self._check = launch, may_begin, check
        self._posted: Posted | None = None
        self._over: Callable[[], None] = lambda: None
        self._given_up = False
        self._begun = time.monotonic()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Launch it if that may be now."""
        with self._lock:
            if self._posted is None and not self._given_up and self._may_begin():
                self._posted, self._over = self._launch()

    def _poll(self) -> bool:
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
