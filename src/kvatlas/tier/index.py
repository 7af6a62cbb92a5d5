"""The index of a tier: the content and the users of each block, and the eviction order.

A block is free, being filled by the ranks of a topology, or complete ("whole"). Lookups find
only complete blocks. A block that is being read or filled is never evicted. Of the others, the
least recently used one is evicted when space is needed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvatlas.errors import AtlasError
from kvatlas.planning import Plan
from kvatlas.tier.blocks import Claim, PartSums, TierBlock
from kvatlas.tier.ingest import Delivery, Ingest
from kvatlas.tier.request_blocks import Cover, NeededBlock


class BlockIndex:
    """Blocks of a tier by key, in LRU order. All methods are thread-safe."""

    def __init__(self, plan: Plan, cleared: Callable[[TierBlock], None]) -> None:
        self.plan = plan
        self.lock = threading.RLock()
        self.sequence = 0
        self.evicted = 0
        self._cleared = cleared
        self._free = {p.index: list(range(p.blocks - 1, -1, -1)) for p in plan.pools}
        self._whole: dict[tuple[int, bytes], TierBlock] = {}
        self._filling: dict[tuple[Any, ...], TierBlock] = {}
        self._recent = {p.index: OrderedDict[TierBlock, None]() for p in plan.pools}
        self._uncleared: dict[tuple[int, int], tuple[TierBlock, AtlasError]] = {}
        """Free blocks whose records could not be cleared. They must be cleared before reuse."""

    def __len__(self) -> int:
        with self.lock:
            return len(self._whole)

    def free(self, pool: int) -> int:
        """Return the number of free blocks of a pool."""
        with self.lock:
            return len(self._free[pool])

    def restore(self, blocks: Iterable[TierBlock]) -> list[TierBlock]:
        """Add the complete blocks of an opened file.

        Returns blocks that were left out because a newer block has the same group and key.
        """
        older = []
        with self.lock:
            for block in sorted(blocks, key=lambda one: one.sequence):
                if block.name in self._whole:
                    older.append(self._whole.pop(block.name))
                self._whole[block.name] = block
                self.sequence = block.sequence
            for block in self._whole.values():
                self._recent[block.pool][block] = None
            for pool, ids in self._free.items():
                taken = {block.block_id for block in self._recent[pool]}
                self._free[pool] = [block_id for block_id in ids if block_id not in taken]
        return older

    # -- finding ------------------------------------------------------------------------

    def present(self, needs: Sequence[NeededBlock]) -> list[bool]:
        """Return for each need whether a complete block contains the needed tokens."""
        with self.lock:
            return [self._find(need) is not None for need in needs]

    def has(self, group: int, key: bytes) -> bool:
        """Return whether a group has a complete block with this key."""
        with self.lock:
            return (group, key) in self._whole

    def names(self) -> list[tuple[int, bytes]]:
        """Return the (group, key) of all complete blocks, least recently used first."""
        with self.lock:
            return [block.name for lru in self._recent.values() for block in lru if block.whole]

    def pin(self, needs: Sequence[NeededBlock]) -> list[TierBlock] | None:
        """Pin and return all needed blocks, or return None if one is absent."""
        with self.lock:
            blocks = []
            for need in needs:
                block = self._find(need)
                if block is None:
                    return None
                blocks.append(block)
            for block in blocks:
                block.pins += 1
            self._touch(zip(needs, blocks, strict=True))
            return blocks

    def unpin(self, blocks: Iterable[TierBlock]) -> None:
        """Release one pin of each block."""
        with self.lock:
            for block in blocks:
                block.pins -= 1
                self._free_dropped(block)

    def drop(self, block: TierBlock) -> None:
        """Hide a block from lookups immediately, and free it when it is no longer used.

        If the block's record cannot be cleared now, the next call that takes the block tries again.
        """
        with self.lock:
            if block.dropped:
                return
            block.dropped = True
            if self._whole.get(block.name) is block:
                del self._whole[block.name]
            self._recent[block.pool].pop(block, None)
            if self._filling.get(block.fill_key) is block:
                del self._filling[block.fill_key]  # it has no record yet
            else:
                self._clear(block)
            self._free_dropped(block)

    def _clear(self, block: TierBlock) -> None:
        try:
            self._cleared(block)
            self._uncleared.pop(block.place, None)
        except AtlasError as problem:
            self._uncleared[block.place] = block, problem

    def drop_keys(self, keys: Iterable[tuple[int, bytes]]) -> int:
        """Remove blocks by (group, key) and return how many existed."""
        with self.lock:
            blocks = [self._whole[name] for name in keys if name in self._whole]
            for block in blocks:
                self.drop(block)
            for block in blocks:
                self._check_cleared(block.pool, block.block_id)
            return len(blocks)

    # -- filling ------------------------------------------------------------------------

    def claim(self, needs: Sequence[NeededBlock], ingest: Ingest, rank: int) -> Claim:
        """Claim one block for each absent key, for the rank to fill, until no space is left."""
        claim = Claim(rank)
        with self.lock:
            looked_up = [(need, self._find(need)) for need in needs if need.key is not None]
            present = [(need, block) for need, block in looked_up if block is not None]
            for _, block in present:  # pinned first, so that no key of a request evicts another
                block.pins += 1
                claim.pinned.append(block)
            claim.whole = len(claim.pinned)
            try:
                for need, whole in looked_up:
                    if whole is None:
                        self._claim_one(claim, need, ingest)
            except BaseException:
                self.arrived(claim, ingest, None)
                self.unpin(claim.pinned)
                raise
            self._touch([*present, *claim.fills])
        return claim

    def _claim_one(self, claim: Claim, need: NeededBlock, ingest: Ingest) -> None:
        assert need.key is not None  # noqa: S101
        fill_key = (need.group, need.key, need.cover, ingest.number)
        block = self._filling.get(fill_key)
        if block is None:
            pool = self.plan.groups[need.group].pool
            block_id = self._room(pool)
            if block_id is None:
                claim.no_room += 1
                return
            block = TierBlock(pool, block_id, need.group, need.key, need.cover, fill_key=fill_key)
            self._filling[fill_key] = block
            self._recent[pool][block] = None
        elif claim.rank in block.brought or claim.rank in block.writing:
            claim.waiting += 1  # another call writes or has written this rank's bytes
            return
        block.writing.add(claim.rank)
        claim.fills.append((need, block))

    def arrived(
        self,
        claim: Claim,
        ingest: Ingest,
        brought: dict[Any, Delivery] | None,
        sums: PartSums | None = None,
    ) -> list[TierBlock]:
        """Record that a rank has written the blocks it claimed, or has failed.

        `brought` contains the byte ranges that the rank has written, by `NeededBlock.shape`, or is
        None if the rank has failed. `sums` are the rank's contributions to block checksums. Returns
        the blocks that are now complete, pinned and with a sequence number. Pass them to `settle`.
        """
        ready = []
        with self.lock:
            for need, block in claim.fills:
                block.writing.discard(claim.rank)
                if brought is not None:
                    block.brought[claim.rank] = brought[need.shape]
                    if sums and block.place in sums:
                        block.sums[claim.rank] = sums[block.place]
                if not block.writing and not block.brought:
                    self.drop(block)
                elif not block.writing and ingest.whole(need.shape, block.brought):
                    self.sequence += 1
                    block.sequence = self.sequence
                    block.pins += 1
                    del self._filling[block.fill_key]
                    ready.append(block)
                else:
                    claim.waiting += brought is not None
        return ready

    def settle(self, blocks: Iterable[TierBlock], *, whole: bool = True) -> None:
        """Make committed blocks findable.

        With `whole=False`, free the blocks instead, because their commit has failed.
        """
        with self.lock:
            for block in blocks:
                block.brought.clear()
                block.sums.clear()
                older = self._whole.get(block.name)
                if not whole or (older is not None and self._serves(older, block.cover)):
                    self.drop(block)
                else:
                    if older is not None:
                        self.drop(older)
                    block.whole = True
                    self._whole[block.name] = block
                self.unpin([block])

    # -- room ---------------------------------------------------------------------------

    def _room(self, pool: int) -> int | None:
        """Take a free block of a pool, evicting one if necessary, and return its id.

        Returns None if all blocks are in use.
        """
        if not self._free[pool]:
            idle = (block for block in self._recent[pool] if not block.pins and not block.writing)
            victim = next(idle, None)
            if victim is None:
                return None
            self.evicted += victim.whole
            self.drop(victim)
        block_id = self._free[pool][-1]
        if (pool, block_id) in self._uncleared:
            self._clear(self._uncleared[pool, block_id][0])
            self._check_cleared(pool, block_id)
        return self._free[pool].pop()

    def _check_cleared(self, pool: int, block_id: int) -> None:
        """Raise an error if the last attempt to clear the record of this block has failed."""
        if (pool, block_id) in self._uncleared:
            raise self._uncleared[pool, block_id][1]

    def _touch(self, used: Iterable[tuple[NeededBlock, TierBlock]]) -> None:
        # Later tokens are evicted first: without its beginning, the rest of a prefix is useless.
        for _, block in sorted(used, key=lambda one: -one[0].entry):
            if block in self._recent[block.pool]:
                self._recent[block.pool].move_to_end(block)

    def _free_dropped(self, block: TierBlock) -> None:
        if block.dropped and not block.pins:
            # Blocks whose records could not be cleared are taken last.
            last = block.place not in self._uncleared
            free = self._free[block.pool]
            free.insert(len(free) if last else 0, block.block_id)

    def _find(self, need: NeededBlock) -> TierBlock | None:
        block = self._whole.get((need.group, need.key)) if need.key is not None else None
        return block if block is not None and self._serves(block, need.cover) else None

    def _serves(self, block: TierBlock, cover: Cover) -> bool:
        """Return whether a block contains the tokens in `cover`.

        For a recurrent state, this requires the state after exactly the same number of tokens.
        """
        if block.cover == cover:
            return True
        if self.plan.groups[block.group].kind == "recurrent":
            return False
        return block.cover.first <= cover.first and cover.stop <= block.cover.stop
