"""Checkpoints in a part of a pool at most; attention may have what they leave of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import islice

from kvatlas.planning import Plan
from kvatlas.pool.block_ids import BlockIds
from kvatlas.specs import Visibility


class CheckpointShare:
    """Blocks of windows and states that can be found, at most so many of a pool."""

    def __init__(self, ids: BlockIds, most: int) -> None:
        self._ids, self.most = ids, most
        self._kept: OrderedDict[int, None] = OrderedDict()
        """The longest unused first."""

    def __len__(self) -> int:
        return len(self._kept)

    def make_room(self, count: int, beside: Collection[int] = ()) -> bool:
        """Let the longest unused go until there is room for so many more; whether there is.

        Those `beside` which they are kept stay.
        """
        over = len(self._kept) + count - self.most
        if over <= 0:
            return True
        others = (one for one in self._kept if one not in beside and not self._ids.owners(one))
        idle = list(islice(others, over))
        if len(idle) < over:
            return False
        self._ids.evict(idle)
        return True

    def use(self, blocks: Iterable[int]) -> None:
        """Blocks that are kept from now on, or that a request has found."""
        for block in blocks:
            self._kept[block] = None
            self._kept.move_to_end(block)

    def lose(self, blocks: Iterable[int]) -> None:
        """Blocks that are not found any more."""
        for block in blocks:
            self._kept.pop(block, None)

    def clear(self) -> None:
        """Nothing is found any more."""
        self._kept.clear()


def checkpoint_shares(
    plan: Plan, ids: dict[int, BlockIds], share: float | None
) -> dict[int, CheckpointShare]:
    """By pool; none for a pool that checkpoints, or attention, have for themselves."""
    if share is None:
        return {}
    kinds: dict[int, set[bool]] = {}
    for group in plan.groups:
        sparse = group.kind == "recurrent" or group.visibility != Visibility()
        kinds.setdefault(group.pool, set()).add(sparse)
    return {
        pool: CheckpointShare(ids[pool], int(share * ids[pool].count))
        for pool, found in kinds.items()
        if len(found) == 2
    }
