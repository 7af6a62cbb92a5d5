"""Small plans and block tables for transfers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.specs import Spec
from tests.planning.models import model_of
from tests.routing import oracle
from tests.routing.oracle import Move, Side, Tables

Style = Literal["shuffled", "neighbours", "reversed", "gaps"]

_MEMORIES = [1 << n for n in (15, 17, 19, 21, 22, 23, 24, 25, 26, 27)]


def stacked(name: str, *specs: Spec) -> Model:
    """A model with one cache in each of its layers."""
    return model_of(name, *({"cache": spec} for spec in specs), heads=24)


@lru_cache(maxsize=512)
def small_plan(model: Model, *, least: int = 0, **ask: Any) -> Plan:
    """A plan in the least memory that takes a request, so that every byte can be walked.

    Remembered, since many cases differ only in what is at the other end.
    """
    ask = {"max_len": 96, "in_flight": 0, **ask}
    for memory in [max(memory, least) for memory in _MEMORIES]:
        try:
            return plan(model, memory=memory, **ask)
        except AtlasError as refusal:
            if refusal.code is not Code.NOT_ENOUGH_MEMORY or memory == _MEMORIES[-1]:
                raise
    raise AssertionError


def _ids(blocks: int, style: Style, rng: np.random.Generator) -> Iterator[int]:
    ids = np.arange(blocks)
    if style == "shuffled":
        ids = rng.permutation(blocks)
    elif style == "reversed":
        ids = ids[::-1]
    elif style == "gaps":
        ids = np.concatenate([ids[1::2], ids[::2]])
    yield from ids.tolist()


def tables(
    move: Move,
    side: Side,
    *,
    style: Style = "shuffled",
    complete: bool = False,
    single: bool = False,
    seed: int = 0,
) -> Tables:
    """Block ids for every group: each its own, nonsense where nothing of a block moves.

    `complete` gives every entry up to the last a block; `single` gives a recurrent group
    its one block alone.
    """
    rng = np.random.default_rng(seed)
    made = move.plan(side)
    free = {pool.index: _ids(pool.blocks, style, rng) for pool in made.pools}
    wanted = {index: oracle.entries(move, side, index) for index in range(len(made.groups))}
    for index, group in enumerate(made.groups):
        if single and group.kind == "recurrent" and wanted[index]:
            wanted[index] = {0}
    if complete:
        full = {index: set(range(max(found, default=-1) + 1)) for index, found in wanted.items()}
        taken = {pool.index: 0 for pool in made.pools}
        for index, group in enumerate(made.groups):
            taken[group.pool] += len(full[index])
        # A pool may hold what a request keeps, and not all that windows have left behind.
        if all(taken[pool.index] <= pool.blocks for pool in made.pools):
            wanted = full
    return {
        index: [
            next(free[group.pool]) if entry in wanted[index] else int(rng.choice([-1, 0, 1 << 40]))
            for entry in range(max(wanted[index], default=-1) + 1)
        ]
        for index, group in enumerate(made.groups)
    }


def moving(
    src: Plan,
    dst: Plan,
    tokens: int | tuple[int, int],
    *,
    layers: tuple[str, ...] | None = None,
    seed: int = 0,
    **how: Any,
) -> Move:
    """A request of these tokens between two plans, in blocks chosen by `seed`."""
    span = tokens if isinstance(tokens, tuple) else (0, tokens)
    bare = Move(src, dst, {}, {}, span)
    return Move(
        src,
        dst,
        tables(bare, "source", seed=seed, **how),
        tables(bare, "destination", seed=seed + 1, **how),
        span,
        layers,
    )
