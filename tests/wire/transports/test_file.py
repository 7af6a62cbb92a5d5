"""The disk tier: a file among files, some of them not meant for anybody."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire.memory_copy import STEP
from kvatlas.wire.transports import file
from kvatlas.wire.transports.base import Link, Memory
from kvatlas.wire.transports.file import FileTransport, in_file_order
from tests.wire.transports.ends import SOURCE, soon

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


def test_a_killed_writer_leaves_what_it_had_finished(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from tests.wire.transports.test_file import RUNS, linked, soon\n"
        "link, pool, _ = linked(Path(sys.argv[1])); link.write(RUNS).wait(soon())\n"
        "print('done', flush=True); sys.stdin.readline()"
    )
    root = str(SOURCE.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{SOURCE}:{root}"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"done\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, pool, _ = linked(tmp_path)
    assert (tmp_path / "tier").read_bytes()[:4096] == pool[:4096].tobytes()


def test_calls_cover_every_byte_once() -> None:
    rng = np.random.default_rng(0)
    length = rng.integers(1, 9, 5_000)
    length[77] = 3 * STEP + 5
    far = np.cumsum(length + rng.integers(0, 2, 5_000)) - length
    near = np.cumsum(rng.permutation(length) + 4 * STEP)
    order = rng.permutation(5_000)
    calls = in_file_order(near[order], far[order], length[order])
    found: list[list[int]] = []
    for first, count, offset, nbytes in calls.each():
        assert count <= 1024
        assert nbytes <= 2 * STEP
        for address, size in calls.pieces[first : first + count].tolist():
            if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (
                offset,
                address,
            ):
                found[-1][2] += size  # the run that was cut
            else:
                found.append([offset, address, size])
            offset += size
            nbytes -= size
        assert nbytes == 0
    want = zip(far.tolist(), near.tolist(), length.tolist(), strict=True)
    assert found == [list(row) for row in want]


def test_long_runs_and_calls_that_do_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may stop anywhere: the rest follows."""
    real, asked = file._system.preadv, []

    def lazy(descriptor: int, rows: int, count: int, offset: int) -> int:
        asked.append(count)
        if len(asked) % 3 == 0:
            ctypes.set_errno(errno.EINTR)
            return -1
        first = (ctypes.c_uint64 * 2).from_address(rows)
        piece = (ctypes.c_uint64 * 2)(first[0], max(1, first[1] // 2))
        return int(real(descriptor, ctypes.addressof(piece), 1, offset))

    link, pool, _ = linked(tmp_path)
    (tmp_path / "tier").write_bytes(np.random.default_rng(0).bytes(SIZE))
    monkeypatch.setattr(file._system, "preadv", lazy)
    at = np.arange(64) * 1000
    link.read([Copy(0, 0, at, at[::-1].copy(), np.full(64, 1000))]).wait(soon())
    monkeypatch.undo()
    disk = np.frombuffer((tmp_path / "tier").read_bytes(), np.uint8)
    for start in at.tolist():
        to = 63_000 - start
        assert np.array_equal(pool[to : to + 1000], disk[start : start + 1000])
    assert len(asked) > 64
