"""Streams: the bytes of `bind`, piece by piece, in memory that does not grow with tokens."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvatlas import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Copy, Route, Stream, route, streams
from kvatlas.specs import FullAttention, Spec
from tests.routing import oracle
from tests.routing.arrives import ask
from tests.routing.cases import small_plan, stacked
from tests.routing.oracle import Move
from tests.routing.strategies import KINDS, requests

quiet = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
each = settings(quiet, max_examples=settings().max_examples // len(KINDS) + 1)

Pools = tuple[int, int]

DENSE = stacked("m", *[FullAttention(heads=4, head_dim=8)] * 2)
WAY = route(small_plan(DENSE, layout="LBNHC"), small_plan(DENSE, layout="BHLNC", block_size=32))
TABLES = [5, 2, 3, 0, 4, 1], [2, 0, 1]


def in_chunks_of(runs: int) -> Any:
    """Chunks so small that small requests have many."""
    return mock.patch.object(streams, "CHUNK_RUNS", runs)


def spelled_out(copies: Iterable[Copy]) -> list[tuple[Pools, Any]]:
    """Every byte in its order: pools, and where it comes from and goes to."""
    return [
        (
            (copy.source_pool, copy.destination_pool),
            np.stack(
                [oracle.spelled_out(at, copy.length) for at in (copy.source, copy.destination)], 1
            ),
        )
        for copy in copies
    ]


def by_pools(copies: Iterable[Copy]) -> dict[Pools, Any]:
    """Every byte that moves between two pools, in the order of its destination."""
    found: dict[Pools, list[Any]] = {}
    for pools, rows in spelled_out(copies):
        found.setdefault(pools, []).append(rows)
    whole = {pools: np.concatenate(rows) for pools, rows in found.items()}
    return {pools: rows[np.argsort(rows[:, 1])] for pools, rows in whole.items()}


def in_order(copies: Iterable[Copy]) -> Any:
    """Every byte in its order as (source pool, destination pool, from, to)."""
    rows = [
        np.concatenate([np.broadcast_to(pools, at.shape), at], axis=1)
        for pools, at in spelled_out(copies)
    ]
    return np.concatenate([np.zeros((0, 4), np.int64), *rows])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_stream_is_the_bytes_of_bind(kind: type[Spec]) -> None:
    """In chunks of any size, cut anywhere; and both ends find the same stream."""

    @each
    @given(requests(kind), st.data())
    def run(move: Move, data: st.DataObject) -> None:
        made = route(move.source, move.destination)
        rank = data.draw(st.sampled_from(oracle.ranks(move.destination)))
        with in_chunks_of(data.draw(st.sampled_from([1, 3, 16, 100, 1 << 16]))):
            for source in made.sources(rank):
                asked = {"source_rank": source, "destination_rank": rank, **ask(move)}
                assert_streams(made, asked, data)

    run()


def assert_streams(made: Route, asked: dict[str, Any], data: st.DataObject) -> None:
    bound = made.bind(**asked)
    stream = made.stream(**asked)
    assert stream.nbytes == bound.nbytes
    whole = list(stream.walk())
    assert all((copy.length > 0).all() for copy in whole)
    assert len(bound) <= sum(map(len, whole)) <= stream.runs
    one, other = by_pools(whole), by_pools(bound.copies)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[pools], other[pools]) for pools in one)
    cuts = sorted(data.draw(st.lists(st.integers(0, stream.nbytes), max_size=6)))
    edges = [0, *cuts, stream.nbytes]
    there = route(*(Plan.from_json(end.to_json()) for end in (made.source, made.destination)))
    again = there.stream(**asked)
    parts = [again.copies(*edge) for edge in pairwise(edges)]
    assert [sum(c.nbytes for c in part) for part in parts] == np.diff(edges).tolist()
    ordered = in_order(whole)
    assert np.array_equal(in_order(c for part in parts for c in part), ordered)
    # Any place, in any order, not only one after the other.
    for start in reversed(cuts):
        stop = data.draw(st.integers(start, stream.nbytes))
        assert np.array_equal(in_order(stream.copies(start, stop)), ordered[start:stop])


def small_stream() -> Stream:
    return WAY.stream(
        source_rank=0,
        destination_rank=0,
        source_blocks=TABLES[0],
        destination_blocks=TABLES[1],
        tokens=90,
    )


def test_threads_may_read_one_stream() -> None:
    """Each at its own place: the chunk that is kept is at worst made again."""
    with in_chunks_of(8):
        stream = small_stream()
        ordered = in_order(stream.walk())
        edges = list(range(0, stream.nbytes + 1, stream.nbytes // 16))

        def read(seed: int) -> bool:
            spans = np.random.default_rng(seed).permutation(list(pairwise(edges))).tolist()
            return all(
                np.array_equal(in_order(stream.copies(*span)), ordered[slice(*span)])
                for span in spans
            )

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(read, range(16)))


def test_bytes_that_a_stream_does_not_have_are_refused() -> None:
    stream = small_stream()
    end = stream.nbytes
    wrong: list[tuple[Code, Any, Any]] = [
        (Code.OUT_OF_RANGE, -1, 4),
        (Code.OUT_OF_RANGE, 0, end + 1),
        (Code.OUT_OF_RANGE, 8, 4),
        (Code.NOT_AN_INTEGER, 0.5, 4),
    ]
    for code, start, stop in wrong:
        with pytest.raises(AtlasError) as refusal:
            stream.copies(start, stop)
        assert refusal.value.code is code
    for piece in (0, -1):
        with pytest.raises(AtlasError) as refusal:
            next(stream.pieces(piece))
        assert refusal.value.code is Code.BAD_SIZE
    assert stream.copies(end, end) == stream.copies(3, 3) == ()


def test_block_ids_that_are_changed_later_do_not_change_a_stream() -> None:
    ids = np.array(TABLES[0])
    stream = WAY.stream(
        source_rank=0,
        destination_rank=0,
        source_blocks=ids,
        destination_blocks=TABLES[1],
        tokens=90,
    )
    ids[:] = 0
    assert np.array_equal(in_order(stream.walk()), in_order(small_stream().walk()))


def test_a_request_without_tokens_is_an_empty_stream() -> None:
    stream = WAY.stream(
        source_rank=0, destination_rank=0, source_blocks=[], destination_blocks=[], tokens=0
    )
    assert (stream.nbytes, stream.runs, list(stream.walk()), list(stream.pieces(1))) == (
        0,
        0,
        [],
        [],
    )


def test_what_requests_of_a_route_have_in_common_is_found_once() -> None:
    """Also where starts are so many that they are divided."""
    with in_chunks_of(40):
        one, other = (
            WAY.stream(
                source_rank=0,
                destination_rank=0,
                source_blocks=src,
                destination_blocks=dst,
                tokens=90,
            )
            for src, dst in (TABLES, ([0, 1, 2, 3, 4, 5], [0, 1, 2]))
        )
        pairs = list(zip(one.grids(), other.grids(), strict=True))
    assert len(pairs) > len(small_stream().grids())
    assert all(mine.starts is theirs.starts for mine, theirs in pairs)
