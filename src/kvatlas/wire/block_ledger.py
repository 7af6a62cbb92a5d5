"""Block ownership: two operations of a node cannot use a block in conflicting ways.

A block is free, offered (any number of offers and pushes read it), being filled by one pull,
expected (one push will fill it), or quarantined (a failed pull may still write to it). Every
operation of a node claims its blocks first, and fails with `blocks_in_use` if another claim
conflicts. Each claim has a generation, so an old owner cannot release a newer owner's claim.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.planning import Plan

Use = Literal["offered", "filling", "expected", "quarantined"]
"""How a claim uses its blocks."""

_SHOWN = 8
_VERBS: dict[Use, str] = {
    "offered": "offered as",
    "filling": "being filled by",
    "expected": "expected for",
    "quarantined": "quarantined by",
}
_HINTS: dict[Use, str] = {
    "offered": "Withdraw the offer, or wait until it is released",
    "filling": "Wait until the transfer has ended, or use other blocks",
    "expected": "Forget the request first, or use other blocks",
    "quarantined": "Wait for Transfer.wait_released(), or use other blocks",
}


@dataclass(eq=False, slots=True)
class BlockClaim:
    """The right to use blocks until `release`. Made by `BlockLedger.claim`."""

    _ledger: BlockLedger
    generation: int
    use: Use
    request: str
    blocks: Mapping[int, Int64s]
    """The claimed block ids, by pool index."""

    @property
    def shared(self) -> bool:
        """Whether other offers and pushes may claim the same blocks."""
        return self.use == "offered"

    def quarantine(self) -> None:
        """Mark the blocks as quarantined, because a transport may still write to them.

        The blocks stay claimed until `release`. A shared claim is left unchanged.
        """
        if not self.shared:
            self.use = "quarantined"

    def release(self) -> None:
        """Free the blocks. A second call has no effect."""
        self._ledger.release(self)


class BlockLedger:
    """The claims on the blocks of one rank. All methods are thread-safe.

    >>> from kvatlas.planning import plan
    >>> ledger = BlockLedger(plan("Qwen3-8B", memory="1GiB", max_len=512), rank=0)
    >>> first = ledger.claim("offered", "request 1", {0: np.array([4, 7])})
    >>> second = ledger.claim("offered", "request 2", {0: np.array([7])})
    >>> ledger.claim("filling", "request 3", {0: np.array([6, 7])})
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: The node already uses some of these blocks. Got blocks [7] of pool \
0, offered as 'request 1'. Withdraw the offer, or wait until it is released. [blocks_in_use]
    >>> first.release(), second.release(), len(ledger)
    (None, None, 0)
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        pools = plan.rank_pools(rank)
        self._pool_of = [group.pool for group in plan.groups]
        self._state = {index: np.zeros(pool.blocks, np.int64) for index, pool in pools.items()}
        """For each pool, one number per block.

        The number is 0 for a free block, -n for a block with n shared claims, and the claim's
        generation for a block with an exclusive claim.
        """
        self._claims: dict[int, BlockClaim] = {}
        self._unmarked: BlockClaim | None = None
        """The only claim, while there is exactly one.

        `_state` does not contain it until there is a second claim, so a pull into an idle node need
        not mark its blocks.
        """
        self._generation = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of claims."""
        return len(self._claims)

    def by_pool(self, tables: Mapping[int, Int64s]) -> dict[int, Int64s]:
        """Return one array of block ids for each pool, by pool index.

        `tables` maps the index of each group to its block table. Negative ids are left out.
        """
        ids: dict[int, list[Int64s]] = {}
        for group, table in tables.items():
            ids.setdefault(self._pool_of[group], []).append(table[table >= 0])
        return {
            pool: own[0] if len(own) == 1 else np.concatenate(own)
            for pool, own in ids.items()
            if pool in self._state
        }

    def claim(self, use: Use, request: str, blocks: Mapping[int, Int64s]) -> BlockClaim:
        """Claim blocks, or raise `blocks_in_use`.

        `blocks` maps each pool's index to block ids. Ids out of range are ignored.
        """
        with self._lock:
            self._generation += 1
            claim = BlockClaim(self, self._generation, use, request, blocks)
            if not self._claims:
                self._unmarked = claim
            else:
                if self._unmarked is not None:
                    self._mark(self._unmarked)
                    self._unmarked = None
                self._check(claim)
                self._mark(claim)
            self._claims[claim.generation] = claim
        return claim

    def release(self, claim: BlockClaim) -> None:
        """End a claim. No effect if it has already ended."""
        with self._lock:
            if self._claims.pop(claim.generation, None) is None:
                return
            if self._unmarked is claim:
                self._unmarked = None
                return
            for pool, ids in claim.blocks.items():
                if claim.shared:
                    self._state[pool][ids] += 1
                else:
                    self._state[pool][ids] = 0

    def uses(self) -> Counter[Use]:
        """Return the number of claims of each use, such as `offered`."""
        with self._lock:
            return Counter(claim.use for claim in self._claims.values())

    def _mark(self, claim: BlockClaim) -> None:
        """Enter a claim in `_state`, so that later claims are checked against it."""
        claim.blocks = {pool: self._existing(pool, ids) for pool, ids in claim.blocks.items()}
        for pool, ids in claim.blocks.items():
            if claim.shared:
                self._state[pool][ids] -= 1
            else:
                self._state[pool][ids] = claim.generation

    def _check(self, claim: BlockClaim) -> None:
        """Raise `blocks_in_use` if an earlier claim on one of the blocks conflicts."""
        for pool, given in claim.blocks.items():
            ids = self._existing(pool, given)
            state = self._state[pool][ids]
            taken = state > 0 if claim.shared else state != 0
            if taken.any():
                raise self._in_use(pool, ids[taken])

    def _existing(self, pool: int, ids: Int64s) -> Int64s:
        """Return the `ids` that are in the pool's range. The route reports all other ids later."""
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self._state[pool])):
            return ids[(ids >= 0) & (ids < len(self._state[pool]))]
        return ids

    def _in_use(self, pool: int, ids: Int64s) -> AtlasError:
        """Return the error for blocks in use. It names the oldest claim on one of them."""
        none = np.zeros(0, np.int64)
        for owner in self._claims.values():
            same = ids[np.isin(ids, owner.blocks.get(pool, none))]
            if len(same):
                break
        got = f"blocks {same[:_SHOWN].tolist()} of pool {pool}, {_VERBS[owner.use]} "
        return AtlasError(Code.BLOCKS_IN_USE, got=f"{got}{owner.request!r}", hint=_HINTS[owner.use])
