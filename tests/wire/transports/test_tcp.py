"""Reads over TCP: who may ask for what, and readers that go away in the middle of it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest

from kvatlas.copying.memory_copy import as_bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire import Memory, Transport, make_transport
from kvatlas.wire.transports import nonblocking_sockets
from kvatlas.wire.transports.tcp import TcpTransport
from kvatlas.wire.transports.tcp_server import (
    CHALLENGE_BYTES,
    MOST_RUNS,
    QUESTION,
    REFUSAL,
    REFUSED,
    WELCOME,
    proof,
)
from tests.wire.transports.ends import eventually, soon

POOL = 8 << 20


@pytest.fixture
def source() -> Iterator[Transport]:
    pool = np.random.default_rng(1).integers(0, 256, POOL, dtype=np.uint8)
    end = make_transport("tcp")
    end.register({0: Memory(pool.ctypes.data, POOL, owner=pool)})
    yield end
    end.close()


def reads_all(source: Transport) -> bool:
    """Whether a new peer gets every byte right: a long run, and many short ones."""
    end, pool = make_transport("tcp"), np.zeros(POOL, np.uint8)
    end.register({0: Memory(pool.ctypes.data, POOL)})
    half, at = POOL // 2, np.arange(POOL // 2, POOL, 512)
    link = end.connect(source.publish(), source.memory)
    long = Copy(0, 0, np.array([0]), np.array([0]), np.array([half]))
    link.read([long, Copy(0, 0, at, at, np.full(len(at), 512))]).wait(soon())
    end.close()
    return bool(np.array_equal(pool, as_bytes(source.memory[0])))


def dialled(source: Transport) -> tuple[socket.socket, bytes, bytes]:
    """A connection as a stranger has it, the token, and the challenge."""
    published = msgspec.msgpack.decode(source.publish())
    one = socket.create_connection((published["address"], published["port"]), timeout=10)
    return one, published["token"], one.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)


def welcomed(source: Transport) -> socket.socket:
    one, token, challenge = dialled(source)
    one.sendall(proof(token, challenge))
    assert one.recv(1) == WELCOME
    return one


def question(pool: int, runs: list[tuple[int, int]], count: int | None = None) -> bytes:
    columns = np.array(runs, np.int64).reshape(-1, 2).T
    head = QUESTION.pack(pool, len(runs) if count is None else count, b"")
    return head + columns.tobytes()


def ended(one: socket.socket) -> bool:
    """Whether the other end says nothing and hangs up."""
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True
    finally:
        one.close()


def test_readers_that_die_in_mid_read_leave_their_source_serving(source: Transport) -> None:
    """Killed processes leave resets behind: questions unread, answers on their way."""
    for number in range(150):
        one = welcomed(source)
        one.sendall(question(0, [(0, POOL)]) + question(0, [(0, 100)] * 50) * (number % 7))
        if number % 3:
            one.recv(1 + number * 1000)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
    assert reads_all(source)


def test_who_does_not_know_the_token_reads_nothing(source: Transport) -> None:
    one, token, challenge = dialled(source)
    right = proof(token, challenge)
    for said in (bytes(32), proof(bytes(32), challenge), question(0, [(0, 8)]) * 2):
        one, _, _ = dialled(source)
        one.sendall(said)
        assert ended(one)
    one, _, _ = dialled(source)
    one.sendall(right)  # of another connection, as somebody on the network may have seen it
    assert ended(one)
    assert reads_all(source)


def test_runs_outside_the_regions_are_refused(source: Transport) -> None:
    one = welcomed(source)
    for said in (
        question(0, [(-1, 8)]),
        question(0, [(0, 8), (POOL - 7, 8)]),
        question(0, [(0, 0)]),
        question(0, [(0, -8)]),
        question(0, [(2**62, 2**62)]),
        question(7, [(0, 8)]),
    ):
        one.sendall(said)
        assert one.recv(1) == REFUSED, said
        (nbytes,) = REFUSAL.unpack(one.recv(REFUSAL.size, socket.MSG_WAITALL))
        refusal = msgspec.msgpack.decode(one.recv(nbytes, socket.MSG_WAITALL))
        assert refusal["code"] == Code.OUT_OF_BOUNDS
    one.close()
    assert reads_all(source)


def test_questions_that_make_no_sense_end_their_connection_alone(source: Transport) -> None:
    for said in (
        question(0, [], 0),
        question(0, [], MOST_RUNS + 1),
        question(0, [], 2**32 - 1),
    ):
        one = welcomed(source)
        one.sendall(said)
        assert ended(one), said
    assert reads_all(source)


def test_strangers_do_not_keep_peers_out(source: Transport) -> None:
    strangers = [dialled(source)[0] for _ in range(150)]
    assert reads_all(source)
    for one in strangers:
        one.close()


def test_a_closed_source_leaves_no_thread_behind(source: Transport) -> None:
    before = threading.active_count()
    held = [welcomed(source) for _ in range(3)]
    held[0].sendall(question(0, [(0, POOL)] * 20))  # nobody reads the answer
    assert threading.active_count() >= before + 3
    source.close()
    assert threading.active_count() < before
    assert ended(held[1])
    for one in held:
        one.close()


def test_connections_are_kept_for_the_next_read(source: Transport) -> None:
    end, pool = make_transport("tcp"), np.zeros(64, np.uint8)
    end.register({0: Memory(pool.ctypes.data, 64)})
    link = end.connect(source.publish(), source.memory)
    copy = Copy(0, 0, np.array([0]), np.array([0]), np.array([64]))
    before = threading.active_count()
    for _ in range(20):
        link.read([copy]).wait(soon())
    assert threading.active_count() == before
    link.read([copy]).release()  # given up: what still comes is nobody's
    link.read([copy]).wait(soon())
    link.close()
    assert eventually(lambda: threading.active_count() < before)
    end.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])  # noqa: S104
def test_nobody_listens_everywhere(host: str) -> None:
    with pytest.raises(AtlasError) as refusal:
        TcpTransport(host=host)
    assert refusal.value.code is Code.WIRE_FAILED


@pytest.mark.parametrize("most", [1, 7, 100, 5_000, 1 << 30])
def test_buffers_arrive_in_order_if_system_calls_are_interrupted(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(socket.socket):
        def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:  # type: ignore[override]
            return super().send(b"".join(buffers)[:most])

    monkeypatch.setattr(nonblocking_sockets, "_MOST_BUFFERS", 3)
    rng = np.random.default_rng(most)
    buffers = [rng.bytes(size) for size in (1, 4_000, 3, 900, 64, 1, 2_000)]
    ours, theirs = socket.socketpair()
    with Interrupted(fileno=ours.detach()) as one, theirs:
        nonblocking_sockets.send_buffers(one, buffers)
        one.shutdown(socket.SHUT_WR)
        assert theirs.recv(1 << 16, socket.MSG_WAITALL) == b"".join(buffers)


def test_runs_with_adjacent_destinations_arrive_in_place(source: Transport) -> None:
    end, pool = make_transport("tcp"), np.zeros(POOL, np.uint8)
    end.register({0: Memory(pool.ctypes.data, POOL)})
    length = np.array([40_000, 30_000, 20_000, 65_536, 16_384, 50_000])
    sources = np.array([5_000_000, 0, 7_000_000, 40_000, 1_000_000, 3_000_000])
    destinations = np.array([100, 40_100, 70_100, 200_000, 265_536, 90_100])
    link = end.connect(source.publish(), source.memory)
    link.read([Copy(0, 0, sources, destinations, length)]).wait(soon())
    end.close()
    held, expected = as_bytes(source.memory[0]), np.zeros(POOL, np.uint8)
    for at, to, size in zip(sources, destinations, length, strict=True):
        expected[to : to + size] = held[at : at + size]
    np.testing.assert_array_equal(pool, expected)
