"""`StagingRows`: host memory for rows in flight between pools and a store.

Rows are leased and returned. A caller that needs more rows than are free waits. A row belongs to
its lease until it is returned, even if a call to the store has timed out and still uses the row.
The objects of a row are stored one after the other, each after its header.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from kvatlas.copying.run_bounds import Bytes
from kvatlas.tier.row_frames import RowFrame
from kvatlas.tier.row_objects import RowObjects
from kvatlas.tier.store_calls import Deadline

_LEASES = 8
"""Number of leases that fit into staging memory at once."""

Needed = Mapping[int, int]
"""The number of rows of each pool."""


RowLease = dict[int, list[int]]
"""The indices of leased rows by pool. Returning the lease empties it."""


class StagingRows:
    """Staging memory for rows, each with headers for its objects.

    A row is one block of the tier. All rows together have at most `nbytes` bytes, not counting
    their headers. However, each pool has at least two rows, even if that exceeds the limit.
    """

    def __init__(self, cut: RowObjects, nbytes: int) -> None:
        plan, self.cut = cut.plan, cut
        share = nbytes // len(plan.pools)
        self.rows = {pool.index: max(2, share // pool.block_bytes) for pool in plan.pools}
        self.frames = [RowFrame(objects) for objects in cut.groups]
        """The layout of a row, by group."""
        self.row_bytes = {pool.index: 0 for pool in plan.pools}
        """The stride between rows in bytes."""
        for group, frame in zip(plan.groups, self.frames, strict=True):
            self.row_bytes[group.pool] = max(self.row_bytes[group.pool], frame.nbytes)
        self.pools: dict[int, Bytes] = {
            index: np.zeros(rows * self.row_bytes[index], np.uint8)
            for index, rows in self.rows.items()
        }
        self._free = {index: list(range(rows)) for index, rows in self.rows.items()}
        self._changed = threading.Condition()

    def at_once(self, pool: int) -> int:
        """Return how many rows one lease should have, so that several leases can be in flight."""
        return max(1, self.rows[pool] // _LEASES)

    def lease(self, needed: Needed, deadline: Deadline) -> RowLease | None:
        """Lease all needed rows, or return None if they do not become free in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._has(needed), deadline.left):
                return None
            return {i: [self._free[i].pop() for _ in range(n)] for i, n in needed.items()}

    def _has(self, needed: Needed) -> bool:
        return all(len(self._free[index]) >= count for index, count in needed.items())

    def give_back(self, lease: RowLease) -> None:
        """Give rows back that are no longer read or written. A second call does nothing."""
        with self._changed:
            for index, rows in lease.items():
                self._free[index] += rows
            lease.clear()
            self._changed.notify_all()

    def idle(self) -> bool:
        """Return whether no row is leased."""
        with self._changed:
            return self._has(self.rows)

    def row(self, pool: int, row: int) -> Bytes:
        """Return the bytes of a row, including the headers of its objects."""
        nbytes = self.row_bytes[pool]
        return self.pools[pool][row * nbytes : (row + 1) * nbytes]
