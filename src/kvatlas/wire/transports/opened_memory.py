"""Allocations of other processes, each mapped once; the least recently used is unmapped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvatlas.copying.cuda_driver import CudaDriver, DriverError
from kvatlas.wire.transports import errors

_MOST = 256
"""The maximum number of allocations that stay mapped while none is being read."""


@dataclass(frozen=True, slots=True)
class ForeignAllocation:
    """An allocation of a peer. The peer's token distinguishes reused handles."""

    peer: str
    handle: bytes
    nbytes: int


@dataclass(eq=False)
class MappedAllocation:
    """The mapping of a peer's allocation."""

    allocation: ForeignAllocation
    address: int
    users: int = 0
    forgotten: bool = False
    gone: bool = False
    """Whether it was unmapped. If the allocation is mapped again, that is a new value."""


class OpenedMemory:
    """Mapped allocations of one device. Any thread may use them."""

    def __init__(self, driver: CudaDriver, device: int, most: int = _MOST) -> None:
        self._driver, self._device, self._most = driver, device, most
        self._open: OrderedDict[ForeignAllocation, MappedAllocation] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def acquire(self, allocation: ForeignAllocation) -> int:
        """Map an allocation and return its address. Each call needs one `release`."""
        return self.map(allocation).address

    def map(self, allocation: ForeignAllocation) -> MappedAllocation:
        """Like `acquire`, but return the mapping, which can be held again without a lookup."""
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
        """Acquire mappings again. Return False, and acquire none, if one of them was unmapped."""
        with self._lock:
            for mapping in mappings:
                if mapping.gone or mapping.forgotten:
                    return False
            for mapping in mappings:
                mapping.users += 1
            return True

    def release(self, allocation: ForeignAllocation) -> None:
        """End an `acquire`: no posted copy reads the allocation anymore."""
        with self._lock:
            mapping = self._open[allocation]
            mapping.users -= 1
            self._open.move_to_end(allocation)
            if mapping.forgotten and not mapping.users:
                self._unmap(allocation)
            self._give_up()

    def forget(self, peer: str) -> None:
        """Unmap a peer's allocations once nothing reads them."""
        with self._lock:
            for allocation in [one for one in self._open if one.peer == peer]:
                self._open[allocation].forgotten = True
                if not self._open[allocation].users:
                    self._unmap(allocation)

    def _map(self, allocation: ForeignAllocation) -> int:
        try:
            address = self._driver.open_memory(self._device, allocation.handle)
        except DriverError as problem:
            raise errors.peer_lost(f"memory that can no longer be opened: {problem}") from problem
        try:
            base, nbytes = self._driver.allocation(self._device, address)
            if base != address or nbytes < allocation.nbytes:
                got = f"an allocation of {nbytes:,} bytes, not {allocation.nbytes:,}"
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
