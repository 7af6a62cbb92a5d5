"""A million tokens: runs are made piece by piece, in bounds and apart, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import catalogue
from kvatlas.planning import Plan, plan
from kvatlas.routing import Copy, Route, Stream, route, scattered
from kvatlas.specs import FullAttention
from tests.profiles import DEEP
from tests.routing.cases import stacked

TOKENS = 1 << 20
PIECE = 4 << 20
MOST_BYTES = 128 << 20
WALKED = 1 << 24
"""Runs up to which a stream is walked from end to end."""

PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"layout": "LBNHC"}, {"layout": "BHLNC"}),
    ({"tp": 2, "layout": "LBHNC"}, {"tp": 4, "layout": "BLHNC", "block_size": 64}),
    ({"policy": "vllm"}, {"layout": "BLNHC", "block_size": 48}),
    ({"layout": "BLNHC"}, {"layout": "BLNHC"}),
]
SOME = {"Qwen3-8B", "gpt-oss-20b", "Nemotron-3-Nano-30B-A3B"}


def planned(name: str, **ask: Any) -> Plan | None:
    """A plan for requests of that length, if need be in blocks of its own; None for no such tp."""
    for wishes in (ask, {key: ask[key] for key in ask if key == "tp"}):
        try:
            return plan(name, memory="4TiB", max_len=TOKENS, in_flight=0, **wishes)
        except AtlasError as refusal:
            if refusal.code is Code.TP_HEADS:
                return None
    raise AssertionError(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(catalogue() if DEEP else SOME))
def test_memory_does_not_grow_with_tokens(name: str) -> None:
    for pair in PAIRS:
        src, dst = (planned(name, **ask) for ask in pair)
        if src is None or dst is None:
            continue
        # Bytes that nothing uses move between equal plans alone.
        padding = src == dst
        way = route(src, dst, padding=padding)
        tables = [as_arrays(scattered(end, TOKENS)) for end in (src, dst)]
        source = way.sources(0)[0]
        tracemalloc.start()
        stream = way.stream(
            source_rank=source,
            destination_rank=0,
            source_blocks=tables[0],
            destination_blocks=tables[1],
            tokens=TOKENS,
        )
        whole = stream.runs <= (WALKED if DEEP else WALKED >> 4)
        found = walked(way, source, stream.walk() if whole else sparsely(stream))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
        tracemalloc.stop()
        if whole:
            assert found["bytes"] == stream.nbytes
            assert found["runs"] <= stream.runs
        needed = way.needed_bytes(destination_rank=0, destination_blocks=tables[1], tokens=TOKENS)
        if len(way.sources(0)) == 1:
            assert stream.nbytes == needed
        if whole and len(way.sources(0)) == 1:
            # Each byte once: as many as are needed, and the same sums of places.
            back = route(dst, dst, padding=padding)
            kept = back.stream(
                source_rank=0,
                destination_rank=0,
                source_blocks=tables[1],
                destination_blocks=tables[1],
                tokens=TOKENS,
            )
            assert {**found, "runs": 0} == {**walked(back, 0, kept.walk()), "runs": 0}


def as_arrays(tables: dict[int, list[int]]) -> dict[int, Any]:
    return {group: np.array(ids) for group, ids in tables.items()}


def sparsely(stream: Stream) -> Iterator[Copy]:
    """A few pieces, the first and the last among them."""
    last = max(0, stream.nbytes - PIECE)
    for start in np.linspace(0, last, 5).astype(int).tolist():
        part = stream.copies(start, min(start + PIECE, stream.nbytes))
        assert sum(copy.nbytes for copy in part) == min(PIECE, stream.nbytes)
        yield from part


def walked(way: Route, source: int, copies: Iterator[Copy]) -> Counter[Any]:
    """Bytes, runs and sums of places; every run is in bounds, and apart from those beside it."""
    found: Counter[Any] = Counter()
    stages = way.source.split_rank(source)[0], way.destination.split_rank(0)[0]
    for copy in copies:
        assert int(copy.length.min()) > 0
        assert min(int(copy.source.min()), int(copy.destination.min())) >= 0
        last = int((copy.source + copy.length).max()), int((copy.destination + copy.length).max())
        assert last[0] <= way.source.pools_by_stage[stages[0], copy.source_pool].nbytes
        assert last[1] <= way.destination.pools_by_stage[stages[1], copy.destination_pool].nbytes
        assert bool((copy.destination[1:] >= copy.destination[:-1] + copy.length[:-1]).all())
        found["bytes"] += copy.nbytes
        found["runs"] += len(copy)
        for power, total in enumerate(sums_of_places(copy), start=1):
            found[copy.destination_pool, power] = (found[copy.destination_pool, power] + total) % (
                1 << 64
            )
    return found


def sums_of_places(copy: Copy) -> tuple[int, int]:
    """The sum of every destination byte's place, and of its square, modulo 2**64."""
    first, count = copy.destination.astype(np.uint64), copy.length.astype(np.uint64)
    one, two, three = (np.uint64(n) for n in (1, 2, 3))
    half, odd = count * (count - one) // two, two * count - one
    # Divided before they are multiplied, since only that may pass 2**64: 3 divides one of them.
    cubes = np.where(half % three == 0, half // three * odd, half * (odd // three))
    places = count * first + half
    squares = count * first * first + two * first * half + cubes
    return int(places.sum(dtype=np.uint64)), int(squares.sum(dtype=np.uint64))


def test_pieces_of_two_byte_runs_are_walked_chunk_by_chunk() -> None:
    """K transposed on one side: millions of runs in a piece, and never many at once."""
    packings: tuple[Any, ...] = ("transposed", "cells")
    specs = [FullAttention(heads=8, head_dim=128, packing=packing) for packing in packings]
    src, dst = (
        plan(stacked("m", *[spec] * 36), memory="40GiB", max_len=1 << 17, layout="LBHNC")
        for spec in specs
    )
    tables = [np.arange((1 << 17) // end.block_size) for end in (src, dst)]
    tracemalloc.start()
    stream = route(src, dst).stream(
        source_rank=0,
        destination_rank=0,
        source_blocks=tables[0],
        destination_blocks=tables[1],
        tokens=1 << 17,
    )
    found = walked(route(src, dst), 0, stream.walk(5 << 30, (5 << 30) + PIECE))
    assert found["bytes"] == PIECE
    assert found["runs"] > 100_000
    assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    tracemalloc.stop()
