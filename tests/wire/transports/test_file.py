"""The disk tier: a file among files, some of them not meant for anybody."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kvatlas.copying import file_runs
from kvatlas.copying.file_runs import vectored_calls
from kvatlas.copying.memory_copy import STEP
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire import Link, Memory
from kvatlas.wire.transports.file import FileTransport
from tests.wire.forking import forked
from tests.wire.transports.ends import soon

SIZE = 1 << 16
RUNS = [Copy(0, 0, np.array([0]), np.array([0]), np.array([4096]))]


def linked(folder: Path, *, sync: bool = False) -> tuple[Link, np.ndarray, FileTransport]:
    disk, host = FileTransport(folder, "tier"), FileTransport(folder, sync=sync)
    disk.register({0: Memory(0, SIZE)})
    pool = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)
    host.register({0: Memory(pool.ctypes.data, SIZE)})
    return host.connect(disk.publish(), disk.memory), pool, disk


@pytest.mark.parametrize("sync", [False, True])
def test_what_was_written_is_there(tmp_path: Path, sync: bool) -> None:
    link, pool, _ = linked(tmp_path, sync=sync)
    link.write(RUNS).wait(soon())
    assert (tmp_path / "tier").read_bytes() == pool[:4096].tobytes() + bytes(SIZE - 4096)
    link.close()


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    link, _pool, _ = linked(tmp_path)
    os.truncate(tmp_path / "tier", 100)
    with pytest.raises(AtlasError) as refusal:
        link.read(RUNS).wait(soon())
    assert refusal.value.code is Code.WIRE_FAILED


def test_a_file_that_was_removed(tmp_path: Path) -> None:
    link, _pool, disk = linked(tmp_path)
    (tmp_path / "tier").unlink()
    for act in (link.read, link.write):
        with pytest.raises(AtlasError) as refusal:
            act(RUNS)
        assert refusal.value.code is Code.PEER_LOST
    with pytest.raises(AtlasError) as refusal:
        FileTransport(tmp_path).connect(disk.publish(), disk.memory)
    assert refusal.value.code is Code.PEER_LOST


def _another(folder: Path) -> None:
    (folder / "new").write_bytes(bytes(SIZE))
    (folder / "new").replace(folder / "tier")


def _link(folder: Path) -> None:
    (folder / "tier").rename(folder / "real")
    (folder / "tier").symlink_to(folder / "real")


def _pipe(folder: Path) -> None:
    (folder / "tier").unlink()
    os.mkfifo(folder / "tier")


@pytest.mark.parametrize("change", [_another, _link, _pipe])
def test_a_file_that_is_not_the_one(tmp_path: Path, change: Callable[[Path], None]) -> None:
    _, _pool, disk = linked(tmp_path)
    metadata = disk.publish()
    change(tmp_path)
    with pytest.raises(AtlasError) as refusal:
        FileTransport(tmp_path).connect(metadata, disk.memory)
    assert refusal.value.code is Code.BAD_HANDSHAKE


@pytest.mark.parametrize(
    "name", ["../tier", "/etc/passwd", "", ".", "..", "a/b", "a\0b", "x" * 300]
)
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(AtlasError) as refusal:
        FileTransport(tmp_path, name)
    assert refusal.value.code is Code.WIRE_FAILED


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(AtlasError) as refusal:
        FileTransport(tmp_path / "missing")
    assert refusal.value.code is Code.WIRE_FAILED


def test_more_than_the_disk_has(tmp_path: Path) -> None:
    disk = FileTransport(tmp_path, "tier")
    with pytest.raises(AtlasError) as refusal:
        disk.register({0: Memory(0, 1 << 60)})
    assert refusal.value.code in (Code.NOT_ENOUGH_MEMORY, Code.WIRE_FAILED)
    assert disk.registered == 0


def write_and_wait(tester: Connection, folder: Path) -> None:
    link, _pool, _ = linked(folder)
    link.write(RUNS).wait(soon())
    tester.send("done")
    tester.recv()


def test_a_killed_writer_leaves_what_it_had_finished(tmp_path: Path) -> None:
    process, pipe = forked(write_and_wait, tmp_path)
    assert pipe.recv() == "done"
    process.kill()
    process.join()
    _, pool, _ = linked(tmp_path)
    assert (tmp_path / "tier").read_bytes()[:4096] == pool[:4096].tobytes()


def test_calls_cover_every_byte_once() -> None:
    rng = np.random.default_rng(0)
    length = rng.integers(1, 9, 5_000)
    length[77] = 3 * STEP + 5
    far = np.cumsum(length + rng.integers(0, 2, 5_000)) - length
    near = np.cumsum(rng.permutation(length) + 4 * STEP)
    order = rng.permutation(5_000)
    calls = vectored_calls(near[order], far[order], length[order])
    runs: list[list[int]] = []
    for first, count, offset, nbytes in calls.each():
        assert count <= 1024
        assert nbytes <= 2 * STEP
        for address, size in calls.ranges[first : first + count].tolist():
            if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (
                offset,
                address,
            ):
                runs[-1][2] += size  # the run that was cut
            else:
                runs.append([offset, address, size])
            offset += size
            nbytes -= size
        assert nbytes == 0
    want = zip(far.tolist(), near.tolist(), length.tolist(), strict=True)
    assert runs == [list(row) for row in want]


def test_long_runs_and_calls_that_do_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may stop anywhere: the rest follows."""
    real, counts = file_runs._system.preadv, []

    def lazy(descriptor: int, rows: int, count: int, offset: int) -> int:
        counts.append(count)
        if len(counts) % 3 == 0:
            ctypes.set_errno(errno.EINTR)
            return -1
        first = (ctypes.c_uint64 * 2).from_address(rows)
        piece = (ctypes.c_uint64 * 2)(first[0], max(1, first[1] // 2))
        return int(real(descriptor, ctypes.addressof(piece), 1, offset))

    link, pool, _ = linked(tmp_path)
    (tmp_path / "tier").write_bytes(np.random.default_rng(0).bytes(SIZE))
    monkeypatch.setattr(file_runs._system, "preadv", lazy)
    at = np.arange(64) * 1000
    link.read([Copy(0, 0, at, at[::-1].copy(), np.full(64, 1000))]).wait(soon())
    monkeypatch.undo()
    disk = np.frombuffer((tmp_path / "tier").read_bytes(), np.uint8)
    for start in at.tolist():
        to = 63_000 - start
        assert np.array_equal(pool[to : to + 1000], disk[start : start + 1000])
    assert len(counts) > 64


def test_a_link_that_is_closed_in_mid_step_writes_to_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor's number goes to whatever is opened next."""
    link, _pool, _ = linked(tmp_path)
    before = b"of somebody else" * 4096
    (tmp_path / "victim").write_bytes(before)
    real = file_runs._system.pwritev
    opened: list[int] = []

    def closing(descriptor: int, rows: int, count: int, offset: int) -> int:
        done = int(real(descriptor, rows, count, offset))
        if not opened:
            link.close()
            opened.append(os.open(tmp_path / "victim", os.O_RDWR))
            assert opened[0] == descriptor, "the next to open a file gets the number"
        return done

    monkeypatch.setattr(file_runs._system, "pwritev", closing)
    at = np.arange(16) * 4096  # not neighbours in the file: a call each, all in one step
    handle = link.write([Copy(0, 0, at, at, np.full(16, 100))])
    with pytest.raises(AtlasError) as refusal:
        handle.wait(soon())
    assert refusal.value.code is Code.WIRE_FAILED
    assert (tmp_path / "victim").read_bytes() == before
    os.close(opened[0])
