"""Streams of runs, and the bounds of runs, against brute force."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import AtlasError
from kvatlas.copying.gather_scatter import checksums, gather, scatter, stream_bytes
from kvatlas.copying.memory_copy import as_bytes
from kvatlas.copying.nested_copy import copy_pools
from kvatlas.copying.pool_bounds import check_bounds
from kvatlas.errors import Code
from kvatlas.routing import Copy
from kvatlas.wire import Memory

POOL = 4096

# -- staging ------------------------------------------------------------------------------


@st.composite
def copies(draw: st.DrawFn) -> list[Copy]:
    """Runs that share no destination byte, of one length or of many, in two pools."""
    made = []
    for pool in range(draw(st.integers(1, 2))):
        length = draw(st.integers(1, 40))
        alike = draw(st.booleans())
        rows = draw(st.lists(st.integers(1, 40), max_size=24))
        lengths = np.array([length if alike else n for n in rows], dtype=np.int64)
        gaps = np.array([draw(st.integers(0, 9)) for _ in rows], dtype=np.int64)
        dst = np.cumsum(lengths + gaps) - lengths
        step = draw(st.sampled_from([1, length]))
        top = (POOL - 40) // step
        src = [draw(st.integers(0, top)) * step for _ in rows]
        order = np.array(draw(st.permutations(range(len(rows)))), dtype=np.int64)
        starts = np.array(src, dtype=np.int64)
        made.append(Copy(pool, 1 - pool, starts, dst[order], lengths[order]))
    return made


def spelled_out(given: list[Copy]) -> list[tuple[int, int, int, int]]:
    """Every byte of a stream: (source pool, offset, destination pool, offset)."""
    return [
        (copy.source_pool, int(a) + i, copy.destination_pool, int(b) + i)
        for copy in given
        for a, b, n in zip(copy.source, copy.destination, copy.length, strict=True)
        for i in range(int(n))
    ]


def pools_of(seed: int) -> dict[int, Any]:
    rng = np.random.default_rng(seed)
    return {i: rng.integers(0, 256, POOL, dtype=np.uint8) for i in (0, 1)}


@given(copies())
def test_gathering_and_scattering_touch_nothing_else(whole: list[Copy]) -> None:
    src, dst = pools_of(1), pools_of(2)
    total = stream_bytes(whole)
    room = np.full(total + 64, 7, dtype=np.uint8)
    assert gather(whole, src, room[32 : 32 + total]) == total
    every = spelled_out(whole)
    assert room[32 : 32 + total].tolist() == [int(src[p][a]) for p, a, _, _ in every]
    assert (room[:32] == 7).all()
    assert (room[32 + total :] == 7).all()
    right = {i: pool.copy() for i, pool in dst.items()}
    for pool, a, other, b in every:
        right[other][b] = src[pool][a]
    assert scatter(whole, room[32 : 32 + total], dst) == total
    for i in dst:
        assert np.array_equal(dst[i], right[i])
    for i, before in pools_of(1).items():
        assert np.array_equal(src[i], before)


@given(copies(), st.integers(1, 200))
def test_checksums_are_those_of_the_bytes(whole: list[Copy], piece: int) -> None:
    src, dst = pools_of(1), pools_of(2)
    every = spelled_out(whole)
    stream = bytes(int(src[p][a]) for p, a, _, _ in every)
    right = [zlib.crc32(stream[a : a + piece]) for a in range(0, len(stream), piece)]
    assert checksums(whole, src, piece, source=True).tolist() == right
    room = np.empty(len(every), dtype=np.uint8)
    gather(whole, src, room)
    scatter(whole, room, dst)
    assert checksums(whole, dst, piece, source=False).tolist() == right


@pytest.mark.parametrize("length", [1, 3, 4096, 32 << 10, 40_000])
@pytest.mark.parametrize("many", [1, 3, 4, 9])
@pytest.mark.parametrize("step", ["whole", "odd"])
def test_long_and_short_runs_are_gathered_alike(length: int, many: int, step: str) -> None:
    rng = np.random.default_rng(length * many)
    pool = rng.integers(0, 256, (length + 7) * (many + 2), dtype=np.uint8)
    apart = length if step == "whole" else length + 5
    starts = rng.permutation(many) * apart + 3
    lengths = np.full(many, length)
    one = Copy(0, 0, starts, np.sort(starts), lengths)
    out = np.empty(length * many, dtype=np.uint8)
    gather([one], {0: pool}, out)
    assert out.tobytes() == b"".join(pool[s : s + length].tobytes() for s in starts)


def test_a_view_is_the_memory_itself() -> None:
    room = np.zeros(64, dtype=np.uint8)
    as_bytes(Memory(room.ctypes.data + 8, 16))[:] = 9
    assert room.tolist() == [0] * 8 + [9] * 16 + [0] * 40
    assert as_bytes(Memory(room.ctypes.data, 0)).size == 0


# -- bounds -------------------------------------------------------------------------------

REGIONS = {0: Memory(4096, 1000)}


def one_run(src: int, dst: int, length: int, pool: int = 0) -> list[Copy]:
    source_at, destination_at, many = (np.array([n], dtype=np.int64) for n in (src, dst, length))
    return [Copy(pool, 0, source_at, destination_at, many)]


@pytest.mark.parametrize(
    "runs",
    [
        one_run(-1, 0, 4), one_run(0, -1, 4), one_run(998, 0, 3), one_run(0, 998, 3),
        one_run(0, 0, 0), one_run(0, 0, -5), one_run(0, 0, 4, pool=3), one_run(0, 0, 1001),
        one_run(2**63 - 10, 0, 4096), one_run(0, 2**63 - 1, 2**62), one_run(5, 5, 2**63 - 1),
    ],
)  # fmt: skip
def test_ranges_outside_their_regions_are_refused(runs: list[Copy]) -> None:
    """Also where the sum of start and length is too large for its type."""
    with pytest.raises(AtlasError) as refusal:
        check_bounds(runs, REGIONS, REGIONS)
    assert refusal.value.code is Code.OUT_OF_BOUNDS


def test_ranges_up_to_the_edges_are_taken() -> None:
    check_bounds(one_run(0, 0, 1000) + one_run(999, 0, 1), REGIONS, REGIONS)


def test_copies_stay_inside_their_pools() -> None:
    """Long runs go by memmove, which would write past a pool that is too short."""
    source, target = np.ones(4 << 20, np.uint8), np.zeros(4 << 20, np.uint8)
    for start, to, size in ((0, 3 << 20, 2 << 20), (3 << 20, 0, 2 << 20), (-8, 0, 16), (0, 0, 0)):
        copy = Copy(0, 0, np.array([start]), np.array([to]), np.array([size]))
        with pytest.raises(AtlasError) as refusal:
            copy_pools([copy], {0: source}, {0: target})
        assert refusal.value.code is (Code.OUT_OF_BOUNDS if size else Code.BAD_SIZE)
    assert not target.any()
