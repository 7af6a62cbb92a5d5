"""Layer classes: groups of one pool that need the same tokens, simulated as one group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div
from kvatlas.planning import Plan
from kvatlas.pool.group_needs import hit_step, reuses_prefixes
from kvatlas.simulate.prompt_spans import check_step
from kvatlas.simulate.traces import Ints
from kvatlas.specs import Visibility

EVERYTHING = Visibility()


@dataclass(frozen=True)
class LayerClass:
    """Groups of one pool that have the same kind, visible tokens and block size."""

    needs: Literal["all", "window", "state"]
    pool: int
    blocks: int
    """Number of blocks per span (or per state), in all groups of the class together."""
    visibility: Visibility = EVERYTHING
    block_bytes: int = 1
    groups: int = 1
    """Number of groups."""
    block: int = 0
    """Number of tokens per block; 0 if it is that of a span."""

    def first(self, ends: Ints, step: int) -> Ints:
        """For each n in `ends`, return the first span that is needed to continue after n spans.

        A span is `step` tokens. The result contains indices of spans in the request.
        """
        if self.needs == "all":
            return ends * 0
        if self.needs == "state":
            return np.maximum(ends - 1, 0)
        first: Ints = self.visibility.first(ends * step) // step
        return np.minimum(first, ends)


@dataclass(frozen=True)
class PoolModel:
    """The properties of a plan that determine hits: layer classes and the sizes of pools."""

    step: int
    """Number of tokens per span. Hits end at multiples of it."""
    classes: tuple[LayerClass, ...]
    blocks: tuple[int, ...]
    """Number of blocks of each pool, without the null block."""
    rings: tuple[int, ...] = ()
    """Number of blocks that each request takes in each pool for rings; empty if there are none."""

    @classmethod
    def of(cls, plan: Plan, *, by_group: bool = False) -> PoolModel:
        """Return the properties of a plan.

        With `by_group`, groups belong to one layer class only if they are consecutive in the plan.
        """
        if not reuses_prefixes(plan):
            problem = "The plan must support prefix caching, because hits are simulated"
            got = f"a plan of {plan.model} with prefix_caching=False"
            hint = "Plan the model with prefix caching"
            if plan.prefix_caching:
                got = f"{plan.model}, whose cross attention cannot reuse prefixes"
                hint = "Use a model without cross attention"
            raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)
        step = hit_step(plan) * plan.dcp
        check_step(step)
        sizes: dict[int, tuple[int, int]] = {}
        for pool in plan.pools:
            least = min(pool.blocks, sizes.get(pool.index, (pool.blocks, 0))[0])
            total = sizes.get(pool.index, (0, 0))[1] + pool.block_bytes
            sizes[pool.index] = (least, total)
        order = {index: place for place, index in enumerate(sorted(sizes))}
        alike: dict[tuple[bool, Visibility, int, int, int], int] = {}
        run, before = 0, None
        for group in plan.groups:
            if group.kind == "ring":
                continue  # hits end where a group of tokens begins, so that no row is needed
            kind = (group.kind == "recurrent", group.visibility, group.block, group.pool)
            run += by_group and kind != before
            key, before = (*kind, run), kind
            alike[key] = alike.get(key, 0) + 1
        classes = [
            LayerClass(
                needs="state" if recurrent else "all" if seen == EVERYTHING else "window",
                pool=order[index],
                blocks=number * (1 if recurrent else ceil_div(step, block * plan.dcp)),
                visibility=seen,
                block_bytes=sizes[index][1] * plan.tp,
                groups=number,
                block=block * plan.dcp,
            )
            for (recurrent, seen, block, index, _), number in alike.items()
        ]
        blocks = tuple(sizes[index][0] - 1 for index in sorted(sizes))
        rings = [0] * len(blocks)
        for group in plan.groups:
            rings[order[group.pool]] += group.kind == "ring"
        return cls(step, tuple(classes), blocks, tuple(rings))

    @classmethod
    def plain(cls, step: int, blocks: int) -> PoolModel:
        """Return a model with full attention only. Its pool has `blocks` blocks."""
        return cls(step, (LayerClass("all", 0, 1),), (blocks,))
