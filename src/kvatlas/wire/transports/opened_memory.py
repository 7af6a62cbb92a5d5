"""Mapped allocations of other processes. The least recently used allocation is unmapped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvatlas.copying.cuda_driver import CudaDriver, DriverError
from kvatlas.wire.transports import errors

_MOST = 256
"""Unused allocations are unmapped when more than this many are mapped."""


@dataclass(frozen=True, slots=True)
class ForeignAllocation:
    """An allocation of a peer, identified by its handle and by `peer`, the peer's token.

    The token is needed because two peers may have equal handles.
    """

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
    """Whether the allocation is unmapped as soon as it has no users."""
    gone: bool = False
    """Whether the allocation was unmapped. Mapping it again makes a new `MappedAllocation`."""

    @property
    def stale(self) -> bool:
        """Whether the allocation is unmapped, or will be as soon as it has no users."""
        return self.gone or self.forgotten


class OpenedMemory:
    """The peers' allocations that are mapped on one device. Any thread may use it."""

    def __init__(self, driver: CudaDriver, device: int, most: int = _MOST) -> None:
        self._driver, self._device, self._most = driver, device, most
        self._open: OrderedDict[ForeignAllocation, MappedAllocation] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def map(self, allocation: ForeignAllocation) -> MappedAllocation:
        """Map an allocation, unless it is already mapped. Each call needs one `release`."""
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
        """Add one use to each mapping and return True, unless a mapping is `stale`.

        If a mapping is stale, add no use and return False.
        """
        with self._lock:
            if any(mapping.stale for mapping in mappings):
                return False
            for mapping in mappings:
                mapping.users += 1
            return True

    def release(self, mappings: Sequence[MappedAllocation]) -> None:
        """End one use of each mapping.

        The caller must ensure that no posted copy still reads from the mapped memory.
        """
        with self._lock:
            for mapping in mappings:
                mapping.users -= 1
                self._open.move_to_end(mapping.allocation)
                if mapping.forgotten and not mapping.users:
                    self._unmap(mapping.allocation)
            self._give_up()

    def forget(self, peer: str) -> None:
        """Unmap a peer's allocations, each as soon as it has no users."""
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
                got = f"an allocation of {nbytes:,} bytes, expected {allocation.nbytes:,}"
                raise errors.bad_metadata(got)
        except BaseException:
            with suppress(DriverError):
                self._driver.close_memory(self._device, address)
            raise
        return address

    def _give_up(self) -> None:
        """Unmap the least recently used allocations without users if too many are mapped."""
        too_many = len(self._open) - self._most
        if too_many > 0:
            unused = [one for one, mapping in self._open.items() if not mapping.users]
            for allocation in unused[:too_many]:
                self._unmap(allocation)

    def _unmap(self, allocation: ForeignAllocation) -> None:
        mapping = self._open.pop(allocation)
        mapping.gone = True
        with suppress(DriverError):  # the peer may have exited
            self._driver.close_memory(self._device, mapping.address)
