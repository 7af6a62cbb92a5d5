"""Block ids of one pool: taken, shared, kept for who comes back, and evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.pool.eviction import Eviction, Use

GONE = -1
"""Stands in a block table for a block that a window has left behind."""


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
        self.count = count
        self.null_block = null_block
        """Whether block 0 is nobody's: engines point padded entries of tables at it."""
        first = int(null_block)
        self._free = list(range(count - 1, first - 1, -1))
        self._owners = [0] * count
        if null_block and count:
            self._owners[0] = 1  # never taken, never given back
        self._kept: set[int] = set()
        """Blocks whose content can be found, whether they have owners or not."""
        self._idle = 0
        """Kept blocks without an owner."""
        self._eviction = eviction
        self._evicted = evicted
        self._woken = bytearray(count)
        """Whether a block has an owner again since it was queued to be evicted."""
        self._clock = 0

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
        for block in taken:
            self._owners[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner of each block; one that was only kept is in use again."""
        owners, woken = self._owners, self._woken
        asleep = {block for block in blocks if block != GONE and not owners[block]}
        if not asleep <= self._kept:
            raise _without_owner(min(asleep - self._kept))
        for block in asleep:
            woken[block] = True
        self._idle -= len(asleep)
        for block in blocks:
            if block != GONE:
                owners[block] += 1

    def owners(self, block: int) -> int:
        """How many owners a block has."""
        return self._owners[block]

    def is_shared(self, block: int) -> bool:
        """Whether a block has several owners."""
        return self._owners[block] > 1

    def is_kept(self, block: int) -> bool:
        """Whether the content of a block can be found, so that nobody writes to it any more."""
        return block in self._kept

    def keep(self, blocks: list[int]) -> None:
        """What blocks hold stays when their last owner goes, until it is evicted."""
        if not all(map(self._owners.__getitem__, blocks)):
            raise _without_owner(min(blocks, key=self._owners.__getitem__))
        self._kept.update(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less of each block; those without any are free again, or only kept."""
        owners, kept, idle = self._owners, self._kept, []
        null = 0 if self.null_block else GONE
        for block in blocks:
            if block == GONE:
                continue
            count = owners[block]
            if not count or block == null:
                raise _without_owner(block)
            owners[block] = count - 1
            if count == 1:
                if block in kept:
                    idle.append(block)
                else:
                    self._free.append(block)
        if idle:
            self._rest(idle)

    def drop(self) -> list[int]:
        """Keep nothing any more: kept blocks without an owner are free; their ids."""
        idle = [block for block in self._kept if not self._owners[block]]
        if self._kept and self._eviction is not None:
            self._eviction.forget(np.array(list(self._kept), np.int64))
        self._kept.clear()
        self._idle = 0
        self._free += idle
        return idle

    def _rest(self, idle: list[int]) -> None:
        """Kept blocks whose last owner went, in the order in which they are to go."""
        if self._eviction is None:
            raise AtlasError(
                Code.CONTRADICTORY, "Blocks are kept, and nothing says which is evicted first",
                got=f"{len(idle)} kept blocks", hint="Give the pool an eviction",
            )  # fmt: skip
        self._clock += 1
        ids = np.array(idle, np.int64)
        np.frombuffer(self._woken, bool)[ids] = False
        self._idle += len(idle)
        self._eviction.used(ids, Use(self._clock))

    def _evict(self, count: int) -> None:
        if self._eviction is None:
            return
        woken = np.frombuffer(self._woken, bool)
        victims = self._eviction.victims(count, woken).tolist()
        self._kept.difference_update(victims)
        self._idle -= len(victims)
        self._free += reversed(victims)
        if self._evicted is not None:
            self._evicted(victims)


def _without_owner(block: int) -> AtlasError:
    problem = "A block that nobody owns can be neither shared, kept nor given back"
    hint = "Release each block once for each time it was taken or shared"
    return AtlasError(Code.OUT_OF_RANGE, problem, got=f"block {block}", hint=hint)
