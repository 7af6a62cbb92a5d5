"""Topologies of one model around a tier, and what each of them should see.

Every byte comes from one base plan with random contents. What a topology holds, and
what it should hold after a fetch, is taken straight from the base along a route that
never meets a tier. Pools have guard bytes behind them, and are random before.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.copying.gather_scatter import gather, scatter
from kvatlas.models import Model
from kvatlas.planning import Group, Plan, plan
from kvatlas.routing import route, scattered
from kvatlas.tier import Tier, TierClient
from kvatlas.tier.any_tier import AnyTier

Pools = dict[int, NDArray[np.uint8]]

BlockTier = Tier | TierClient


GUARD = 64
MAX_LEN = 192


def small(model: Model, **options: Any) -> Plan:
    """A plan of few bytes."""
    about = {"memory": "1536KiB", "max_len": MAX_LEN, "in_flight": 0, **options}
    return plan(model, **about)


def tier_plan(model: Model, **options: Any) -> Plan:
    return small(model, **{"layout": "BLHNC", **options})


def pools(made: Plan, rank: int, seed: int) -> Pools:
    """A rank's pools with guard bytes behind them, all of it random."""
    rng = np.random.default_rng([seed, rank])
    return {
        pool.index: rng.integers(0, 256, pool.nbytes + GUARD, dtype=np.uint8)
        for pool in made.pools
        if pool.stage == rank // made.tp
    }


def every_block(made: Plan, tokens: int) -> dict[int, list[int]]:
    """Tables that have left nothing behind, no block twice."""
    free = {pool.index: iter(range(pool.blocks)) for pool in made.pools}
    return {
        index: [
            next(free[group.pool])
            for _ in range(-(-max(tokens, group.source) // group.block) if _paged(group) else 1)
        ]
        for index, group in enumerate(made.groups)
    }


def _paged(group: Group) -> bool:
    return group.kind != "recurrent"


class World:
    """A request's tokens, the same for every topology that holds them."""

    def __init__(self, model: Model, tokens: int, seed: int = 0, **options: Any) -> None:
        self.model, self.tokens = model, tokens
        # Parts of a split state have copies of shared rows, which random bytes would make unlike.
        self.base = small(model, **{"states": "apart", **options})
        self.contents = pools(self.base, 0, seed + 1000)
        self.tables = every_block(self.base, tokens)

    def put(self, made: Plan, rank: int, held: Pools, tables: Any, tokens: Any = None) -> None:
        """What a rank holds of the request, written where its tables say."""
        tokens = self.tokens if tokens is None else tokens
        way = route(self.base, made, padding=False)  # tiers keep no padding
        for copy in (
            way.bind(
                source_rank=0,
                destination_rank=rank,
                source_blocks=self.tables,
                destination_blocks=tables,
                tokens=tokens,
            ).copies
            if way.sources(rank)
            else ()
        ):
            stream = np.empty(copy.nbytes, dtype=np.uint8)
            gather([copy], self.contents, stream)
            scatter([copy], stream, held)

    def holding(self, made: Plan, rank: int, seed: int = 1) -> tuple[Pools, Any]:
        """A rank that has computed the request: its pools and tables."""
        held, tables = pools(made, rank, seed), scattered(made, self.tokens)
        self.put(made, rank, held, tables)
        return held, tables

    def keys(self, tier: AnyTier | Plan, tokens: int | None = None, salt: str = "") -> Any:
        """Keys of the request's blocks, by the tier's groups, as digests of their last token."""
        made = tier if isinstance(tier, Plan) else tier.plan
        stop = self.tokens if tokens is None else tokens
        return {
            index: [
                digest(f"{salt}{self.model.name} {min(end, stop)}")
                for end in range(group.block, max(stop, group.source) + group.block, group.block)
            ]
            for index, group in enumerate(made.groups)
        }

    def store(self, tier: AnyTier, made: Plan, ranks: Any = None, **about: Any) -> list[Any]:
        """Store from every rank, or some."""
        results = []
        for rank in range(made.tp * made.pp) if ranks is None else ranks:
            held, tables = self.holding(made, rank)
            request = {"tokens": self.tokens, "keys": self.keys(tier), **about}
            results.append(tier.store(held, made, rank=rank, blocks=tables, **request))
        return results

    def check(
        self,
        tier: AnyTier,
        made: Plan,
        tokens: Any = None,
        keys: Any = None,
        ranks: Any = None,
    ) -> None:
        """Fetch into ranks: the request's bytes are there, and no other byte has changed."""
        stop = self.tokens if tokens is None else tokens
        for rank in range(made.tp * made.pp) if ranks is None else ranks:
            tables = scattered(made, stop if isinstance(stop, int) else stop[1])
            got, expected = pools(made, rank, 7), pools(made, rank, 7)
            self.put(made, rank, expected, tables, stop)
            tier.fetch(
                {i: pool[:-GUARD] for i, pool in got.items()},
                made,
                rank=rank,
                blocks=tables,
                tokens=stop,
                keys=self.keys(tier) if keys is None else keys,
            )
            assert all(np.array_equal(got[i], expected[i]) for i in got)
            before = pools(made, rank, 7)
            assert any((got[i] != before[i]).any() for i in got), "nothing was fetched"


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
