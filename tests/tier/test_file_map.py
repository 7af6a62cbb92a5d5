"""A mapped file that the system copies from and to, and that is cut short meanwhile."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas.copying.file_runs import copy_file_runs
from kvatlas.routing import Copy
from kvatlas.routing.binding import Starts
from kvatlas.tier import Tier, file_map, file_reading
from kvatlas.tier import file as file_
from kvatlas.tier.file_map import FileMap
from kvatlas.tier.file_pieces import Rooms
from kvatlas.tier.file_reading import RunReader
from tests.tier.faults import DENSE, TOKENS, kept
from tests.tier.world import World, small

SIZE = 5 << 20


@pytest.mark.parametrize("size", [4000, 4096], ids=["short runs", "long runs"])
def test_runs_are_copied_and_a_file_that_is_cut_short_is_told_not_touched(size: int) -> None:
    held = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    into = np.zeros(SIZE, np.uint8)
    far = np.random.default_rng(2).permutation(SIZE // 4096) * 4096
    near = np.arange(len(far)) * 4096
    length = np.full(len(far), size)
    with tempfile.TemporaryFile() as file:
        file.write(held.tobytes())
        file.flush()
        mapped = FileMap(file.fileno(), SIZE)
        assert mapped.read(near + into.ctypes.data, far, length)  # more than one call
        want = np.zeros(SIZE, np.uint8)
        for start, to in zip(far.tolist(), near.tolist(), strict=True):
            want[to : to + size] = held[start : start + size]
        assert np.array_equal(into, want)
        os.ftruncate(file.fileno(), SIZE // 2)
        assert not mapped.read(near + into.ctypes.data, far, length)
        mapped.close()
        assert not mapped.read(near + into.ctypes.data, far, length)
        assert not FileMap(file.fileno(), 1 << 62).read(near, far, length)


def test_runs_are_written_and_a_file_that_is_cut_short_is_told_not_touched() -> None:
    memory = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    near = np.random.default_rng(2).permutation(SIZE // 4096) * 4096
    far = np.arange(len(near)) * 4096 + 7
    length = np.full(len(far), 4000)
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        mapped = FileMap(file.fileno(), SIZE)
        assert mapped.write(near + memory.ctypes.data, far, length)  # more than one call
        want = np.zeros(SIZE, np.uint8)
        for start, to in zip(near.tolist(), far.tolist(), strict=True):
            want[to : to + 4000] = memory[start : start + 4000]
        assert file.read() == want.tobytes()
        os.ftruncate(file.fileno(), SIZE // 2)
        assert not mapped.write(near + memory.ctypes.data, far, length)
        assert os.fstat(file.fileno()).st_size == SIZE // 2
        mapped.close()
        assert not mapped.write(near + memory.ctypes.data, far, length)


def test_short_runs_that_fill_memory_are_read_to_where_they_belong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads and states that change places, or runs of any lengths: no memory is between."""
    rng = np.random.default_rng(3)
    held = rng.integers(0, 256, SIZE, dtype=np.uint8)
    turned = np.arange(64 * 64).reshape(64, 4, 16).swapaxes(1, 2).reshape(-1) * 512
    lengths = rng.integers(1, 1000, 5000)
    starts = np.cumsum(lengths) - lengths
    starts[2500:] += 4096  # two stretches, of which each call sees a part

    def in_order(file: Any, near: Any, far: Any, *rest: Any, **how: Any) -> Any:
        assert (np.diff(far) >= 0).all(), "few calls: runs of one stretch of the file in each"
        return copy_file_runs(file, near, far, *rest, **how)

    monkeypatch.setattr(Rooms, "one", None)
    monkeypatch.setattr(file_reading, "copy_file_runs", None)
    with tempfile.TemporaryFile() as file:
        file.write(held.tobytes())
        file.flush()
        mapped = FileMap(file.fileno(), SIZE)
        for near, far, length in (
            (np.sort(turned), turned, np.full(len(turned), 512)),
            (starts, rng.permutation(starts), lengths),
        ):
            into, want = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
            for start, to, size in zip(far.tolist(), near.tolist(), length.tolist(), strict=True):
                want[to : to + size] = held[start : start + size]
            reader = RunReader(file.fileno(), mapped, Rooms())
            reader.read(into, near, far, length)
            assert np.array_equal(into, want)
            with monkeypatch.context() as patch:
                for call in ("_out_of_long_ranges", "_out_of_short_ranges"):
                    patch.setattr(file_map, call, lambda *_: -1)
                patch.setattr(file_reading, "copy_file_runs", in_order)
                into[:] = 0
                reader.read(into, near, far, length)
            assert np.array_equal(into, want), "a system that does not copy is asked otherwise"
        mapped.close()


def test_long_runs_are_read_one_by_one_also_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    held, into = rng.integers(0, 256, SIZE, dtype=np.uint8), np.full(SIZE, 7, np.uint8)
    near, far = np.array([1 << 20, 5, 3 << 20]), np.array([3 << 20, 1 << 20, 11])
    length = np.array([1 << 20, 700_001, 600_000])
    want = into.copy()
    for start, to, size in zip(far.tolist(), near.tolist(), length.tolist(), strict=True):
        want[to : to + size] = held[start : start + size]
    with tempfile.TemporaryFile() as file:
        file.write(held.tobytes())
        file.flush()
        mapped = FileMap(file.fileno(), SIZE)
        reader = RunReader(file.fileno(), mapped, Rooms())
        monkeypatch.setattr(FileMap, "read", None)
        reader.read(into, near, far, length)
        assert np.array_equal(into, want)
        reader.read(into, np.append(near, 0), np.append(far, SIZE), np.append(length, 0))
        assert np.array_equal(into, want), "no byte is no end"
        with monkeypatch.context() as patch:
            read = os.preadv
            patch.setattr(os, "preadv", lambda fd, to, at: read(fd, [to[0][:300_000]], at))
            into[:] = 7
            reader.read(into, near, far, length)
        assert np.array_equal(into, want), "a call may do less than it was told"
        os.ftruncate(file.fileno(), (3 << 20) + 1)
        with pytest.raises(OSError, match=f"ends at byte {(3 << 20) + 1}"):
            reader.read(into, near, far, length)
        mapped.close()


@pytest.mark.parametrize(("starts", "spans"), [(1, 1), (1, 64), (40, 2), (40, 64)])
def test_cores_read_all_runs_of_a_grid_and_none_twice(
    starts: int, spans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many spans each has some, of few spans some of the starts."""
    monkeypatch.setattr(file_, "_WORTH_A_CORE", 1)
    monkeypatch.setattr(file_, "_SUMMING", 4)
    first = Starts.of(7 * np.arange(starts), 5 * np.arange(starts))
    at = 1000 * np.arange(spans)
    grid = Copy(0, 0, at, at[::-1].copy(), 1 + np.arange(spans) % 5, starts=first)
    parts = list(file_._parts(grid))
    assert len(parts) == min(4, max(starts, spans))
    assert not list(file_._cuts(0, 0))
    shares = [len(range(100)[some]) for some in file_._cuts(starts, 1 << 30)]
    assert max(shares) - min(shares) <= 1, "nobody waits for the one who has the most"
    found = [run for part in parts for run in zip(*part.runs(), strict=True)]
    assert sorted(found) == sorted(zip(*grid.runs(), strict=True))


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC", "LBNHC"])
def test_cores_share_a_fetch(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_, "_WORTH_A_CORE", 1)
    monkeypatch.setattr(file_, "_SUMMING", 3)
    made, world = small(DENSE, tp=2, layout=layout), World(DENSE, TOKENS)
    with Tier.open(tmp_path / "t", kept(), durable=False) as tier:
        world.store(tier, made)
        world.check(tier, made)
