"""Any model, any two plans of it, any request: hypothesis draws, and brute force compares.

A few hundred examples by default, 10,000 with the deep profile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from kvatlas import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Copy, Route, route
from kvatlas.specs import (
    FullAttention,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    Ring,
    SlidingAttention,
    Spec,
)
from tests.profiles import DEEP
from tests.routing import oracle
from tests.routing.arrives import ask, assert_arrives, assert_prepared_arrives
from tests.routing.oracle import Memory, Move
from tests.routing.strategies import KINDS, requests

quiet = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
each = settings(quiet, max_examples=max(5, settings().max_examples // len(KINDS) + 1))
fewer = settings(quiet, max_examples=settings().max_examples // 4)
first = settings(quiet, max_examples=1000, phases=[Phase.generate], database=None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_byte_arrives_once_and_nothing_else_is_touched(kind: type[Spec]) -> None:
    """The examples of a profile, divided among all kinds of layers."""
    moved = []

    @each
    @given(requests(kind))
    def run(move: Move) -> None:
        assert_arrives(move)
        moved.append("something moves" in traits(move))

    run()
    # Plans that are refused are drawn again: enough must be left, with something to move.
    assert len(moved) >= 0.9 * each.max_examples
    assert any(moved)


TRAITS: dict[str, type[Spec]] = {
    "unlike tp": FullAttention,
    "unlike orders": FullAttention,
    "unlike blocks": FullAttention,
    "unlike packing": FullAttention,
    "kernel blocks": FullAttention,
    "pipelines": SlidingAttention,
    "context parallel": LatentAttention,
    "part of a prompt": LatentAttention,
    "some layers": Indexer,
    "cut states": GatedDeltaNet,
    "unlike rings": Ring,
    "unlike rings that fill a page": Ring,
    "rows around the end of a ring": Ring,
}
"""What makes a transfer hard, and a kind of layer among whose examples it must be found."""


RARE = "rows around the end of a ring"
"""A trait of so few examples that finding one takes 17 seconds."""
IF_DEEP = pytest.mark.skipif(not DEEP, reason="only in the deep profile")


@pytest.mark.slow
@pytest.mark.parametrize(
    "trait",
    [pytest.param(one, marks=IF_DEEP) if one == RARE else one for one in TRAITS],
)
def test_what_is_drawn_has_every_trait(trait: str) -> None:
    find(requests(TRAITS[trait]), lambda move: trait in traits(move), settings=first)


def traits(move: Move) -> list[str]:
    both = (move.source, move.destination)
    specs = [{n: r.layers[s].spec for n in p.layers for r, s in [p.region_of(n)]} for p in both]
    rings = [
        (one, two)
        for one, two in zip(specs[0].values(), map(specs[1].get, specs[0]), strict=True)
        if isinstance(one, Ring) and isinstance(two, Ring)
    ]
    found = {
        "something moves": any(oracle.states(move, name) for name in move.destination.layers),
        "unlike tp": move.source.tp != move.destination.tp,
        "unlike orders": move.source.layout != move.destination.layout,
        "unlike blocks": {g.block for g in move.source.groups}
        != {g.block for g in move.destination.groups},
        "pipelines": max(p.pp for p in both) > 1,
        "context parallel": max(p.dcp for p in both) > 1,
        "unlike packing": specs[0] != specs[1],
        "part of a prompt": move.tokens[0] > 0,
        "some layers": move.layers is not None,
        "cut states": any(r.splits > 1 for p in both for r in p.regions),
        "unlike rings": bool(rings) and any(one.rows != two.rows for one, two in rings),
        "unlike rings that fill a page": any(
            one.fills_page and two.fills_page and one.rows != two.rows for one, two in rings
        ),
        "rows around the end of a ring": any(
            last // ring.rows > first // ring.rows
            for ends in rings
            for ring in ends
            for first, last in [(move.tokens[1] // ring.group * ring.group, move.tokens[1] - 1)]
        ),
        "kernel blocks": any(r.kernel_block != r.block for p in both for r in p.regions),
    }
    return [trait for trait, held in found.items() if held]


@fewer
@given(requests())
def test_plans_that_travelled_give_the_same_copies(move: Move) -> None:
    here = route(move.source, move.destination)
    there = route(*(Plan.from_json(made.to_json()) for made in (move.source, move.destination)))
    for rank in oracle.ranks(move.destination):
        assert here.sources(rank) == there.sources(rank)
        for source in here.sources(rank):
            one, other = (
                r.bind(source_rank=source, destination_rank=rank, **ask(move)).copies
                for r in (here, there)
            )
            assert list(map(listed, one)) == list(map(listed, other))


def listed(copy: Any) -> list[Any]:
    return [
        copy.source_pool,
        copy.destination_pool,
        copy.source.tolist(),
        copy.destination.tolist(),
        copy.length.tolist(),
    ]


@fewer
@given(requests(), st.data())
def test_a_request_in_pieces_is_the_whole(move: Move, data: st.DataObject) -> None:
    """Layer by layer, and up to a token and on from it: the same memory as in one go."""
    rng = np.random.default_rng(0)
    made = route(move.source, move.destination)
    sources = oracle.fill(move, rng)
    rank = data.draw(st.sampled_from(oracle.ranks(move.destination)))
    start, stop = move.tokens
    cut = data.draw(st.integers(start, stop))
    poison = Memory(move.destination, rank, rng)
    after = poison.copy()
    names = [name for name in move.destination.layers if move.layers is None or name in move.layers]
    for name in names:
        for piece in pieces(move, made, name, cut):
            bring(made, piece, rank, sources, after)
    right, _ = oracle.expected(move, rank, poison)
    after.assert_equal(right, f"rank {rank} in pieces")


def pieces(move: Move, made: Route, name: str, cut: int) -> list[Move]:
    """One layer's transfer in two pieces; in one where it has a window, or a single state."""
    start, stop = move.tokens
    groups = {p.groups[p.region_of(name)[0].group].kind for p in (made.source, made.destination)}
    alone = move.only(name)
    if not groups <= {"full_attention", "mla_attention", "sink_full_attention"}:
        return [alone]
    return [alone.between(start, cut), alone.between(cut, stop)]


def bring(made: Route, move: Move, rank: int, sources: dict[int, Memory], after: Memory) -> None:
    for source in made.sources(rank):
        bound = made.bind(source_rank=source, destination_rank=rank, **ask(move))
        oracle.carry_out(bound.copies, sources[source], after)


@fewer
@given(requests())
def test_sums_that_nobody_has_written_out_bring_the_same(move: Move) -> None:
    """Asked for twice: what is kept of a number of tokens is bound to any blocks."""
    rng = np.random.default_rng(0)
    made, sources = route(move.source, move.destination), oracle.fill(move, rng)
    for rank in oracle.ranks(move.destination):
        poison = Memory(move.destination, rank, rng)
        after = poison.copy()
        for source in made.sources(rank):
            made.stream(source_rank=source, destination_rank=rank, **ask(move)).grids()
            grids = made.stream(source_rank=source, destination_rank=rank, **ask(move)).grids()
            oracle.carry_out([written_out(grid) for grid in grids], sources[source], after)
        right, _ = oracle.expected(move, rank, poison)
        after.assert_equal(right, f"rank {rank} in sums")


def written_out(grid: Copy) -> Copy:
    starts = grid.starts
    src, dst = (
        (at[:, None] + spans).reshape(-1)
        for at, spans in ((starts.source, grid.source), (starts.destination, grid.destination))
    )
    return Copy(
        grid.source_pool, grid.destination_pool, src, dst, np.tile(grid.length, len(starts.source))
    )


@fewer
@given(requests(from_start=True))
def test_prepared_blocks_bring_at_least_the_same(move: Move) -> None:
    assert_prepared_arrives(move)


@fewer
@given(requests())
def test_prepared_blocks_start_with_a_whole_chunk_or_not_at_all(move: Move) -> None:
    try:
        assert_prepared_arrives(move)
    except AtlasError as refusal:
        assert refusal.code is Code.BAD_TOKENS
        assert move.tokens[0] > 0
