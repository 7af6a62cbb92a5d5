"""Shared memory goes away with its owner, whatever way that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire.transports.base import Link, Memory
from kvatlas.wire.transports.shared_memory import FOLDER, allocate, attach, containing, sweep
from kvatlas.wire.transports.shm import ShmTransport
from tests.wire.transports.ends import SOURCE, soon

CHILD = """
import sys
from kvatlas.wire.transports.shm import allocate
pool = allocate(4096)
pool[:3] = b"abc"
print(pool.name, flush=True)
sys.stdin.readline()
"""


def child() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert process.stdout is not None
    return process, FOLDER / process.stdout.readline().strip()


def test_an_end_removes_it() -> None:
    process, path = child()
    assert path.stat().st_size == 4096
    process.communicate("\n")
    assert not path.exists()


def test_a_killed_owner_is_cleared_up_after() -> None:
    alive, kept = child()
    killed, left = child()
    mapped = attach(left.name, 0, 3)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.exists()
    assert sweep() >= 1
    assert not left.exists()
    assert kept.exists()  # its owner is alive
    assert mapped is not None
    assert mapped[:3] == b"abc"  # a mapping outlives the name
    alive.communicate("\n")


def test_closing_keeps_views_alive() -> None:
    pool = allocate(100)
    view = np.frombuffer(pool, np.uint8)
    path = FOLDER / pool.name
    pool.close()
    pool.close()
    assert not path.exists()
    assert view.sum() == 0
    assert containing(Memory(view.ctypes.data, 10)) is None


def test_a_forgotten_segment_is_removed() -> None:
    pool = allocate(100)
    path = FOLDER / pool.name
    assert path.exists()
    del pool
    assert not path.exists()


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_sizes_that_are_none(size: int) -> None:
    with pytest.raises(AtlasError) as refusal:
        allocate(size)
    assert refusal.value.code is Code.BAD_SIZE


def test_more_than_the_host_has() -> None:
    before = set(FOLDER.glob("kvatlas-*"))
    with pytest.raises(AtlasError) as refusal:
        allocate(1 << 50)
    assert refusal.value.code in (Code.NOT_ENOUGH_MEMORY, Code.WIRE_FAILED)
    assert set(FOLDER.glob("kvatlas-*")) <= before


@pytest.mark.parametrize("name", ["../etc/passwd", "kvatlas-" + "0" * 32, "", "kvatlas-x", "\0"])
def test_only_segments_are_mapped(name: str) -> None:
    assert attach(name, 0, 1) is None


def test_nothing_beyond_a_segment_is_mapped(tmp_path: Path) -> None:
    pool = allocate(100)
    assert attach(pool.name, 50, 51) is None
    assert attach(pool.name, -1, 10) is None
    link = FOLDER / ("kvatlas-" + "f" * 32)
    (tmp_path / "secret").write_bytes(b"x" * 100)
    link.symlink_to(tmp_path / "secret")
    try:
        assert attach(link.name, 0, 1) is None
        sweep()
        assert link.is_symlink()
    finally:
        link.unlink()
    pool.close()


def test_a_cache_in_shared_memory_and_pools_outside_it() -> None:
    pytest.importorskip("torch")
    from kvatlas.cache import bind
    from kvatlas.planning import plan

    made = plan("Qwen3-8B", memory="80MiB", max_len=16)
    pool = allocate(made.pools[0].nbytes)
    layer = bind(pool, made)["model.layers.0.self_attn.attn"]
    layer.k.fill_(1)
    assert bytes(pool[:2]) == b"\x80\x3f"
    plain = np.zeros(4096, np.uint8)
    with_pool, without = ShmTransport(), ShmTransport()
    with_pool.register({0: pool.memory, 1: Memory(plain.ctypes.data, 4096)})
    without.register({0: Memory(plain.ctypes.data, 4096)})
    link = without.connect(with_pool.publish(), with_pool.memory)
    runs = [Copy(0, 0, np.array([0]), np.array([8]), np.array([2]))]
    link.read(runs).wait(soon())
    assert plain[8:10].tobytes() == b"\x80\x3f"
    with pytest.raises(AtlasError) as refusal:
        link.read([Copy(1, 0, *(np.array([n]) for n in (0, 0, 1)))])
    assert refusal.value.code is Code.WIRE_FAILED
    with_pool.close()
    with pytest.raises(AtlasError) as refusal:
        link.read(runs).wait(soon())
    assert refusal.value.code is Code.PEER_LOST
    without.close()


def _send_many(link: Link) -> None:
    for _ in range(1000):
        link.read([], note=b"x" * 16_000).wait(soon(0.2))


def test_notes_that_nobody_takes_do_not_hang() -> None:
    pool = allocate(64)
    deaf, sender = ShmTransport(), ShmTransport()
    deaf.register({0: pool.memory})
    link = sender.connect(deaf.publish(), deaf.memory)
    with pytest.raises(AtlasError) as refusal:
        _send_many(link)
    assert refusal.value.code is Code.DEADLINE
    assert set(deaf.notes()) == {b"x" * 16_000}
    link.read([], note=b"again").wait(soon())
    assert deaf.notes() == [b"again"]
    deaf.close()
    sender.close()
