"""What is read in batches and put in place from a buffer, against copies of every run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvatlas.copying.read_coalescing import coalesced_batches, expected_reads
from kvatlas.routing import Copy
from kvatlas.routing.binding import Starts
from kvatlas.wire import Handle
from kvatlas.wire.client.transfer import Transfer
from tests.wire.helpers import End, ends, pull_all, small

SRC = np.random.default_rng(1).integers(1, 256, 1 << 15, np.uint8)


@st.composite
def grids(draw: st.DrawFn) -> list[Copy]:
    """Runs that share no byte at the destination, and may do so at the source."""
    made, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        item = draw(st.integers(1, 20))
        counts = [draw(st.integers(1, 4)) for _ in range(3)]
        sources = [draw(st.integers(0, 3)) * item * draw(st.sampled_from([1, 3])) for _ in counts]
        src = dst = np.zeros(1, np.int64)
        size = item
        for count, step in zip(counts, sources, strict=True):
            gap = draw(st.integers(0, 2))
            src = (np.arange(count)[:, None] * step + src).reshape(-1)
            dst = (np.arange(count)[:, None] * (size + gap) + dst).reshape(-1)
            size = (size + gap) * count
        if draw(st.booleans()):  # in no order at all
            src = np.random.default_rng(item).permutation(src)
        spans = draw(st.integers(1, 4))
        starts = np.array([draw(st.integers(0, 400)) for _ in range(spans)]) * item
        lengths = np.array([draw(st.integers(1, item)) for _ in range(spans)])
        lengths = lengths if draw(st.booleans()) else np.full(spans, item)
        order = np.array(draw(st.permutations(range(spans))))
        places = at + order * size
        at += spans * size
        made.append(Copy(0, 0, starts, places, lengths, starts=Starts.of(src, dst)))
    return made


def carried_out(several: list[Copy], room: int) -> tuple[NDArray[np.uint8], int]:
    """What batches bring to the destination, and how many bytes they say that is."""
    target, moved = np.zeros(1 << 16, np.uint8), 0
    for batch in coalesced_batches(several, room):
        read, buffer = batch.read(0), np.zeros(room, np.uint8)
        assert read.nbytes <= room
        for a, b, n in zip(read.source, read.destination, read.length, strict=True):
            buffer[b : b + n] = SRC[a : a + n]
        for one in batch.placing:
            one.carry_out(buffer, {0: target})
        moved += batch.nbytes
    return target, moved


def copied(several: list[Copy]) -> NDArray[np.uint8]:
    target = np.zeros(1 << 16, np.uint8)
    for grid in several:
        for src, dst in zip(grid.starts.source, grid.starts.destination, strict=True):
            for a, b, n in zip(grid.source, grid.destination, grid.length, strict=True):
                target[dst + b : dst + b + n] = SRC[src + a : src + a + n]
    return target


@given(grids(), st.sampled_from([100, 1000, 1 << 16]))
def test_all_runs_arrive_and_nothing_else_is_touched(several: list[Copy], room: int) -> None:
    target, moved = carried_out(several, room)
    assert moved == sum(grid.nbytes for grid in several)
    assert np.array_equal(target, copied(several))
    assert min(expected_reads(several, room)) > 0


def test_many_runs_in_no_order_arrive_too() -> None:
    rng = np.random.default_rng(3)
    starts = Starts.of(rng.permutation(1000) * 8, np.arange(1000) * 8)
    spans = np.arange(4) * 8000
    grid = Copy(0, 0, spans, spans[::-1].copy(), np.array([8, 8, 5, 8]), starts=starts)
    target, moved = carried_out([grid], 1 << 14)
    assert moved == grid.nbytes
    assert np.array_equal(target, copied([grid]))


def test_rows_that_are_short_at_the_destination_alone_are_read_as_whole_pages() -> None:
    """As vLLM keeps K on a CPU: 64 rows of 64 tokens, into rows of 128 tokens."""
    rows, heads = np.arange(64), np.arange(8)[:, None]
    src = (heads * 2048 + rows * 16).reshape(-1)
    dst = (heads * 4096 + rows * 32).reshape(-1)
    short = Starts.of(src, dst)
    long = Starts.of(heads.reshape(-1) * 2048 + 1024, heads.reshape(-1) * 4096 + 2048)
    at = np.array([0])
    several = [
        Copy(0, 0, at, at, np.array([16]), starts=short),
        Copy(0, 0, at, at, np.array([1024]), starts=long),
    ]
    (batch,) = coalesced_batches(several, 1 << 16)
    assert batch.length.tolist() == [8 * 2048]
    assert [len(one.places.source) for one in batch.placing] == [1, 1]
    assert expected_reads(several, 1 << 16) == (1, 8 * 2048)


def test_halves_of_rows_are_read_with_the_other_halves() -> None:
    """The way back: two spans that are interleaved at the source are one range."""
    rows = np.arange(64)
    starts, spans = Starts.of(rows * 32, rows * 16), np.array([0, 16])
    grid = Copy(0, 0, spans, np.array([4096, 0]), np.array([16, 16]), starts=starts)
    (batch,) = coalesced_batches([grid], 1 << 16)
    assert batch.length.tolist() == [2048]


def test_bytes_that_are_read_and_not_needed_are_counted() -> None:
    """Every other head of a page is the other rank's: staged at the source it is half as much."""
    starts, at = Starts.of(np.arange(64) * 512, np.arange(64) * 256), np.array([0])
    grid = Copy(0, 0, at, at, np.array([256]), starts=starts)
    assert expected_reads([grid], 1 << 20) == (1, 63 * 512 + 256)


def test_more_blocks_than_their_distances_have_numbers_for() -> None:
    count, pool = 1 << 15, 1 << 37
    spans = np.arange(count) * (pool // count)
    at = np.zeros(1, np.int64)
    grid = Copy(0, 0, spans, np.arange(count)[::-1], np.ones_like(spans), starts=Starts.of(at, at))
    reads = [batch.read(0) for batch in coalesced_batches([grid], 1 << 20)]
    assert sorted(np.concatenate([one.source for one in reads]).tolist()) == spans.tolist()
    assert all((one.length == 1).all() for one in reads)


def test_work_that_somebody_waits_for_is_done_once_and_by_who_waits() -> None:
    done: list[str] = []
    transfer = Transfer("r", ranks=(0,), total=None, timeout=30)
    part = transfer.add_part(lambda: done.append(threading.current_thread().name), quick=False)
    waiting = threading.Thread(target=transfer.carry_out, name="waits")
    waiting.start()
    waiting.join()
    part()  # the thread that was woken for it comes too late
    assert done == ["waits"]


def test_as_many_threads_put_a_request_in_place_as_there_are_cores_for_it() -> None:
    source, target = (End(small("dense", layout=one), 50) for one in ("LBNHC", "LBHNC"))
    with ends(source, target) as (src, dst):
        reading: set[int] = set()

        def noting(act: Callable[[], Handle], copies: Sequence[Copy]) -> Handle:
            del copies
            reading.add(threading.get_ident())
            time.sleep(0.002)  # the other thread gets a turn
            return act()

        dst.arounds = noting
        src.offer("r", timeout=60)
        for threads in (2, 1):
            reading.clear()
            dst.nodes[0].scatter_threads = threads
            pull_all(src, dst, "r", tokens=(0, 49), how="coalesced")
            assert len(reading) == threads
