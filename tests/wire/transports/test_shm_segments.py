"""Shared memory goes away with its owner, whatever way that ends."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire import Memory, make_transport
from kvatlas.wire.transports.shm_segments import (
    FOLDER,
    attach,
    containing,
    create_segment,
    sweep,
)
from tests.wire.forking import forked
from tests.wire.transports.ends import soon


def own_a_segment(tester: Connection) -> None:
    pool = create_segment(4096)
    pool[:3] = b"abc"
    tester.send(pool.name)
    tester.recv()


def owner() -> tuple[Any, Any, Path]:
    """A process with a segment, the pipe to it, and the segment's file."""
    process, pipe = forked(own_a_segment)
    return process, pipe, FOLDER / pipe.recv()


def test_an_end_removes_it() -> None:
    process, pipe, path = owner()
    assert path.stat().st_size == 4096
    pipe.send("end")
    process.join()
    assert not path.exists()


def test_a_killed_owner_is_cleared_up_after() -> None:
    alive, pipe, kept = owner()
    killed, _, left = owner()
    mapped = attach(left.name, 0, 3)
    killed.kill()
    killed.join()
    assert left.exists()
    assert sweep() >= 1
    assert not left.exists()
    assert kept.exists()  # its owner is alive
    assert mapped is not None
    assert mapped[:3] == b"abc"  # a mapping outlives the name
    pipe.send("end")
    alive.join()


def test_closing_keeps_views_alive() -> None:
    pool = create_segment(100)
    view = np.frombuffer(pool, np.uint8)
    path = FOLDER / pool.name
    pool.close()
    pool.close()
    assert not path.exists()
    assert view.sum() == 0
    assert containing(Memory(view.ctypes.data, 10)) is None


def test_a_forgotten_segment_is_removed() -> None:
    pool = create_segment(100)
    path = FOLDER / pool.name
    assert path.exists()
    del pool
    assert not path.exists()


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_sizes_that_are_none(size: int) -> None:
    with pytest.raises(AtlasError) as refusal:
        create_segment(size)
    assert refusal.value.code is Code.BAD_SIZE


def test_more_than_the_host_has() -> None:
    before = set(FOLDER.glob("kvatlas-*"))
    with pytest.raises(AtlasError) as refusal:
        create_segment(1 << 50)
    assert refusal.value.code in (Code.NOT_ENOUGH_MEMORY, Code.WIRE_FAILED)
    assert set(FOLDER.glob("kvatlas-*")) <= before


@pytest.mark.parametrize("name", ["../etc/passwd", "kvatlas-" + "0" * 32, "", "kvatlas-x", "\0"])
def test_only_segments_are_mapped(name: str) -> None:
    assert attach(name, 0, 1) is None


def test_nothing_beyond_a_segment_is_mapped(tmp_path: Path) -> None:
    pool = create_segment(100)
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
    pool = create_segment(made.pools[0].nbytes)
    layer = bind(pool, made)["model.layers.0.self_attn.attn"]
    layer.k.fill_(1)
    assert bytes(pool[:2]) == b"\x80\x3f"
    plain = np.zeros(4096, np.uint8)
    with_pool, without = make_transport("shm"), make_transport("shm")
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
