"""Block ids of one pool: taken, shared, kept for who comes back, and evicted."""

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
"""Stands in a block table for a block that a window has left behind."""
_MANY = 128
"""So many blocks and more are counted together, by numpy; fewer are counted faster one by one."""


class _AsArrays(NamedTuple):
    """What is known of each block, for numpy: the same memory."""

    owners: NDArray[np.int32]
    kept: NDArray[np.bool_]
    woken: NDArray[np.bool_]
    place: NDArray[np.int32]
    """Where a block was among those that were named last."""

    def distinct(self, blocks: Sequence[int]) -> Int64s | None:
        """Blocks to be counted together; None for few, or where some are gone or named twice."""
        if len(blocks) < _MANY:
            return None
        ids, places = np.array(blocks, np.int64), np.arange(len(blocks), dtype=np.int32)
        if ids.min() < 0:
            return None
        self.place[ids] = places
        return ids if np.array_equal(self.place[ids], places) else None


class BlockIds:
    """The block ids of a pool with their reference counts; the last freed is taken first.

    A block without an owner is free, or it is kept: what it holds may be asked for again.
    Kept blocks are taken when none is free, in the order of an `Eviction`.

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
        """Whether block 0 is nobody's: engines point padded entries of tables at it."""
        first = 1 if null_block else 0
        self._free = list(range(count - 1, first - 1, -1))
        self._owners = array("i", bytes(4 * count))
        if null_block and count:
            self._owners[0] = 1  # never taken, never given back
        self._kept = bytearray(count)
        """Whether the content of a block can be found, whether it has owners or not."""
        self._idle = 0
        """Kept blocks without an owner."""
        self._eviction = eviction
        self._evicted = evicted
        self._woken = bytearray(count)
        """Whether a block has an owner again since it was queued to be evicted."""
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
        self._arrays = self._as_arrays()  # a copy's counts, not those of what it is a copy of

    @property
    def free(self) -> int:
        """How many blocks can be taken: those that hold nothing, and those that are only kept."""
        return len(self._free) + self._idle

    @property
    def kept(self) -> int:
        """How many blocks without an owner are kept for who asks for them again."""
        return self._idle

    def require(self, count: int) -> None:
        """Refuse a need of more blocks than can be taken, before any is taken."""
        if count > self.free:
            raise AtlasError(
                Code.NO_BLOCKS,
                got=f"{count} needed and {self.free} free of {self.count}",
                hint="Make the cache for more or longer sequences, or reset it",
            )

    def take(self) -> int:
        """A free block, for one owner."""
        if not self._free:
            self.require(1)
            self._evict(1)
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def take_many(self, count: int) -> list[int]:
        """So many blocks at once, all or none."""
        self.require(count)
        if count > len(self._free):
            self._evict(count - len(self._free))
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        self._arrays.owners[np.array(taken, np.int64)] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner of each block; one that was only kept is in use again."""
        many = self._arrays.distinct(blocks)
        if many is not None:
            self._share_many(many)
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

    def _share_many(self, ids: Int64s) -> None:
        owners, kept, woken, _ = self._arrays
        asleep = ids[owners[ids] == 0]
        if not kept[asleep].all():
            raise _without_owner(int(asleep[~kept[asleep]][0]))
        woken[asleep] = True
        self._idle -= len(asleep)
        owners[ids] += 1

    def owners(self, block: int) -> int:
        """How many owners a block has."""
        return self._owners[block]

    def is_shared(self, block: int) -> bool:
        """Whether a block has several owners."""
        return self._owners[block] > 1

    def is_kept(self, block: int) -> bool:
        """Whether the content of a block can be found, so that nobody writes to it any more."""
        return bool(self._kept[block])

    def keep(self, blocks: Sequence[int]) -> None:
        """What blocks hold stays when their last owner goes, until it is evicted."""
        ids = np.array(blocks, np.int64)
        owned = self._arrays.owners[ids] > 0
        if not owned.all():
            raise _without_owner(int(ids[~owned][0]))
        self._arrays.kept[ids] = True

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less of each block; those without any are free again, or only kept."""
        many = self._arrays.distinct(blocks)
        if many is not None:
            self._release_many(many)
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
                    self._free.append(block)
        if idle:
            self._rest(np.array(idle, np.int64))

    def _release_many(self, ids: Int64s) -> None:
        owners, kept, *_ = self._arrays
        left = owners[ids] - 1
        wrong = (left < 0) | (ids == 0) if self.null_block else left < 0
        if wrong.any():
            raise _without_owner(int(ids[wrong][0]))
        owners[ids] = left
        last = ids[left == 0]
        stays = kept[last]
        self._free += last[~stays].tolist()
        if stays.any():
            self._rest(last[stays])

    def drop(self) -> list[int]:
        """Keep nothing any more: kept blocks without an owner are free; their ids."""
        owners, kept, *_ = self._arrays
        found = np.flatnonzero(kept)
        idle: list[int] = found[owners[found] == 0].tolist()
        if len(found) and self._eviction is not None:
            self._eviction.forget(found)
        kept[:] = False
        self._idle = 0
        self._free += idle
        return idle

    def evict(self, blocks: Sequence[int]) -> None:
        """Free blocks that are kept and have no owner, out of their turn."""
        ids = np.array(blocks, np.int64)
        owners, kept, *_ = self._arrays
        wrong = (owners[ids] > 0) | ~kept[ids]
        if wrong.any():
            problem = "Only blocks that are kept, and that nobody owns, are evicted"
            got = f"block {int(ids[wrong][0])}"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=got, hint="Release it first")
        if self._eviction is not None:
            self._eviction.forget(ids)
        self._let_go(ids)

    def _rest(self, idle: Int64s) -> None:
        """Kept blocks whose last owner went, in the order in which they are to go."""
        if self._eviction is None:
            raise AtlasError(
                Code.CONTRADICTORY, "Blocks are kept, and nothing says which is evicted first",
                got=f"{len(idle)} kept blocks", hint="Give the pool an eviction",
            )  # fmt: skip
        self._clock += 1
        self._arrays.woken[idle] = False
        self._idle += len(idle)
        self._eviction.used(idle, Use(self._clock))

    def _evict(self, count: int) -> None:
        if self._eviction is None:
            return
        self._let_go(self._eviction.victims(count, self._arrays.woken))

    def _let_go(self, ids: Int64s) -> None:
        """Kept blocks, the first to go first, are free."""
        victims: list[int] = ids.tolist()
        self._arrays.kept[ids] = False
        self._idle -= len(victims)
        self._free += reversed(victims)
        if self._evicted is not None:
            self._evicted(victims)


def _without_owner(block: int) -> AtlasError:
    problem = "A block that nobody owns can be neither shared, kept nor given back"
    hint = "Release each block once for each time it was taken or shared"
    return AtlasError(Code.OUT_OF_RANGE, problem, got=f"block {block}", hint=hint)
