"""Caches in the middle of larger buffers, whose edges nobody may touch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvatlas.cache import bind
from kvatlas.engines.transformers import AtlasCache, make_plan
from kvatlas.planning import Plan
from kvatlas.pool import BlockPool
from tests.engines.zoo import NEW, PROMPTS, model_of

GUARD = 4096
_EDGE = 0xA5
_DIRT = 0x7F
"""What memory holds before anybody writes to it: large numbers in every float dtype."""

LONGEST = max(PROMPTS) + NEW


class Guarded:
    """Caches that were made, and the buffers that they lie in."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def cache(self, name: str, **options: Any) -> AtlasCache:
        """A cache for a model of the zoo, in memory that is dirty."""
        options = {"batch": len(PROMPTS), "max_len": LONGEST, **options}
        return self.bind(make_plan(model_of(name).config, **options))

    def bind(self, plan: Plan, pool: BlockPool | None = None) -> AtlasCache:
        """A cache for a plan, in memory that is dirty."""
        pools = {}
        for each in plan.pools:
            raw = torch.full((each.nbytes + 2 * GUARD,), _EDGE, dtype=torch.uint8)
            pools[each.index] = raw[GUARD:-GUARD].fill_(_DIRT)
            self._buffers.append(raw)
        return AtlasCache(bind(pools, plan), pool)

    def check(self) -> None:
        """Refuse a buffer whose edges have changed."""
        for raw in self._buffers:
            assert bool((raw[:GUARD] == _EDGE).all())
            assert bool((raw[-GUARD:] == _EDGE).all())


@contextmanager
def guarded() -> Iterator[Guarded]:
    """Caches whose edges are checked in the end."""
    made = Guarded()
    yield made
    made.check()
