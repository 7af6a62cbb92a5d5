"""CUDA IPC between processes of one host: map a peer's GPU memory and copy it with a kernel.

Each end publishes handles of the allocations that contain its pools, the pools' offsets in these
allocations, and handles of events. The offsets are needed because a framework's allocator may have
put other data into the same allocations. A peer maps each allocation once. A transfer is then one
kernel launch for each set of runs in the route, usually a single launch. The kernel reads in the
layout of the peer's pages and writes in the layout of this end's pages: nothing is staged, and
nothing passes through the host.

The copy runs after the kernels that filled the peer's blocks: it is launched once the event that
the peer recorded with its offer has completed. As with every transport, the lease confirms
afterwards that the blocks were held until the last byte was read. This is necessary because CUDA
leaves undefined what a mapping contains after its owner has freed the memory or died.
"""

from __future__ import annotations

import secrets
import socket
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from kvatlas.copying.cuda_driver import CudaDriver, DriverError, load_driver
from kvatlas.copying.device_marks import DeviceMarks
from kvatlas.copying.memory import HOST, Memory
from kvatlas.errors import AtlasError, Code
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.access import Guarantees
from kvatlas.wire.transports.base import Link, OnePeerMemory, Separation, Shared, Transport
from kvatlas.wire.transports.cuda_copy import CopyPace
from kvatlas.wire.transports.cuda_link import CudaEnd, CudaLink
from kvatlas.wire.transports.cuda_published import (
    PublishedAllocation,
    PublishedMemory,
    PublishedRegion,
    check_regions,
)
from kvatlas.wire.transports.offer_board import OfferBoard
from kvatlas.wire.transports.opened_memory import OpenedMemory

_SHARE = 0.08
"""The default share of GPU time for copies, which slow memory-bound kernels by less than 5%."""

_here: weakref.WeakValueDictionary[str, CudaTransport] = weakref.WeakValueDictionary()
"""This process's transports by token: CUDA cannot open a handle in the process that made it."""


class CudaTransport(Transport):
    """Moves bytes between pools in the memory of GPUs on one host.

    In the long run, copies take at most `share` of the GPU's time; 1 means no limit. Each copy runs
    at full speed, and the next copy starts later if necessary. If `multiprocessors` is not 0, a
    copy uses at most that many of the GPU's multiprocessors. All regions of one transport are on
    one GPU. A link may connect two GPUs, if this end's GPU can access the memory of the peer's GPU.
    """

    name: ClassVar[str] = "cuda"
    separation: ClassVar[Separation] = "segments"
    guarantees = Guarantees(confidentiality=True, integrity=True, authentication=True)
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
            problem = "The option multiprocessors must be an integer of at least 0"
            raise errors.failed(got, "Pass a number of multiprocessors, or 0 for all", problem)
        if not isinstance(share, int | float) or not 0 < share <= 1:
            problem = "The option share must be above 0 and at most 1"
            hint = "Pass the fraction of GPU time for copies, or 1 for no limit"
            raise errors.failed(f"share={share!r}", hint, problem)
        self._pace = CopyPace(share)
        self._driver = driver or load_driver()
        self.multiprocessors = multiprocessors
        self.token = secrets.token_hex(16)
        self.device = -1
        """The index of the GPU with the regions; -1 before any is registered."""
        self._allocations: dict[int, PublishedAllocation] = {}
        self._regions: dict[int, PublishedRegion] = {}

    @property
    def driver(self) -> CudaDriver:
        """The CUDA driver."""
        return self._driver

    @cached_property
    def opened(self) -> OpenedMemory:
        """The mapped allocations of peers."""
        self._own_marks()
        return OpenedMemory(self._driver, self.device)

    def _own_marks(self) -> DeviceMarks:
        """Return the GPU events of this end. Raise an error if no memory is registered yet."""
        if self.marks is None:
            problem = "The transport has no registered memory"
            hint = "Register memory before publishing and connecting"
            raise errors.failed("no regions", hint, problem)
        return self.marks

    def takes(self, device: str) -> bool:
        """Whether the device is a GPU: the transport does not move host memory."""
        return device != HOST

    def register(self, memory: Mapping[int, Memory]) -> None:
        """Register regions on one GPU."""
        for region in memory.values():
            self.check_takes(region)
        devices = {region.number for region in memory.values()} | {self.device} - {-1}
        count = len(self._driver.devices())
        if len(devices) > 1:
            raise AtlasError(
                Code.WRONG_DEVICE,
                "All regions of a transport must be on one GPU",
                got=f"regions on GPUs {sorted(devices)}",
                hint="Make one transport per GPU",
            )
        if any(number >= count for number in devices):
            raise AtlasError(
                Code.WRONG_DEVICE,
                "This process does not see the GPU of a region",
                got=f"GPU {max(devices)}, but only {count} GPUs are visible",
                hint="Check CUDA_VISIBLE_DEVICES, and the device of the region",
            )
        self.device = max(devices, default=self.device)
        super().register(memory)

    def _register(self, memory: Mapping[int, Memory]) -> None:
        if self.board is None and self.shared == "all":
            with suppress(AtlasError):  # no memory for a board: peers ask by message
                self.board = OfferBoard()
                if self.marks is not None:
                    self.marks.board = self.board
        for pool, region in memory.items():
            if self.shares(pool):
                self._regions[pool] = self._located(region)
        _here[self.token] = self

    def _located(self, region: Memory) -> PublishedRegion:
        """Return a region's position in its allocation, and add the allocation to the metadata."""
        try:
            base, nbytes = self._driver.allocation(self.device, region.address)
            if base not in self._allocations:
                handle = self._driver.export_memory(self.device, base)
                self._allocations[base] = PublishedAllocation(handle, nbytes)
        except DriverError as problem:
            raise AtlasError(
                Code.WRONG_DEVICE,
                "CUDA cannot share this memory with other processes",
                got=f"{region.nbytes:,} bytes on {region.device}: {problem}",
                hint="Use memory from cudaMalloc, neither managed memory nor expandable segments",
            ) from problem
        offset = region.address - base
        if offset + region.nbytes > nbytes:
            got = f"{region.nbytes:,} bytes at offset {offset:,} of an allocation of {nbytes:,}"
            raise AtlasError(
                Code.OUT_OF_BOUNDS, got=got, hint="Pass a region inside one allocation"
            )
        return PublishedRegion(list(self._allocations).index(base), offset, region.nbytes)

    def lend_to_one(self, nbytes: int) -> OnePeerMemory:
        """Return an allocation with a separate handle, which only one peer receives."""
        import torch

        driver, device = self._driver, self.device
        address = driver.make_memory(device, nbytes)
        region = Memory(address, nbytes, f"cuda:{device}")
        alone = _OnePeerCuda(shared="staging", driver=driver)
        alone.marks = self.marks
        view = torch.as_tensor(_DeviceBytes(address, nbytes), device=region.device)
        wipe = partial(driver.end_memory, device, address, nbytes)
        return OnePeerMemory.of(alone, view, region, wipe)

    def publish(self) -> bytes:
        """Return handles of the allocations and events, and the offsets of the regions."""
        self.check()
        events = list(self._own_marks().export())
        return errors.write_metadata(
            PublishedMemory(
                _host(),
                self.token,
                self._driver.devices()[self.device],
                list(self._allocations.values()),
                self._regions,
                events,
                None if self.board is None else self.board.place,
            )
        )

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """Return a link with the peer's allocations mapped."""
        published = errors.read_metadata(metadata, PublishedMemory)
        check_regions(published, memory)
        if published.host != _host() or published.device not in self._driver.devices():
            other = published.host != _host()
            raise AtlasError(
                Code.WRONG_DEVICE,
                "The transport 'cuda' needs both GPUs on one host and visible to both processes",
                got="a peer on another host" if other else "a GPU that this process does not see",
                hint="Use nixl between hosts. On one host, make both GPUs visible to each process",
            )
        here = _here.get(published.token)
        if here is not None and any(here.memory.get(pool) != at for pool, at in memory.items()):
            problem = "The regions are not those that the peer in this process registered"
            got = f"pools {sorted(memory)} with other addresses, sizes or devices"
            hint = "Pass the peer transport's `reachable` regions unchanged"
            raise errors.failed(got, hint, problem)
        end = self._end(published.token)
        try:
            return CudaLink(self, end, published, memory)
        except BaseException:
            end.queue.close()
            raise

    def _end(self, token: str) -> CudaEnd:
        """Return this process's resources for a link to the transport that published `token`."""

        def marks_here() -> DeviceMarks | None:
            peer = _here.get(token)
            return peer.marks if peer is not None and peer.driver is self.driver else None

        queue = self._driver.queue(self.device, self.multiprocessors)
        return CudaEnd(self._driver, self.device, self.opened, queue, self._pace, marks_here)

    def _close(self) -> None:
        """Stop publishing. A peer with mapped memory notices this when it confirms its lease."""
        _here.pop(self.token, None)
        self._regions.clear()
        self._allocations.clear()


class _OnePeerCuda(CudaTransport):
    """A transport for memory that is lent to one peer. All of its regions are shared."""

    separation: ClassVar[Separation] = "leases"

    def _close(self) -> None:
        super()._close()
        self.marks = None  # they belong to the transport that lends the memory


class _DeviceBytes:
    """GPU memory in the form that `torch.as_tensor` accepts."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


def _host() -> str:
    """Return the boot id of this machine, or its host name if the boot id cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
