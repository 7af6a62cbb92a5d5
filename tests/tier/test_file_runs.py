"""Copies of runs between memory and a file: every byte once, whatever the system does."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from kvatlas.copying import file_runs
from kvatlas.copying.file_runs import copy_file_runs, vectored_calls
from kvatlas.copying.memory_copy import STEP

SIZE = 1 << 16


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

    disk = np.frombuffer(np.random.default_rng(0).bytes(SIZE), np.uint8)
    (tmp_path / "file").write_bytes(disk.tobytes())
    pool, at = np.zeros(SIZE, np.uint8), np.arange(64) * 1000
    monkeypatch.setattr(file_runs._system, "preadv", lazy)
    with (tmp_path / "file").open("rb") as file:
        near = at[::-1] + pool.ctypes.data
        for _ in copy_file_runs(file.fileno, near, at, np.full(64, 1000), write=False):
            pass
    for start in at.tolist():
        to = 63_000 - start
        assert np.array_equal(pool[to : to + 1000], disk[start : start + 1000])
    assert len(counts) > 64


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    pool, start = np.zeros(SIZE, np.uint8), np.zeros(1, np.int64)
    runs = start + pool.ctypes.data, start, np.full(1, 4096)
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match=r"."):
        list(copy_file_runs(file.fileno, *runs, write=False))


def test_a_file_that_is_closed_in_mid_step_writes_to_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor's number goes to whatever is opened next."""
    (tmp_path / "file").write_bytes(bytes(SIZE))
    before = b"of another process" * 4096
    (tmp_path / "victim").write_bytes(before)
    real, opened = file_runs._system.pwritev, list[int]()
    files = [os.open(tmp_path / "file", os.O_RDWR)]

    def closing(descriptor: int, rows: int, count: int, offset: int) -> int:
        done = int(real(descriptor, rows, count, offset))
        if not opened:
            os.close(files.pop())
            files.append(-1)
            opened.append(os.open(tmp_path / "victim", os.O_RDWR))
            assert opened[0] == descriptor, "the next to open a file gets the number"
        return done

    monkeypatch.setattr(file_runs._system, "pwritev", closing)
    pool = np.ones(SIZE, np.uint8)
    at = np.arange(16) * 4096  # not neighbours in the file: a call each, all in one step
    runs = at + pool.ctypes.data, at, np.full(16, 100)
    with pytest.raises(OSError, match=r"."):
        list(copy_file_runs(lambda: files[0], *runs, write=True))
    assert (tmp_path / "victim").read_bytes() == before
    os.close(opened[0])
