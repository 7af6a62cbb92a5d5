"""`ReplayIds`: the block ids of a pool in a replay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvatlas.pool.block_ids import BlockIds
from kvatlas.pool.eviction import Eviction, Lru, Use
from kvatlas.simulate.traces import Ints


class ReplayIds(BlockIds):
    """Block ids that report evicted blocks as an array.

    `take_array`, `share_array` and `release_array` count the owners of blocks. A caller that serves
    one request at a time needs no owners: it calls `pin`, `make_free`, `take_kept` and `queue`.
    """

    def __init__(self, blocks: int, eviction: Eviction, gone: Callable[[Ints], None]) -> None:
        super().__init__(blocks + 1, null_block=True, eviction=eviction)
        self._eviction: Eviction = eviction
        self._gone = gone
        self.is_lru = isinstance(eviction, Lru)
        self.saved: NDArray[np.float64] | None = None
        """Compute that a hit on each block saves, per byte, for policies that need it."""
        self.next_use: Ints | None = None
        """The next request that uses the content of each block, for policies that need it."""

    def _lose(self, ids: Ints) -> None:
        self._gone(ids)

    def _use(self, ids: Ints) -> Use:
        saved = None if self.saved is None else self.saved[ids]
        return Use(self._clock, saved, None if self.next_use is None else self.next_use[ids])

    @property
    def waiting(self) -> int:
        """Number of free blocks without content."""
        return self._waiting

    @property
    def used(self) -> int:
        """Number of blocks with an owner or with kept content."""
        return self.count - 1 - self._waiting

    def pin(self, blocks: Ints) -> None:
        """Protect kept blocks without an owner from eviction, until `queue` is called."""
        self._idle -= len(blocks)
        if self.is_lru:
            self._eviction.forget(blocks)  # cheaper to evict, and `queue` adds them again
        else:
            self._arrays.woken[blocks] = True

    def make_free(self, count: int) -> None:
        """Evict blocks until `count` blocks are free.

        The caller must pin all blocks in use before, so that they are not evicted.
        """
        if count > self._waiting:
            woken = None if self.is_lru else self._arrays.woken
            self._let_go(self._eviction.victims(count - self._waiting, woken))

    def take_kept(self, count: int) -> Ints:
        """Take free blocks without an owner and mark them as kept.

        The caller must pass the blocks to `queue` later.
        """
        self._waiting -= count
        taken: Ints = self._stack[self._waiting : self._waiting + count].copy()
        self._arrays.kept[taken] = True
        return taken

    def queue(self, blocks: Ints) -> None:
        """Queue kept blocks without an owner for eviction, in this order."""
        if self.is_lru:  # no block is woken, since `pin` makes the queue forget them
            self._clock += 1
            self._idle += len(blocks)
            self._eviction.used(blocks, Use(self._clock))
        elif len(blocks):
            self._rest(blocks)
