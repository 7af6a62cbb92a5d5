"""Shared memory that no peer can take away, and that goes with its owner."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire import Memory, make_transport, unix_sockets
from kvatlas.wire.transports import admission, shared_memory, shm_sockets
from kvatlas.wire.transports.shared_memory import SEALS, containing, create_segment, map_sealed
from kvatlas.wire.transports.shm import ShmTransport
from kvatlas.wire.transports.shm_sockets import SegmentServer, receive_descriptors
from tests.wire.forking import forked, forked_idler, until_stopped
from tests.wire.helpers import waited
from tests.wire.transports.ends import eventually, soon

RUNS = [Copy(0, 0, np.array([0]), np.array([8]), np.array([3]))]


@pytest.fixture(scope="module", autouse=True)
def _little_garbage() -> None:
    """Exclude the objects of other tests from garbage collection, which runs often here."""
    gc.collect()
    gc.freeze()


def code_of(act: Any, *arguments: Any) -> Code:
    with pytest.raises(AtlasError) as refusal:
        act(*arguments)
    return refusal.value.code


def descriptors() -> set[str]:
    """What this process has open, sockets and memory, by name."""
    gc.collect()
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def eventually_back_to(before: set[str]) -> bool:
    return bool(eventually(lambda: descriptors() == before))


def serve(tester: Connection, size: int = 4096) -> None:
    """A process with a segment on a transport; it does to itself what the tester says."""
    pool = create_segment(size)
    pool[:3] = b"abc"
    end = ShmTransport()
    end.register({0: pool.memory})
    tester.send((end.publish(), end.memory[0].address))
    while (word := tester.recv()) != "end":
        if word == "truncate":
            tester.send([_errno(os.ftruncate, pool.descriptor, n) for n in (0, 1 << 20)])
        elif word == "fork":
            tester.send(forked_idler())


def _errno(act: Any, *arguments: Any) -> int:
    try:
        act(*arguments)
    except OSError as problem:
        return int(problem.errno or 0)
    return 0


@contextmanager
def peer(size: int = 4096) -> Iterator[tuple[Any, Any, bytes, dict[int, Memory]]]:
    process, pipe = forked(serve, size)
    metadata, address = pipe.recv()
    yield process, pipe, metadata, {0: Memory(address, size)}
    process.kill()
    process.join()
    pipe.close()


@pytest.fixture
def near() -> Iterator[ShmTransport]:
    end = ShmTransport()
    pool = create_segment(4096)
    end.register({0: pool.memory})
    yield end
    end.close()


def held(end: ShmTransport) -> bytes:
    segment: Any = end.memory[0].owner
    return bytes(segment[8:11])


# -- memory that cannot be taken away -----------------------------------------------------


def test_a_peer_cannot_truncate_what_it_has_shared(near: ShmTransport) -> None:
    """On a plain file this would end the reader by SIGBUS."""
    with peer() as (_, pipe, metadata, regions):
        link = near.connect(metadata, regions)
        pipe.send("truncate")
        assert pipe.recv() == [1, 1]  # EPERM
        link.read(RUNS).wait(soon())
        assert held(near) == b"abc"
        link.close()


def test_a_reader_cannot_truncate_what_it_was_given() -> None:
    server, pool = SegmentServer(), create_segment(100)
    server.add(pool.descriptor)
    connection, (given,) = receive_descriptors(server.name, server.token)
    again = os.open(f"/proc/self/fd/{given}", os.O_RDWR)  # opened anew, as any owner may
    for descriptor in (given, again):
        assert _errno(os.ftruncate, descriptor, 0) == 1
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
        os.close(descriptor)
    connection.close()
    server.close()


def test_every_page_of_a_segment_exists() -> None:
    pool = create_segment(1 << 20)
    assert os.fstat(pool.descriptor).st_blocks * 512 >= 1 << 20


def forged(kind: str, folder: Path) -> int:
    if kind == "file":
        (folder / "f").write_bytes(bytes(4096))
        return os.open(folder / "f", os.O_RDWR)
    descriptor = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    seals = {"unsealed": 0, "shrinks": fcntl.F_SEAL_GROW, "unsealable": SEALS & ~fcntl.F_SEAL_SEAL}
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, {**seals, "read only": SEALS | 8}[kind])
    return descriptor


def test_forged_descriptors_are_refused(near: ShmTransport, tmp_path: Path) -> None:
    """Files, and memfds that are not sealed as they should be, are never mapped."""
    for kind in ("file", "unsealed", "shrinks", "unsealable", "read only"):
        bad = forged(kind, tmp_path)
        assert code_of(map_sealed, bad) == Code.BAD_HANDSHAKE
        other = ShmTransport()
        pool = create_segment(4096)
        other.register({0: pool.memory})
        metadata, regions = other.publish(), dict(other.memory)
        other._server._given[0], real = bad, other._server._given[0]
        before = descriptors()
        assert code_of(near.connect, metadata, regions) == Code.BAD_HANDSHAKE
        assert eventually_back_to(before)
        os.close(real)
        other.close()


def test_regions_beyond_a_segment_are_refused(near: ShmTransport) -> None:
    other, pool = ShmTransport(), create_segment(4096)
    other.register({0: pool.memory})
    said = msgspec.msgpack.decode(other.publish())
    wrong: list[tuple[int, int, int]] = [
        (0, 1, 4096), (0, -1, 4096), (0, 0, 4097), (0, 0, 0), (0, 0, -1), (0, 2**62, 4096),
        (1, 0, 4096), (-1, 0, 4096),
    ]  # fmt: skip
    for segment, start, nbytes in wrong:
        said["regions"] = {0: {"segment": segment, "start": start, "nbytes": nbytes}}
        metadata, regions = msgspec.msgpack.encode(said), {0: Memory(4096, nbytes)}
        assert code_of(near.connect, metadata, regions) == Code.BAD_HANDSHAKE
    other.close()


def test_sizes_that_are_none() -> None:
    for size in (0, -1, True, 1.5):
        assert code_of(create_segment, size) == Code.BAD_SIZE


def test_nothing_is_allocated_where_nothing_is_wanted() -> None:
    end = make_transport("shm")
    assert end.allocate(0).size == 0
    end.close()


def test_more_than_the_host_or_its_container_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    assert code_of(create_segment, 1 << 50) == Code.NOT_ENOUGH_MEMORY
    (tmp_path / "memory.max").write_text("8192\n")
    monkeypatch.setattr(shared_memory, "_CONTAINER", tmp_path / "memory.max")
    assert code_of(create_segment, 8193) == Code.NOT_ENOUGH_MEMORY
    create_segment(8192).close()
    assert descriptors() == before


def test_closing_keeps_views_alive() -> None:
    pool = create_segment(100)
    view = np.frombuffer(pool, np.uint8)
    pool.close()
    pool.close()
    assert view.sum() == 0
    assert containing(Memory(view.ctypes.data, 10)) is None


def test_a_forgotten_segment_is_freed() -> None:
    before = descriptors()
    pool = create_segment(100)
    assert descriptors() > before
    del pool
    assert descriptors() == before


def test_registered_memory_stays_although_its_segment_is_forgotten(near: ShmTransport) -> None:
    with peer() as (_, _, metadata, regions):
        gc.collect()
        link = near.connect(metadata, regions)
        link.read(RUNS).wait(soon())
        assert held(near) == b"abc"
        link.close()


def test_segments_come_and_go_while_others_look_for_theirs() -> None:
    kept, failed, stop = create_segment(64), [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            try:
                assert containing(kept.memory) is not None
            except BaseException as problem:
                failed.append(problem)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        create_segment(64)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed


# -- a peer that closes, dies, or forks ---------------------------------------------------


def test_a_killed_owner_leaves_nothing(near: ShmTransport) -> None:
    names = Path("/proc/net/unix")
    with peer() as (process, _, metadata, regions):
        name = msgspec.msgpack.decode(metadata)["socket"]
        assert name in names.read_text()
        link = near.connect(metadata, regions)
        process.kill()
        process.join()
        assert code_of(link.read, RUNS) == Code.PEER_LOST
        assert code_of(near.connect, metadata, regions) == Code.PEER_LOST
        assert name not in names.read_text()
        link.close()


def test_the_death_of_an_owner_whose_forked_child_lives_is_noticed(near: ShmTransport) -> None:
    with peer() as (process, pipe, metadata, regions):
        link = near.connect(metadata, regions)
        pipe.send("fork")
        child = pipe.recv()
        try:
            link.read(RUNS).wait(soon())
            process.kill()
            process.join()
            assert code_of(link.read, RUNS) == Code.PEER_LOST
            assert code_of(near.connect, metadata, regions) == Code.PEER_LOST
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_ends_nothing_of_its_parents(near: ShmTransport) -> None:
    """Neither by closing everything it knows, nor by ending as Python does."""
    with peer() as (_, _, metadata, regions):
        link = near.connect(metadata, regions)
        child = os.fork()
        if not child:
            code = 1
            try:
                assert code_of(near.publish) == Code.WIRE_FAILED
                assert code_of(link.read, RUNS) == Code.WIRE_FAILED
                link.close()
                near.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        link.read(RUNS).wait(soon())
        other = ShmTransport()
        other.connect(near.publish(), near.memory).close()
        other.close()
        link.close()


def test_a_link_that_is_dropped_closes_its_descriptors(near: ShmTransport) -> None:
    other, pool = ShmTransport(), create_segment(4096)
    other.register({0: pool.memory})
    before = descriptors()
    link = near.connect(other.publish(), other.memory)
    assert descriptors() > before
    del link
    assert eventually_back_to(before)
    assert not other._server.links.total()
    other.close()


def test_a_transport_that_is_dropped_stops_serving() -> None:
    before, threads = descriptors(), threading.active_count()
    end = ShmTransport()
    end.register({0: create_segment(64).memory})
    assert threading.active_count() == threads + 1
    del end
    assert threading.active_count() == threads
    assert descriptors() == before


# -- the handshake ------------------------------------------------------------------------


def test_thousands_of_links_leave_no_descriptor(near: ShmTransport) -> None:
    """More than 4,097, after which everybody was refused once; most of them only shake hands."""
    other, pool = ShmTransport(), create_segment(4096)
    other.register({0: pool.memory})
    metadata, regions = other.publish(), dict(other.memory)
    before, count = descriptors(), 0
    while count < 4200:
        if count % 20 == 0:
            near.connect(metadata, regions).close()
        else:
            connection, (given,) = receive_descriptors(other._server.name, other._server.token)
            os.close(given)
            connection.close()
        count += 1
    assert eventually_back_to(before)
    other.close()


def test_a_stopped_peer_does_not_hold_up_whoever_connects(
    near: ShmTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by not answering, nor by a queue that nobody empties."""
    monkeypatch.setattr(shm_sockets, "HANDSHAKE_SECONDS", 0.3)
    with peer() as (process, _, metadata, regions):
        os.kill(process.pid, signal.SIGSTOP)
        until_stopped(process.pid)
        before, start = descriptors(), time.monotonic()
        assert code_of(near.connect, metadata, regions) == Code.DEADLINE
        waiting = []
        address = shm_sockets._address(msgspec.msgpack.decode(metadata)["socket"])
        problem = 0
        while not problem:
            one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            one.setblocking(False)
            waiting.append(one)
            problem = one.connect_ex(address)
        assert code_of(near.connect, metadata, regions) == Code.DEADLINE
        assert time.monotonic() - start < 10
        for one in waiting:
            one.close()
        assert descriptors() == before


def test_thousands_of_strangers_do_not_keep_a_peer_out(near: ShmTransport) -> None:
    """Connections that say nothing, or the wrong thing, as fast as one process can."""
    with peer() as (process, _, metadata, regions):
        said = msgspec.msgpack.decode(metadata)
        stop, opened = threading.Event(), [0]

        def flood() -> None:
            held: list[socket.socket] = []
            while not stop.is_set():
                one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                one.connect(shm_sockets._address(said["socket"]))
                if opened[0] % 3 == 0:
                    one.send(b"x" * 16)
                held = [*held[-100:], one]
                opened[0] += 1

        floods = [threading.Thread(target=flood) for _ in range(2)]
        for thread in floods:
            thread.start()
        for _ in range(20):
            link = near.connect(metadata, regions)
            link.read(RUNS).wait(soon())
            link.close()
        eventually(lambda: opened[0] > 2000, 5)
        near.connect(metadata, regions).close()
        stop.set()
        for thread in floods:
            thread.join()
        folder = Path(f"/proc/{process.pid}/fd")
        assert eventually(lambda: len(list(folder.iterdir())) < 2 * admission.MOST_UNPROVEN)


def test_one_process_cannot_have_all_links() -> None:
    server = SegmentServer()
    server._most = 8
    mine = [receive_descriptors(server.name, server.token)[0] for _ in range(4)]
    assert code_of(receive_descriptors, server.name, server.token) == Code.WIRE_FAILED
    with_room, pipe = forked(connect_once, server.name, server.token)
    assert pipe.recv() == "connected"
    with_room.join()
    mine.pop().close()
    assert eventually(lambda: server.links.total() == 3)
    mine.append(receive_descriptors(server.name, server.token)[0])
    for one in mine:
        one.close()
    server.close()


def connect_once(tester: Connection, name: str, token: bytes) -> None:
    try:
        receive_descriptors(name, token)[0].close()
        tester.send("connected")
    except AtlasError as refusal:
        tester.send(str(refusal))


def test_another_user_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever connects and whoever is connected to asks the kernel who the other is."""
    server = SegmentServer()
    real = unix_sockets._other_end
    for end in ("accepting", "connecting"):
        with monkeypatch.context() as patch:
            serving = end == "accepting"
            patch.setattr(
                unix_sockets,
                "_other_end",
                lambda one, serving=serving: (
                    (7, os.getuid() + 1)
                    if (threading.current_thread().name == "kvatlas-shm") == serving
                    else real(one)
                ),
            )
            assert code_of(receive_descriptors, server.name, server.token) == Code.PEER_LOST
    receive_descriptors(server.name, server.token)[0].close()
    server.close()


def test_a_wrong_token_gets_nothing() -> None:
    server, pool = SegmentServer(), create_segment(100)
    server.add(pool.descriptor)
    before = descriptors()
    for token in (bytes(16), server.token[:15], server.token + b"x", b"x" * 5000):
        assert code_of(receive_descriptors, server.name, token) == Code.BAD_HANDSHAKE
    assert eventually_back_to(before)
    server.close()


def test_more_segments_than_one_message_holds() -> None:
    server = SegmentServer()
    with create_segment(64) as pool:
        for _ in range(250):
            server.add(pool.descriptor)
    connection, given = receive_descriptors(server.name, server.token)
    assert len(given) == 250
    for descriptor in given:
        os.close(descriptor)
    connection.close()
    server.close()


def test_a_server_that_says_what_it_should_not(near: ShmTransport) -> None:
    """Words after the handshake would hide the end of the connection: the link is lost."""
    other, pool = ShmTransport(), create_segment(4096)
    other.register({0: pool.memory})
    link = near.connect(other.publish(), other.memory)
    link.check()
    waited(lambda: other._server.links.total() == 1, 10)  # by a thread of its own
    (there,) = other._server._admission._newcomers.values()
    there.connection.send(b"boo")
    assert code_of(link.check) == Code.PEER_LOST
    link.close()
    other.close()


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
    empty = np.zeros(0, np.uint8)
    with_pool.register(
        {0: pool.memory, 1: Memory(plain.ctypes.data, 4096), 2: Memory(empty.ctypes.data, 0)}
    )
    without.register({0: Memory(plain.ctypes.data, 4096)})
    link: Any = without.connect(with_pool.publish(), with_pool.memory)
    assert [link.reaches(pool) for pool in range(4)] == [True, False, True, False]
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


def test_a_mapping_outlives_its_link(near: ShmTransport) -> None:
    """A copy that is under way when its link is closed ends with an error, not with the process."""
    other, pool = ShmTransport(), create_segment(4096)
    other.register({0: pool.memory})
    link: Any = near.connect(other.publish(), other.memory)
    handle = link.read(RUNS)
    seen = link.mapped[0]
    link.close()
    other.close()
    pool.close()
    assert code_of(lambda: handle.wait(soon())) == Code.WIRE_FAILED
    assert int(seen.sum()) == 0
