"""Block ids of one pool: taken, shared and given back.

A block id belongs to one group at a time, and to every row of it that shares it.
"""

from __future__ import annotations

from collections import Counter

from kvatlas.errors import AtlasError, Code


class Blocks:
    """The ids of a pool; the one that was given back last is taken first.

    >>> ids = Blocks(3)
    >>> first, second = ids.take(), ids.take()
    >>> ids.share(first)
    >>> ids.drop(first), ids.drop(first), ids.take() == first
    (False, True, True)
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))
        self._owners: Counter[int] = Counter()

    @property
    def free(self) -> int:
        """How many ids nobody owns."""
        return len(self._free)

    def require(self, count: int) -> None:
        """Refuse what needs more ids than are free, before anything is done."""
        if count > self.free:
            raise AtlasError(
                Code.NO_BLOCKS,
                "A pool has a free block when one is needed",
                got=f"{count} needed and {self.free} free of {self.count}",
                hint="Make the cache for more rows or longer ones, or reset it",
            )

    def take(self) -> int:
        """An id for one owner."""
        self.require(1)
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner of an id."""
        self._owners[block] += 1

    def shared(self, block: int) -> bool:
        """Whether an id has several owners."""
        return self._owners[block] > 1

    def drop(self, block: int) -> bool:
        """One owner less; whether that was the last."""
        self._owners[block] -= 1
        if self._owners[block]:
            return False
        self._free.append(block)
        return True
