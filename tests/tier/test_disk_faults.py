"""Disks that fail or fill, files that somebody else touches: refusals, and nothing lost."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.copying.gather_scatter import gather, scatter, stream_bytes
from kvatlas.routing import Copy
from kvatlas.tier import Tier, file_map
from kvatlas.tier import file_pieces as pieces_
from kvatlas.tier import format as format_
from kvatlas.tier.blocks import StoreResult
from tests.tier.faults import CODES, DENSE, TOKENS, Faulty, code_of, kept, rows_agree
from tests.tier.world import World, pools, small


def in_child(act: Callable[[], None]) -> None:
    """Run something in a process of its own, which must end by itself, and well."""
    child = os.fork()
    if not child:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFSIGNALED(status), f"ended by signal {os.WTERMSIG(status)}"
    assert status == 0


# -- faults -------------------------------------------------------------------------------

WRITES = ("vectored pwritev", "pwrite", "fdatasync", "preadv")


@pytest.fixture
def run_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stretch of the file counts as short: runs are written as they are, and not summed."""
    monkeypatch.setattr(pieces_, "_LONG_STRETCH", 1 << 40)


@pytest.mark.usefixtures("run_by_run")
def test_a_store_that_fails_anywhere_loses_no_row(tmp_path: Path) -> None:
    """Blocks are evicted, replaced and written meanwhile; then everything works again."""
    made, old, new = small(DENSE), World(DENSE, TOKENS), World(DENSE, TOKENS, seed=4)
    failed = 0
    for call in WRITES:
        for number, at in zip((*CODES, errno.EIO), (1, 2, 3, 5), strict=True):
            path = tmp_path / f"{call} {at}"
            with Tier.open(path, kept(), durable=call == "fdatasync") as tier:
                keys = new.keys(tier, salt="new")
                old.store(tier, made)
                with pytest.MonkeyPatch.context() as patch:
                    fault = Faulty(patch, call, at, number)
                    try:
                        new.store(tier, made, keys=keys)
                    except AtlasError as refusal:
                        assert refusal.code is CODES[number]
                        failed += 1
                    assert fault.count
                rows_agree(tier)
                assert new.store(tier, made, keys=keys) == [StoreResult(4, 0, 0)]
                new.check(tier, made, keys=keys)
                rows_agree(tier)
            with Tier.open(path) as tier:
                rows_agree(tier)
                new.check(tier, made, keys=keys)
    assert failed > len(WRITES)


def test_a_drop_that_cannot_be_recorded_is_said_and_tried_again(tmp_path: Path) -> None:
    made, world = small(DENSE), World(DENSE, TOKENS)
    with Tier.open(tmp_path / "t", kept(5)) as tier:
        keys = world.keys(tier)
        world.store(tier, made)
        with pytest.MonkeyPatch.context() as patch:
            Faulty(patch, "pwrite", 2, errno.EIO)
            assert code_of(tier.drop, keys) == Code.UNREADABLE
            assert len(tier) == 0
            rows_agree(tier)
            # Its blocks are free, and none is written to while its record is there.
            assert code_of(world.store, tier, made) == Code.UNREADABLE
            rows_agree(tier)
        assert world.store(tier, made) == [StoreResult(4, 0, 0)]
        assert len(tier._index._uncleared) == 1, "the one block that was not needed"
        world.check(tier, made)
        rows_agree(tier)


def test_fetches_and_openings_that_fail(tmp_path: Path) -> None:
    made, world = small(DENSE), World(DENSE, TOKENS)
    path = tmp_path / "t"
    with Tier.open(path, kept()) as tier:
        world.store(tier, made)
        with pytest.MonkeyPatch.context() as patch:
            for call in ("_out_of_long_ranges", "_out_of_short_ranges"):  # it fails any way
                patch.setattr(file_map, call, lambda *_: -1)
            Faulty(patch, "vectored preadv", 1, errno.EIO)
            assert code_of(world.check, tier, made) == Code.UNREADABLE
        rows_agree(tier)
        world.check(tier, made)
    with Tier.open(path, verify="always") as tier:
        with pytest.MonkeyPatch.context() as patch:
            Faulty(patch, "preadv", 3, errno.EIO)
            assert code_of(world.check, tier, made) == Code.UNREADABLE
        rows_agree(tier)
        world.check(tier, made)
    for at in (1, 2, 3):
        with pytest.MonkeyPatch.context() as patch:
            Faulty(patch, "pread", at, errno.EIO)
            assert code_of(Tier.open, path) == Code.UNREADABLE
    for call in ("open", "posix_fallocate", "pwrite", "fsync", "link"):
        for number, code in CODES.items():
            with pytest.MonkeyPatch.context() as patch:
                Faulty(patch, call, 1, number)
                assert code_of(Tier.open, tmp_path / "new", kept()) == code
            assert list(tmp_path.iterdir()) == [path]


def test_a_process_that_may_not_write_so_much(tmp_path: Path) -> None:
    def act() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        assert code_of(Tier.open, tmp_path / "t", kept()) == Code.NOT_ENOUGH_MEMORY
        assert not list(tmp_path.iterdir())

    in_child(act)


def test_dropping_a_block_that_is_being_filled_does_no_io_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no record yet."""
    made, world = small(DENSE, tp=2), World(DENSE, 16)
    with Tier.open(tmp_path / "t", kept(5), durable=False) as tier:
        blocks = tier.plan.pools[0].blocks
        held, tables = world.holding(made, 0)
        writes = Faulty(monkeypatch, "pwrite", 10**9, errno.EIO)
        for n in range(blocks + 2):
            half = tier.store(held, made, rank=0, blocks=tables, tokens=16, keys=[b"%d" % n])
            assert half == StoreResult(0, 1, 0)
        assert writes.count == 0
        assert len(tier._index._filling) == blocks
        rows_agree(tier)
        held, tables = world.holding(made, 1)
        last = tier.store(held, made, rank=1, blocks=tables, tokens=16, keys=[b"%d" % (blocks + 1)])
        assert last == StoreResult(1, 0, 0)
        rows_agree(tier)


# -- files that somebody else touches -----------------------------------------------------


def test_a_file_that_is_cut_short_while_open_kills_nobody(tmp_path: Path) -> None:
    """A mapped file would end the process by SIGBUS."""
    made, world = small(DENSE), World(DENSE, TOKENS)
    for verify, shares in (("once", (0.0, 0.6, 0.999)), ("always", (0.3,))):
        for share in shares:
            path = tmp_path / f"{verify} {share}"
            Tier.open(path, kept()).close()

            def act(path: Path = path, share: float = share, verify: Any = verify) -> None:
                tier = Tier.open(path, durable=False, verify=verify)
                world.store(tier, made)
                world.check(tier, made)
                size = path.stat().st_size
                os.truncate(path, int(size * share))
                got = pools(made, 0, 7)
                for _ in range(2):
                    try:
                        with tier.pin(world.keys(tier), TOKENS) as hit:
                            hit.fetch(got, made, blocks=[1, 2, 3, 4])
                            assert not hit.tokens, "served from a file that is not there"
                    except AtlasError as refusal:
                        assert refusal.code is Code.UNREADABLE
                    assert code_of(world.store, tier, made, keys=world.keys(tier, salt="x")) == (
                        Code.UNREADABLE
                    )
                assert path.stat().st_size == int(size * share), "made long again, with zeros"
                index = tier._index
                assert len(index._whole) + len(index._free[0]) == tier.plan.pools[0].blocks
                tier.close()

            in_child(act)


def test_a_sparse_file_is_filled_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or refused, where the disk has no room for it, and left as it is."""
    made, world = small(DENSE), World(DENSE, TOKENS)
    with Tier.open(tmp_path / "t", kept()) as tier:
        world.store(tier, made)
        extent = tier._file.extent if tier._file else None
    text = (tmp_path / "t").read_bytes()
    sparse = tmp_path / "sparse"
    sparse.touch(0o600)
    assert extent is not None
    with sparse.open("r+b") as raw:
        raw.truncate(len(text))
        raw.write(text[: extent.pools[0]])
    if sparse.stat().st_blocks * 512 >= len(text):
        pytest.skip("this file system has no sparse files")
    with monkeypatch.context() as patch:
        Faulty(patch, "posix_fallocate", 1, errno.ENOSPC)
        assert code_of(Tier.open, sparse) == Code.NOT_ENOUGH_MEMORY
    assert sparse.stat().st_size == len(text)
    with Tier.open(sparse) as tier:
        assert sparse.stat().st_blocks * 512 >= len(text)
        assert len(tier) == 0


def test_a_link_where_the_file_is_made_is_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "tiers", tmp_path / "outside"
    folder.mkdir()
    outside.write_bytes(b"of somebody else")
    outside.chmod(0o644)
    (folder / "t.new").symlink_to(outside)
    Tier.open(folder / "t", kept()).close()
    assert outside.read_bytes() == b"of somebody else"
    assert (folder / "t.new").is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == ["t", "t.new"]
    state = (folder / "t").lstat()
    assert stat.S_ISREG(state.st_mode)
    assert stat.S_IMODE(state.st_mode) == 0o600
    assert state.st_uid == os.geteuid()


def test_a_strangers_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    Tier.open(path, kept()).close()
    for mode in (0o620, 0o602, 0o666):
        path.chmod(mode)
        assert code_of(Tier.open, path) == Code.UNREADABLE
    state = path.stat()
    path.chmod(0o644)  # others may read it
    Tier.open(path).close()
    monkeypatch.setattr(os, "geteuid", lambda: state.st_uid + 1)
    assert code_of(Tier.open, path) == Code.UNREADABLE


def test_a_new_file_and_its_name_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file before it has its name, the folder after."""
    synced, real = [], os.fsync

    def fsync(fd: int) -> None:
        state = os.fstat(fd)
        kind = "folder" if stat.S_ISDIR(state.st_mode) else "file"
        synced.append((kind, (tmp_path / "t").exists(), state.st_ino))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    Tier.open(tmp_path / "t", kept()).close()
    inodes = (tmp_path / "t").stat().st_ino, tmp_path.stat().st_ino
    assert synced == [("file", False, inodes[0]), ("folder", True, inodes[1])]


def test_many_create_one_file_at_once(tmp_path: Path) -> None:
    """One has it, the others are told so; nothing else is left."""
    results: list[Any] = []
    start = threading.Barrier(6)

    def act() -> None:
        start.wait()
        try:
            results.append(Tier.open(tmp_path / "t", kept()))
        except AtlasError as refusal:
            results.append(refusal.code)

    threads = [threading.Thread(target=act) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (tier,) = [one for one in results if isinstance(one, Tier)]
    assert results.count(Code.TWICE) == 5
    assert list(tmp_path.iterdir()) == [tmp_path / "t"]
    assert os.path.samestat((tmp_path / "t").stat(), os.fstat(tier._file._fd))  # type: ignore[union-attr]
    tier.close()


def test_files_of_other_versions_are_named_as_such(tmp_path: Path) -> None:
    """Whatever else has changed in them: magic and version are where they were."""
    path = tmp_path / "t"
    Tier.open(path, kept()).close()
    good = path.read_bytes()
    for version in (format_.VERSION - 1, format_.VERSION + 1, 2**32 - 1):
        said = format_.MAGIC + version.to_bytes(4, "little")
        for text in (said + good[len(said) :], said.ljust(len(good), b"?")):
            path.write_bytes(text)
            assert code_of(Tier.open, path) == Code.UNLIKE_VERSIONS
    path.write_bytes(good)
    Tier.open(path).close()


# -- other wires --------------------------------------------------------------------------


@contextmanager
def staged(tier: Tier, held: dict[int, Any]) -> Iterator[tuple[Any, Any]]:
    """Carries by way of a stream, to and from the tier's memory."""

    def into(copies: Sequence[Copy]) -> None:
        stream = np.empty(stream_bytes(copies), dtype=np.uint8)
        gather(copies, held, stream)
        scatter(copies, stream, tier.pools)

    def back(copies: Sequence[Copy]) -> None:
        stream = np.empty(stream_bytes(copies), dtype=np.uint8)
        gather(copies, tier.pools, stream)
        scatter(copies, stream, held)

    yield into, back


def test_any_transport_carries_to_and_from_a_file(tmp_path: Path) -> None:
    """The tier's memory stands for the file: bytes go through it, by several ranks at once."""
    made, world = small(DENSE, tp=2), World(DENSE, TOKENS)
    path = tmp_path / "t"
    with Tier.open(path, kept()) as tier:
        keys = world.keys(tier)
        for rank in (0, 1):
            held, tables = world.holding(made, rank)
            with staged(tier, held) as (into, _):
                about: dict[str, Any] = {"rank": rank, "blocks": tables, "tokens": TOKENS}
                tier.store(None, made, **about, keys=keys, carry=into)
        world.check(tier, made)
    with Tier.open(path) as tier:
        world.check(tier, made)
        for rank in (0, 1):
            got, expected = pools(made, rank, 5), pools(made, rank, 5)
            _, tables = world.holding(made, rank)
            world.put(made, rank, expected, tables)
            with staged(tier, got) as (_, back):
                tier.fetch(
                    None, made, rank=rank, blocks=tables, tokens=TOKENS, keys=keys, carry=back
                )
            assert all(np.array_equal(got[i], expected[i]) for i in got)
            got = pools(made, rank, 5)
            with tier.pin(keys, TOKENS) as hit, staged(tier, got) as (_, back):
                back(hit.copies(made, rank=rank, blocks=tables))
            assert all(np.array_equal(got[i], expected[i]) for i in got)
        assert tier._file is not None
        assert tier._file.window._users == 0


def test_a_carry_that_fails_leaves_nothing_in_a_file(tmp_path: Path) -> None:
    made, world = small(DENSE), World(DENSE, TOKENS)

    def fails(_: Sequence[Copy]) -> None:
        raise OSError("the wire broke")

    with Tier.open(tmp_path / "t", kept()) as tier:
        with pytest.raises(OSError, match="broke"):
            world.store(tier, made, carry=fails)
        rows_agree(tier)
        assert tier._file is not None
        assert tier._file.window._users == 0
        world.store(tier, made)
        world.check(tier, made)
