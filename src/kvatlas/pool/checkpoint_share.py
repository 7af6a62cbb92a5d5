"""Limit the fraction of a pool that checkpoints take, if full attention shares the pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import islice

from kvatlas.planning import Plan
from kvatlas.pool.block_ids import BlockIds
from kvatlas.pool.group_needs import keeps_all


class CheckpointShare:
    """At most `most` checkpoint blocks of a pool. The least recently used is evicted first."""

    def __init__(self, ids: BlockIds, most: int) -> None:
        self._ids, self.most = ids, most
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Kept blocks, least recently used first."""

    def __len__(self) -> int:
        return len(self._kept)

    def make_room(self, count: int, beside: Collection[int] = ()) -> bool:
        """Evict the least recently used checkpoint blocks until `count` more are allowed.

        Blocks in `beside` and blocks with an owner are not evicted. If the other blocks do not
        suffice, evict nothing and return False.
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
        """Record that the checkpoints in these blocks were just stored or reused."""
        for block in blocks:
            self._kept[block] = None
            self._kept.move_to_end(block)

    def lose(self, blocks: Iterable[int]) -> None:
        """Remove evicted blocks from the count of checkpoint blocks."""
        for block in blocks:
            self._kept.pop(block, None)

    def clear(self) -> None:
        """Remove all blocks from the count of checkpoint blocks."""
        self._kept.clear()


def checkpoint_shares(
    plan: Plan, ids: dict[int, BlockIds], share: float | None
) -> dict[int, CheckpointShare]:
    """Return a `CheckpointShare` for each pool with both checkpoints and full attention.

    Checkpoints may take the fraction `share` of each such pool. The result is empty if `share` is
    None.
    """
    if share is None:
        return {}
    kinds: dict[int, set[bool]] = {}
    for group in plan.groups:
        kinds.setdefault(group.pool, set()).add(keeps_all(group))
    return {
        pool: CheckpointShare(ids[pool], int(share * ids[pool].count))
        for pool, found in kinds.items()
        if len(found) == 2
    }
