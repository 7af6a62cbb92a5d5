"""Checksums that are taken while blocks are written, by several ranks, at once, and again."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas import Code
from kvatlas.copying import checksum as checksum_
from kvatlas.tier import Tier
from kvatlas.tier import file_map as file_map_
from kvatlas.tier import file_pieces as pieces_
from kvatlas.tier import file_writing as writing_
from kvatlas.tier.blocks import StoreResult
from kvatlas.tier.file_map import FileMap
from kvatlas.tier.ingest import Ingest
from kvatlas.tier.part_sums import START, SummedStretches, block_checksum, part_sums
from tests.tier.faults import DENSE, TOKENS, Faulty, code_of, kept, rows_agree
from tests.tier.world import World, small


@pytest.fixture(params=[100, 1 << 20], ids=["long", "short"])
def in_stretches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stretch is worth being gathered, summed and written; in several pieces."""
    monkeypatch.setattr(pieces_, "_LONG_STRETCH", 1)
    monkeypatch.setattr(pieces_, "_PIECE", 3000)
    monkeypatch.setattr(writing_, "_AT_ONCE", request.param)


def test_a_block_has_the_same_checksum_in_whatever_parts_it_is_summed() -> None:
    rng = np.random.default_rng(5)
    for block_bytes in (1, 2, 255, 256, 4096, 100_003):
        data = rng.integers(0, 256, block_bytes, dtype=np.uint8).tobytes()
        for cuts in (0, 1, 2, 9, 200, 900):
            edges = np.unique([0, *rng.integers(0, block_bytes, cuts).tolist(), block_bytes])
            crcs = [zlib.crc32(data[a:b], START) for a, b in pairwise(edges)]
            columns = edges[:-1] + 7 * block_bytes, np.diff(edges), np.array(crcs, np.uint32)
            mine = rng.random(len(crcs)) < 0.5  # two ranks, in any order
            order = rng.permutation(len(crcs))
            ranks = [[c[order[mine[order] == of]] for c in columns] for of in (False, True)]
            given = [SummedStretches(*rank) for rank in ranks]
            parts = [dict(part_sums([one], block_bytes)).get(7) for one in given]
            known = [part for part in parts if part is not None]
            assert block_checksum(known, block_bytes) == zlib.crc32(data)
            assert dict(part_sums(given, block_bytes)).keys() == {7}
            if len(known) == 2:
                assert block_checksum(known[:1], block_bytes) is None, "a part is no block"


def test_checksums_are_the_same_with_and_without_isal(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(2).integers(0, 256, 70_001, dtype=np.uint8)
    for there in (True, False):
        if not there:
            monkeypatch.setitem(sys.modules, "isal", None)
        checksum_._fastest.cache_clear()
        for start in (0, 1, START):
            assert checksum_.crc32(data.data, start) == zlib.crc32(data.data, start)
    assert checksum_._fastest() is zlib.crc32
    checksum_._fastest.cache_clear()


def counted_reads(store: Callable[[], Any]) -> int:
    """How many calls read bytes of blocks for their checksums while something is stored."""
    return counted("preadv", store)


def counted(call: str, store: Callable[[], Any]) -> int:
    """How many such calls are made while something is stored."""
    with pytest.MonkeyPatch.context() as patch:
        made = Faulty(patch, call, 10**9, errno.EIO)
        store()
    return made.count


@pytest.mark.usefixtures("in_stretches")
@pytest.mark.parametrize("long_run", [1, 1 << 20])
def test_blocks_are_summed_on_the_way_and_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: int
) -> None:
    """Whoever fills them, in whatever runs; a last block that has begun only is read still."""
    monkeypatch.setattr(pieces_, "_LONG_RUN", long_run)
    for tp, tokens, layout in (
        (1, TOKENS, "BLHNC"), (1, TOKENS, "LBNHC"), (1, TOKENS - 3, "LBNHC"),
        (2, TOKENS, "LBHNC"), (2, TOKENS, "BLNHC"),
    ):  # fmt: skip
        made, path = small(DENSE, tp=tp, layout=layout), tmp_path / f"{tp} {tokens} {layout}"
        world = World(DENSE, tokens)
        with Tier.open(path, kept()) as tier:
            reads = counted_reads(lambda: world.store(tier, made))  # noqa: B023
            assert bool(reads) == (tokens < TOKENS)
            world.check(tier, made)
        with Tier.open(path, verify="always") as tier:
            assert len(tier) == 4
            world.check(tier, made)


@pytest.mark.usefixtures("in_stretches")
def test_a_rank_that_fails_and_stores_again_is_summed_once(tmp_path: Path) -> None:
    made, world = small(DENSE, tp=2), World(DENSE, TOKENS)
    with Tier.open(tmp_path / "t", kept()) as tier:
        calls = counted("pwrite", lambda: world.store(tier, made, ranks=[0]))
        for at in (1, 7, calls - 4):
            with pytest.MonkeyPatch.context() as patch:
                Faulty(patch, "pwrite", at, errno.EIO)
                assert code_of(world.store, tier, made, ranks=[1]) is Code.UNREADABLE
        assert counted_reads(lambda: world.store(tier, made, ranks=[0, 1])) == 0
    with Tier.open(tmp_path / "t", verify="always") as tier:
        assert len(tier) == 4
        world.check(tier, made)


@pytest.mark.usefixtures("in_stretches")
def test_two_ranks_that_fill_blocks_at_once_are_both_in_the_checksum(tmp_path: Path) -> None:
    made, world = small(DENSE, tp=2, layout="LBNHC"), World(DENSE, TOKENS)
    for turn in range(10):
        with Tier.open(tmp_path / f"{turn}", kept(), durable=False) as tier:
            start = threading.Barrier(2)

            def act(rank: int, tier: Tier = tier, start: threading.Barrier = start) -> None:
                start.wait()
                world.store(tier, made, ranks=[rank])

            threads = [threading.Thread(target=act, args=(rank,)) for rank in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        with Tier.open(tmp_path / f"{turn}", verify="always") as tier:
            assert len(tier) == 4
            world.check(tier, made)


def test_bytes_that_change_behind_a_rank_are_found_when_they_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank wrote is damaged before another makes the block whole."""
    monkeypatch.setattr(pieces_, "_LONG_STRETCH", 1)
    made, world = small(DENSE, tp=2), World(DENSE, TOKENS)
    path = tmp_path / "t"
    with Tier.open(path, kept(), verify="always") as tier:
        world.store(tier, made, ranks=[0])
        (filling, *_) = tier._index._filling.values()
        assert tier._file is not None
        with path.open("r+b") as raw:
            raw.seek(tier._file.extent.pools[0] + filling.block_id * 8192)
            byte = raw.read(1)
            raw.seek(-1, os.SEEK_CUR)
            raw.write(bytes([byte[0] ^ 1]))
        world.store(tier, made, ranks=[1])
        assert len(tier) == 4
        with tier.pin(world.keys(tier), TOKENS) as hit:
            assert hit.tokens < TOKENS
        assert tier.metrics.values["damaged"] == 1


@pytest.mark.usefixtures("in_stretches")
def test_a_stretch_that_cannot_be_written_loses_no_row(tmp_path: Path) -> None:
    made, old, new = small(DENSE), World(DENSE, TOKENS), World(DENSE, TOKENS, seed=4)
    with Tier.open(tmp_path / "t", kept()) as tier:
        calls = counted("pwrite", lambda: old.store(tier, made))
    for at in range(1, calls + 1, max(1, calls // 13)):
        path = tmp_path / f"{at}"
        with Tier.open(path, kept()) as tier:
            keys = new.keys(tier, salt="new")
            old.store(tier, made)
            with pytest.MonkeyPatch.context() as patch:
                Faulty(patch, "pwrite", at, errno.ENOSPC)
                assert code_of(new.store, tier, made, keys=keys) is Code.NOT_ENOUGH_MEMORY
            rows_agree(tier)
            assert new.store(tier, made, keys=keys) == [StoreResult(4, 0, 0)]
            new.check(tier, made, keys=keys)
        with Tier.open(path) as tier:
            rows_agree(tier)
            new.check(tier, made, keys=keys)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches are written by one call for many, however short, the second time."""
    monkeypatch.setattr(pieces_, "_LONG_STRETCH", 1)
    monkeypatch.setattr(writing_, "_MAPPED_STRETCH", 1)
    monkeypatch.setattr(pieces_, "_PIECE", 3000)
    monkeypatch.setattr(writing_, "_STILL_DIRTY", 1e9)


@pytest.mark.usefixtures("mapped")
def test_stretches_of_what_was_just_written_are_written_by_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one by one, where that call is refused or does not do all of it."""
    copy, copied = file_map_._into_file, list[int]()

    def counted_copy(*given: Any) -> int:
        copied.append(1)
        return int(copy(*given))

    def half(process: int, into: int, many: int, *rest: Any) -> int:
        return int(copy(process, into, many // 2, *rest))

    def refused(*_: Any) -> int:
        return -1

    for turn, act in enumerate((counted_copy, half, refused)):
        monkeypatch.setattr(file_map_, "_into_file", act)
        for layout in ("LBHNC", "LBNHC"):
            made, world = small(DENSE, tp=2, layout=layout), World(DENSE, TOKENS)
            path = tmp_path / f"{turn} {layout}"
            with Tier.open(path, kept(), durable=False) as tier:
                first = counted("pwrite", lambda: world.store(tier, made))  # noqa: B023
                tier.drop(world.keys(tier))
                again = counted("pwrite", lambda: world.store(tier, made))  # noqa: B023
                assert first > 4
                assert again == (4 if act is counted_copy else first), "records, and no more"
                world.check(tier, made)
            with Tier.open(path, verify="always") as tier:
                assert len(tier) == 4
                world.check(tier, made)
    assert copied


@pytest.mark.usefixtures("mapped")
def test_a_file_that_is_cut_short_while_it_is_written_kills_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, world = small(DENSE), World(DENSE, TOKENS)
    path = tmp_path / "t"

    copy = file_map_._into_file

    def cut_short(*given: Any) -> int:
        os.truncate(path, 4096)
        return int(copy(*given))

    with Tier.open(path, kept(), durable=False) as tier:
        whole = path.stat().st_size
        world.store(tier, made)
        tier.drop(world.keys(tier))
        monkeypatch.setattr(file_map_, "_into_file", cut_short)
        assert code_of(world.store, tier, made) is Code.UNREADABLE
        assert path.stat().st_size < whole
        assert not len(tier)


def test_short_stretches_are_written_by_one_thread_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system writes to a file on one core at a time: others would only wait there."""
    monkeypatch.setattr(pieces_, "_LONG_STRETCH", 1)
    monkeypatch.setattr(pieces_, "_PIECE", 3000)
    write, inside, most = os.pwrite, list[int](), 0

    def pwrite(*given: Any) -> int:
        nonlocal most
        inside.append(1)
        most = max(most, len(inside))
        time.sleep(0.001)
        inside.pop()
        return write(*given)

    for layout in ("LBHNC", "LBNHC"):
        world = World(DENSE, TOKENS)
        with Tier.open(tmp_path / layout, kept()) as tier, monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            world.store(tier, small(DENSE, tp=2, layout=layout))
    assert most == 1


def test_threads_share_the_memory_that_they_gather_into(tmp_path: Path) -> None:
    """Each has its own at any moment, and one that finds none takes new."""
    block, runs = 1 << 14, 128
    memory = np.random.default_rng(3).integers(0, 256, block, dtype=np.uint8)
    src, length = np.arange(runs)[::-1] * (block // runs), np.full(runs, block // runs)
    want = np.concatenate([memory[a : a + length[0]] for a in src]).tobytes()
    path, problems = tmp_path / "file", list[BaseException]()
    path.write_bytes(bytes(8 * block))
    before = sys.getswitchinterval()
    with path.open("r+b") as file:
        about = file.fileno(), 8 * block
        writer = writing_.PieceWriter(*about, FileMap(*about), pieces_.Rooms())

        def act(number: int) -> None:
            far = number * block + np.arange(runs) * length
            try:
                for _ in range(60):
                    for piece in pieces_.pieces(src, far, length, block):
                        (crc,) = writer.write(piece, memory, 0).crc.tolist()
                        assert crc == zlib.crc32(want, START)
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=act, args=(number,)) for number in range(8)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
    assert not problems
    assert path.read_bytes() == 8 * want
    nothing = np.empty(0, np.int64)
    assert pieces_.pieces(nothing, nothing, nothing, block) == []


def only_as_grids(
    ingest: Ingest, *about: Any, as_grids: bool = False, copies: Any = Ingest.copies
) -> Any:
    assert as_grids, "runs were written out"
    return copies(ingest, *about, as_grids=True)


def test_blocks_alike_are_written_to_a_file_without_a_list_of_their_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_, "_LONG_STRETCH", 1)
    world = World(DENSE, TOKENS)
    made = small(DENSE, tp=2, layout="LBNHC")
    for piece in (700, 3000, 8 << 20):  # less than a span, some, and all of them
        monkeypatch.setattr(pieces_, "_PIECE", piece)
        with Tier.open(tmp_path / f"{piece}", kept(blocks=12), durable=False) as tier:
            with monkeypatch.context() as patch:
                patch.setattr(Ingest, "copies", only_as_grids)
                assert world.store(tier, made)[-1].whole > 0
            world.check(tier, small(DENSE))
            bad = small(DENSE, tp=2, layout="LBNHC", memory="3MiB")  # pools that are too small
            held, tables = world.holding(made, 0)
            request: dict[str, Any] = {"blocks": tables, "tokens": TOKENS}
            other = world.keys(tier, salt="other")
            refused = code_of(tier.store, held, bad, keys=other, **request)
            assert refused is Code.OUT_OF_BOUNDS
        with Tier.open(tmp_path / f"{piece}") as again:  # the checksums are right
            world.check(again, made)
