"""Block ids of one pool: taken, shared by sequences, and given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvatlas.errors import AtlasError, Code

GONE = -1
"""Stands in a block table for a block that a window has left behind."""


class BlockAllocator:
    """The block ids of a pool with their reference counts; the last freed is taken first.

    >>> allocator = BlockAllocator(3)
    >>> block = allocator.take()
    >>> allocator.share([block])
    >>> allocator.release([block])
    >>> allocator.free
    2
    >>> allocator.release([block])
    >>> allocator.free, allocator.take() == block
    (3, True)
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))
        self._owners: Counter[int] = Counter()

    @property
    def free(self) -> int:
        """How many blocks no sequence owns."""
        return len(self._free)

    def require(self, count: int) -> None:
        """Refuse a need of more blocks than are free, before any is taken."""
        if count > self.free:
            raise AtlasError(
                Code.NO_BLOCKS,
                got=f"{count} needed and {self.free} free of {self.count}",
                hint="Make the cache for more or longer sequences, or reset it",
            )

    def take(self) -> int:
        """A free block, for one owner."""
        self.require(1)
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner of each block."""
        self._owners.update(block for block in blocks if block != GONE)

    def is_shared(self, block: int) -> bool:
        """Whether a block has several owners."""
        return self._owners[block] > 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less of each block; those without any are free again."""
        for block in blocks:
            if block != GONE:
                self._owners[block] -= 1
                if not self._owners[block]:
                    self._free.append(block)
