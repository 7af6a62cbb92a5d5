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

import secrets
import socket
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.base import HOST, Link, Memory, Shared, Transport
from kvatlas.wire.transports.cuda_driver import CudaDriver, DriverError, load_driver
from kvatlas.wire.transports.cuda_link import CudaEnd, CudaLink
from kvatlas.wire.transports.cuda_published import (
    PublishedAllocation,
    PublishedMemory,
    PublishedRegion,
    check_form,
)
from kvatlas.wire.transports.device_marks import DeviceMarks
from kvatlas.wire.transports.offer_board import OfferBoard
from kvatlas.wire.transports.opened_memory import OpenedMemory
from kvatlas.wire.transports.pace import CopyPace

_SHARE = 0.08
"""Of the GPU's time: slows down what is bound by memory beside it by less than a twentieth."""

_here: weakref.WeakValueDictionary[str, CudaTransport] = weakref.WeakValueDictionary()
"""The transports of this process by token: CUDA opens no handle in the process that made it."""


class CudaTransport(Transport):
    """Moves bytes between pools in the memory of GPUs of one host.

    Copies take at most `share` of the GPU's time in the long run: each runs at full speed, and
    the next waits until what else runs there has had the rest; 1 for no limit. A copy keeps at
    most `multiprocessors` of the GPU busy, where it is not 0. All regions of one transport are
    on one GPU; the two ends of a link may be on two, where one can reach the other's memory.
    """

    name: ClassVar[str] = "cuda"
    marks_travel: ClassVar[bool] = True
    casts: ClassVar[bool] = True

    def __init__(
        self,
        *,
        multiprocessors: int = 0,
        share: float = _SHARE,
        shared: Shared = "all",
        driver: CudaDriver | None = None,
    ) -> None:
        super().__init__(shared=shared)
        if not isinstance(multiprocessors, int) or multiprocessors < 0:
            got = f"multiprocessors={multiprocessors!r}"
            raise errors.failed(got, hint="Give a number of multiprocessors, or 0 for all")
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise errors.failed(f"share={share!r}", hint="Give a part of the time, at most 1")
        self._pace = CopyPace(share)
        self._driver = driver or load_driver()
        self.multiprocessors = multiprocessors
        self.token = secrets.token_hex(16)
        self.device = -1
        """The number of the GPU that the regions are on; -1 before there are any."""
        self._allocations: dict[int, PublishedAllocation] = {}
        self._regions: dict[int, PublishedRegion] = {}
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
            with suppress(AtlasError):  # no room for it: peers ask
                self.board = OfferBoard()
                if self.marks is not None:
                    self.marks.board = self.board
        for pool, region in memory.items():
            if self.shares(pool):
                self._regions[pool] = self._located(region)
        _here[self.token] = self

    def _located(self, region: Memory) -> PublishedRegion:
        """A region in its allocation, of which there is a handle."""
        try:
            base, nbytes = self._driver.allocation(self.device, region.address)
            if base not in self._allocations:
                handle = self._driver.export_memory(self.device, base)
                self._allocations[base] = PublishedAllocation(handle, nbytes)
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
        return PublishedRegion(list(self._allocations).index(base), offset, region.nbytes)

    def publish(self) -> bytes:
        """Handles of its allocations and events, and where its regions are."""
        self.check()
        if self.marks is None:
            raise errors.failed("no memory of this end", hint="Register it before publishing")
        return errors.write_metadata(
            PublishedMemory(
                _host(),
                self.token,
                self._driver.devices()[self.device],
                list(self._allocations.values()),
                self._regions,
                list(self.marks.export()),
                None if self.board is None else self.board.place,
            )
        )

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """Map a peer's allocations."""
        published = errors.read_metadata(metadata, PublishedMemory)
        check_form(published, memory)
        if published.host != _host() or published.device not in self._driver.devices():
            other = published.host != _host()
            raise AtlasError(
                Code.WRONG_DEVICE,
                "The transport cuda reaches GPUs of one host that both processes see",
                got="a peer on another host" if other else "a GPU that this process does not see",
                hint="Use nixl between hosts; let both processes see both GPUs",
            )
        here = _here.get(published.token)
        if here is not None and any(here.memory.get(pool) != at for pool, at in memory.items()):
            hint = "Name memory as it was registered"
            raise errors.failed("memory that this process has not registered so", hint=hint)
        end = self._end(published.token)
        try:
            return CudaLink(self, end, published, memory)
        except BaseException:
            end.queue.close()
            raise

    def _end(self, token: str) -> CudaEnd:
        """What a link to a peer has of this end."""

        def marks_here() -> DeviceMarks | None:
            peer = _here.get(token)
            return peer.marks if peer is not None and peer.driver is self.driver else None

        queue = self._driver.queue(self.device, self.multiprocessors)
        return CudaEnd(self._driver, self.device, self.opened, queue, self._pace, marks_here)

    def _close(self) -> None:
        """Peers that have its memory mapped notice by their leases."""
        _here.pop(self.token, None)
        self._regions.clear()
        self._allocations.clear()


def _host() -> str:
    """Names this machine since it was started, or its name where that is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
