"""`StagingRows`: host memory for a few rows on their way between pools and a store.

Rows are leased and given back; who leases more than there are waits. A row belongs to its
lease until it is given back, also where a store is late and still reads or writes it. Its
objects lie in it one behind the other, each behind its header.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from kvatlas.tier.row_frames import RowFrame
from kvatlas.tier.row_objects import RowObjects
from kvatlas.tier.store_calls import Deadline
from kvatlas.wire.run_bounds import Bytes

_LEASES = 8
"""Leases that all rows are enough for."""

Needed = Mapping[int, int]
"""How many rows of each pool."""


class RowLease:
    """Rows of staging memory, by pool, until they are given back."""

    def __init__(self, rows: dict[int, list[int]]) -> None:
        self.rows = rows


class StagingRows:
    """Rows of a plan's pools in memory of at most so many bytes, and headers for each."""

    def __init__(self, cut: RowObjects, nbytes: int) -> None:
        plan, self.cut = cut.plan, cut
        share = nbytes // len(plan.pools)
        self.rows = {pool.index: max(2, share // pool.block_bytes) for pool in plan.pools}
        self.frames = [RowFrame(objects) for objects in cut.groups]
        """Where the bytes of a row are, by group."""
        self.row_bytes = {pool.index: 0 for pool in plan.pools}
        """Bytes from one row to the next."""
        for group, frame in zip(plan.groups, self.frames, strict=True):
            self.row_bytes[group.pool] = max(self.row_bytes[group.pool], frame.nbytes)
        self.pools: dict[int, Bytes] = {
            index: np.zeros(rows * self.row_bytes[index], np.uint8)
            for index, rows in self.rows.items()
        }
        self._free = {index: list(range(rows)) for index, rows in self.rows.items()}
        self._changed = threading.Condition()

    def at_once(self, pool: int) -> int:
        """Rows of a pool that are moved together: few, so that several leases are under way."""
        return max(1, self.rows[pool] // _LEASES)

    def lease(self, needed: Needed, deadline: Deadline) -> RowLease | None:
        """Rows, all that are needed at once; None where none come free in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._has(needed), deadline.left):
                return None
            return RowLease({i: [self._free[i].pop() for _ in range(n)] for i, n in needed.items()})

    def _has(self, needed: Needed) -> bool:
        return all(len(self._free[index]) >= count for index, count in needed.items())

    def give_back(self, lease: RowLease) -> None:
        """Rows that nobody reads or writes any more; a second call does nothing."""
        with self._changed:
            for index, rows in lease.rows.items():
                self._free[index] += rows
            lease.rows = {}
            self._changed.notify_all()

    def idle(self) -> bool:
        """Whether no row is on its way."""
        with self._changed:
            return self._has(self.rows)

    def row(self, pool: int, row: int) -> Bytes:
        """The bytes of a row, with its headers."""
        nbytes = self.row_bytes[pool]
        return self.pools[pool][row * nbytes : (row + 1) * nbytes]
