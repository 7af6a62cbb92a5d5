"""The block ids of one pool: allocation, reference counts, cached content and eviction."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import natural
from kvatlas.pool.eviction import Eviction, Use

NO_BLOCK = -1
"""Placeholder in a block table for a block that a window no longer needs."""
_MANY = 128
"""Minimum number of blocks for which numpy is faster than a Python loop."""


class _AsArrays(NamedTuple):
    """The per-block data of a `BlockIds` as numpy arrays, which share memory with the data."""

    owners: NDArray[np.int32]
    kept: NDArray[np.bool_]
    woken: NDArray[np.bool_]
    place: NDArray[np.int32]
    """The index of each block in the list last passed to `distinct`; may be stale."""

    def distinct(self, blocks: Sequence[int]) -> Int64s | None:
        """Return block ids as an array, or None if the caller must loop over them in Python.

        The result is None if there are only a few ids, or if an id is repeated or negative.
        """
        if len(blocks) < _MANY:
            return None
        ids, places = np.array(blocks, np.int64), np.arange(len(blocks), dtype=np.int32)
        if ids.min() < 0:
            return None
        self.place[ids] = places
        return ids if np.array_equal(self.place[ids], places) else None


class BlockIds:
    """The block ids of a pool, with reference counts. `take` returns the last freed block first.

    The owners of a block are the requests that use it. A block without an owner is either free, or
    kept so that its content can be reused. When no block is free, kept blocks without an owner are
    evicted in the order of `eviction`.

    >>> ids = BlockIds(3)
    >>> block = ids.take()
    >>> ids.share([block])
    >>> ids.release([block])
    >>> ids.free
    2
    >>> ids.release([block])
    >>> ids.free, ids.take() == block
    (3, True)
    """

    def __init__(
        self,
        count: int,
        *,
        null_block: bool = False,
        eviction: Eviction | None = None,
        evicted: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.count = count = natural(count, "the number of blocks")
        self.null_block = null_block
        """Whether block 0 is reserved. Engines put it into unused entries of block tables."""
        first = 1 if null_block else 0
        self._stack = np.arange(count)[::-1].copy()
        """Ids of free blocks, in the first `_waiting` elements. The last of them is taken first."""
        self._waiting = count - first if count else 0
        self._owners = array("i", bytes(4 * count))
        if null_block and count:
            self._owners[0] = 1  # never taken or released
        self._kept = bytearray(count)
        """Whether the content of a block is kept for reuse, whether or not it has owners."""
        self._idle = 0
        """Number of kept blocks without an owner."""
        self._eviction = eviction
        self._evicted = evicted
        self._woken = bytearray(count)
        """Whether a block was reused after it was queued for eviction."""
        self._arrays = self._as_arrays()
        self._clock = 0

    def _as_arrays(self) -> _AsArrays:
        return _AsArrays(
            np.frombuffer(self._owners, np.int32),
            np.frombuffer(self._kept, np.bool_),
            np.frombuffer(self._woken, np.bool_),
            np.zeros(self.count, np.int32),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_arrays"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._arrays = self._as_arrays()  # views of the copy's memory, not of the original's

    @property
    def free(self) -> int:
        """Number of blocks that can be taken: free blocks, and kept blocks without an owner."""
        return self._waiting + self._idle

    @property
    def kept(self) -> int:
        """Number of blocks that have no owner and whose content is kept for reuse."""
        return self._idle

    def require(self, count: int) -> None:
        """Raise an error if fewer than `count` blocks can be taken."""
        if count > self.free:
            raise AtlasError(
                Code.NO_BLOCKS,
                got=f"a request for {count} blocks; {self.free} of {self.count} are free",
                hint="Free or preempt a request, or plan the cache with more memory",
            )

    def take(self) -> int:
        """Take a block for one owner and return its id."""
        if not self._waiting:
            self.require(1)
            self._evict(1)
        self._waiting -= 1
        block = int(self._stack[self._waiting])
        self._owners[block] = 1
        return block

    def take_many(self, count: int) -> list[int]:
        """Take `count` blocks and return their ids.

        If there are too few blocks, take none and raise `no_blocks`.
        """
        taken: list[int] = self.take_array(count).tolist()
        return taken

    def take_array(self, count: int) -> Int64s:
        """Take `count` blocks as `take_many` does, and return their ids as an array."""
        self.require(count)
        if count > self._waiting:
            self._evict(count - self._waiting)
        self._waiting -= count
        taken = self._stack[self._waiting : self._waiting + count][::-1].copy()
        self._arrays.owners[taken] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to each block. Each block must already have an owner or be kept."""
        many = self._arrays.distinct(blocks)
        if many is not None:
            self.share_array(many)
            return
        owners, kept, woken = self._owners, self._kept, self._woken
        asleep = {block for block in blocks if block != NO_BLOCK and not owners[block]}
        for block in asleep:
            if not kept[block]:
                raise _without_owner(block)
        for block in asleep:
            woken[block] = True
        self._idle -= len(asleep)
        for block in blocks:
            if block != NO_BLOCK:
                owners[block] += 1

    def share_array(self, ids: Int64s) -> None:
        """Add an owner to each block of an array of distinct ids, as `share` does."""
        owners, kept, woken, _ = self._arrays
        asleep = ids[owners[ids] == 0]
        if not kept[asleep].all():
            raise _without_owner(int(asleep[~kept[asleep]][0]))
        woken[asleep] = True
        self._idle -= len(asleep)
        owners[ids] += 1

    def owners(self, block: int) -> int:
        """Return the number of owners of a block."""
        return self._owners[block]

    def is_shared(self, block: int) -> bool:
        """Return whether a block has several owners."""
        return self._owners[block] > 1

    def is_kept(self, block: int) -> bool:
        """Return whether the content of a block is kept for reuse and must not be changed."""
        return bool(self._kept[block])

    def keep(self, blocks: Sequence[int] | Int64s) -> None:
        """Mark blocks as kept: their content can be reused until they are evicted."""
        ids = np.array(blocks, np.int64)
        owned = self._arrays.owners[ids] > 0
        if not owned.all():
            raise _without_owner(int(ids[~owned][0]))
        self._arrays.kept[ids] = True

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one owner of each block. Blocks without owners become free, unless kept."""
        many = self._arrays.distinct(blocks)
        if many is not None:
            self.release_array(many)
            return
        owners, kept, idle = self._owners, self._kept, []
        null = 0 if self.null_block else NO_BLOCK
        for block in blocks:
            if block == NO_BLOCK:
                continue
            count = owners[block]
            if not count or block == null:
                raise _without_owner(block)
            owners[block] = count - 1
            if count == 1:
                if kept[block]:
                    idle.append(block)
                else:
                    self._stack[self._waiting] = block
                    self._waiting += 1
        if idle:
            self._rest(np.array(idle, np.int64))

    def release_array(self, ids: Int64s) -> None:
        """Remove one owner of each block of an array of distinct ids, as `release` does."""
        owners, kept, *_ = self._arrays
        left = owners[ids] - 1
        wrong = (left < 0) | (ids == 0) if self.null_block else left < 0
        if wrong.any():
            raise _without_owner(int(ids[wrong][0]))
        owners[ids] = left
        last = ids[left == 0]
        stays = kept[last]
        self._put_back(last[~stays])
        if stays.any():
            self._rest(last[stays])

    def _put_back(self, ids: Int64s) -> None:
        """Add free blocks to the stack. The last of them is taken first."""
        self._stack[self._waiting : self._waiting + len(ids)] = ids
        self._waiting += len(ids)

    def discard(self, blocks: Sequence[int] | Int64s) -> None:
        """Stop keeping the content of these blocks. Blocks without an owner become free."""
        ids = np.array(blocks, np.int64)
        owners, kept, *_ = self._arrays
        if self._eviction is not None:
            self._eviction.forget(ids)
        idle = ids[kept[ids] & (owners[ids] == 0)]
        kept[ids] = False
        self._idle -= len(idle)
        self._put_back(idle)

    def drop(self) -> list[int]:
        """Stop keeping the content of all blocks. Return the ids of the blocks that become free."""
        owners, kept, *_ = self._arrays
        found = np.flatnonzero(kept)
        idle = found[owners[found] == 0]
        if len(found) and self._eviction is not None:
            self._eviction.forget(found)
        kept[:] = False
        self._idle = 0
        self._put_back(idle)
        dropped: list[int] = idle.tolist()
        return dropped

    def evict(self, blocks: Sequence[int]) -> None:
        """Evict these kept blocks now, whatever their position in the eviction order."""
        ids = np.array(blocks, np.int64)
        owners, kept, *_ = self._arrays
        wrong = (owners[ids] > 0) | ~kept[ids]
        if wrong.any():
            problem = "Only blocks with cached content and without an owner can be evicted"
            got = f"block {int(ids[wrong][0])}"
            hint = "Evict only kept blocks that all of their owners have released"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=got, hint=hint)
        if self._eviction is not None:
            self._eviction.forget(ids)
        self._let_go(ids)

    def _rest(self, idle: Int64s) -> None:
        """Add kept blocks that no longer have an owner to the eviction queue, in this order."""
        if self._eviction is None:
            raise AtlasError(
                Code.CONTRADICTORY, "Keeping blocks for reuse requires an eviction policy",
                got=f"eviction=None, {len(idle)} kept blocks", hint="Pass `eviction` to BlockIds",
            )  # fmt: skip
        self._clock += 1
        self._arrays.woken[idle] = False
        self._idle += len(idle)
        self._eviction.used(idle, self._use(idle))

    def _use(self, ids: Int64s) -> Use:  # noqa: ARG002 - for subclasses
        """Return the `Use` that the eviction policy receives for blocks without an owner."""
        return Use(self._clock)

    def _evict(self, count: int) -> None:
        if self._eviction is None:
            return
        self._let_go(self._eviction.victims(count, self._arrays.woken))

    def _let_go(self, ids: Int64s) -> None:
        """Make kept blocks free. `take` then returns them in the given order."""
        self._arrays.kept[ids] = False
        self._idle -= len(ids)
        self._put_back(ids[::-1])
        self._lose(ids)

    def _lose(self, ids: Int64s) -> None:
        """Pass the ids of evicted blocks to the callback `evicted`, if there is one."""
        if self._evicted is not None:
            self._evicted(ids.tolist())


def _without_owner(block: int) -> AtlasError:
    problem = "The block has no owner, so it cannot be shared, kept or released"
    hint = "Release a block once for each time that it was taken or shared, not more often"
    return AtlasError(Code.OUT_OF_RANGE, problem, got=f"block {block}", hint=hint)
