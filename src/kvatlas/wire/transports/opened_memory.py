"""Allocations of other processes that are mapped here, each once, the least used given up first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvatlas.wire.transports import errors
from kvatlas.wire.transports.cuda_driver import CudaDriver, DriverError

_MOST = 256
"""Allocations that stay mapped, where none of them is being read."""


@dataclass(frozen=True, slots=True)
class ForeignAllocation:
    """An allocation of a peer. The peer's token keeps a handle that is used again apart."""

    peer: str
    handle: bytes
    nbytes: int


@dataclass(eq=False)
class MappedAllocation:
    """Where an allocation of a peer is mapped, as long as it is."""

    allocation: ForeignAllocation
    address: int
    users: int = 0
    forgotten: bool = False
    gone: bool = False
    """Whether it is mapped no more; where the allocation is mapped again is another such."""


class OpenedMemory:
    """Mapped allocations of one device; any thread may use them."""

    def __init__(self, driver: CudaDriver, device: int, most: int = _MOST) -> None:
        self._driver, self._device, self._most = driver, device, most
        self._open: OrderedDict[ForeignAllocation, MappedAllocation] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def acquire(self, allocation: ForeignAllocation) -> int:
        """Its address here, mapped until it is released as often as it was acquired."""
        return self.map(allocation).address

    def map(self, allocation: ForeignAllocation) -> MappedAllocation:
        """The same, to be held again later without being looked up."""
        with self._lock:
            mapping = self._open.get(allocation)
            if mapping is None:
                address = self._map(allocation)
                mapping = self._open[allocation] = MappedAllocation(allocation, address)
            mapping.users += 1
            mapping.forgotten = False
            self._open.move_to_end(allocation)
            self._give_up()
            return mapping

    def hold(self, mappings: Sequence[MappedAllocation]) -> bool:
        """Acquire what was mapped before; False, and nothing is, where some is mapped no more."""
        with self._lock:
            for mapping in mappings:
                if mapping.gone or mapping.forgotten:
                    return False
            for mapping in mappings:
                mapping.users += 1
            return True

    def release(self, allocation: ForeignAllocation) -> None:
        """Nothing that was posted reads it any more."""
        with self._lock:
            mapping = self._open[allocation]
            mapping.users -= 1
            self._open.move_to_end(allocation)
            if mapping.forgotten and not mapping.users:
                self._unmap(allocation)
            self._give_up()

    def forget(self, peer: str) -> None:
        """Unmap what a peer has, once nothing reads it any more."""
        with self._lock:
            for allocation in [one for one in self._open if one.peer == peer]:
                self._open[allocation].forgotten = True
                if not self._open[allocation].users:
                    self._unmap(allocation)

    def _map(self, allocation: ForeignAllocation) -> int:
        try:
            address = self._driver.open_memory(self._device, allocation.handle)
        except DriverError as problem:
            raise errors.peer_lost(f"memory whose handle opens no more: {problem}") from problem
        try:
            base, nbytes = self._driver.allocation(self._device, address)
            if base != address or nbytes < allocation.nbytes:
                got = f"a handle of {nbytes:,} bytes for {allocation.nbytes:,}"
                raise errors.bad_metadata(got)
        except BaseException:
            with suppress(DriverError):
                self._driver.close_memory(self._device, address)
            raise
        return address

    def _give_up(self) -> None:
        """Unmap those that were used longest ago, where there are too many."""
        too_many = len(self._open) - self._most
        if too_many > 0:
            unused = [one for one, mapping in self._open.items() if not mapping.users]
            for allocation in unused[:too_many]:
                self._unmap(allocation)

    def _unmap(self, allocation: ForeignAllocation) -> None:
        mapping = self._open.pop(allocation)
        mapping.gone = True
        with suppress(DriverError):  # a peer that has gone may have taken it along
            self._driver.close_memory(self._device, mapping.address)
