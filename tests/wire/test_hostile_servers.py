"""A peer that answers, and lies: what it says is held against its plan before it is used."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Session, encoding, protocol
from kvatlas.wire.channels import Channels
from kvatlas.wire.rpc import Server
from kvatlas.wire.security import Security
from tests.wire.corpus.make import registered
from tests.wire.helpers import End, assert_arrived, ends, small
from tests.wire.raw import framed

Twist = Callable[[Any, Any], Any]
"""What is said instead, from the question and the honest answer."""


@contextmanager
def liar(source: End, twist: Twist) -> Iterator[str]:
    """An endpoint that answers as a node does, but for a twist."""
    honest = source.nodes[0].server.answer
    server = Server(
        "tcp://127.0.0.1:0",
        lambda question, caller: twist(question, honest(question, caller)),
    )
    try:
        yield server.endpoint
    finally:
        server.close()


@contextmanager
def told(answer: Callable[[bytes], bytes | None]) -> Iterator[str]:
    """An endpoint that answers bytes with bytes, or hangs up on None."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connected: socket.socket) -> None:
        with connected, suppress(OSError):
            while heard := connected.recv(1 << 16):
                said = answer(heard)
                if said is None:
                    return
                connected.sendall(said)

    def run() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=listening.accept()[:1], daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[End, End]]:
    source = End(small("dense", layout="BLHNC"), 50, seed=1)
    target = End(small("dense"), 50, seed=2)
    with ends(source, target):
        yield source, target


@pytest.fixture(autouse=True)
def fresh(both: tuple[End, End]) -> Iterator[None]:
    """After each lie: nothing is lent, nothing outside the request was touched, all works."""
    source, target = both
    offer_anew(source)
    yield
    source.nodes[0].leases.drop_all()
    source.assert_idle()
    target.assert_idle()
    offer_anew(source)
    with Session(target.nodes[0], source.endpoints) as session:
        session.pull("r", destination_blocks=target.blocks, tokens=50, how="staged").wait(10)
    assert_arrived(source, target, 0)
    for buffers in target.buffers:
        for index, whole in buffers.whole.items():
            whole[:] = buffers.before[index]


def offer_anew(source: End) -> None:
    source.nodes[0].withdraw("r")
    source.nodes[0].offer("r", source.blocks, 50, timeout=600)


def of(kind: Any, **changed: Any) -> Twist:
    """Change some fields of one kind of answer."""

    def twist(question: Any, answer: Any) -> Any:
        del question
        return msgspec.structs.replace(answer, **changed) if isinstance(answer, kind) else answer

    return twist


def instead(kind: type, said: protocol.Message) -> Twist:
    """Answer one kind of question with something else."""
    return lambda question, answer: said if isinstance(question, kind) else answer


def introduced(**changed: Any) -> Twist:
    """Change some fields of the hello in a welcome."""

    def twist(question: Any, answer: Any) -> Any:
        del question
        if not isinstance(answer, protocol.Welcome):
            return answer
        hello = msgspec.structs.replace(answer.hello, **changed)
        return protocol.Welcome(hello=hello, session=answer.session)

    return twist


SIZE = small("dense").pools[0].nbytes


def memory(*some: dict[str, Any]) -> Twist:
    return introduced(memory=tuple(msgspec.convert(one, protocol.RegisteredMemory) for one in some))


WELCOMES: list[tuple[Code, Twist]] = [
    (Code.UNLIKE_VERSIONS, introduced(version=7, oldest=7)),
    (Code.BAD_HANDSHAKE, introduced(plan=None, plan_hash=bytes(32))),
    (Code.BAD_HANDSHAKE, introduced(plan_hash=bytes(32))),
    (Code.BAD_HANDSHAKE, introduced(plan=b"{}")),
    (Code.BAD_HANDSHAKE, introduced(fingerprint="0" * 32)),
    (Code.BAD_HANDSHAKE, introduced(transport="other")),
    (Code.BAD_HANDSHAKE, introduced(rank=1)),
    (Code.BAD_HANDSHAKE, memory()),
    (Code.BAD_HANDSHAKE, memory(registered(0, 64, SIZE - 1))),
    (Code.BAD_HANDSHAKE, memory(registered(0, 0, SIZE))),
    (Code.BAD_HANDSHAKE, memory(registered(0, 64, SIZE), registered(-1, 128, 4096))),
    (Code.BAD_HANDSHAKE, memory(registered(0, 64, SIZE), registered(3, 1 << 40, 4096))),
    (Code.BAD_HANDSHAKE, instead(protocol.Hello, protocol.SendPlan())),
    (Code.BAD_HANDSHAKE, instead(protocol.Hello, protocol.Ok())),
    (Code.BAD_HANDSHAKE, instead(protocol.Hello, protocol.Checksums(sums=b""))),
    (
        Code.WIRE_FAILED,
        instead(protocol.Hello, protocol.Refusal(code="?", problem="", got="", hint="")),
    ),
]


@pytest.mark.parametrize(("code", "twist"), WELCOMES)
def test_a_bad_welcome_is_refused(both: tuple[End, End], code: Code, twist: Twist) -> None:
    source, target = both
    transport: Any = target.nodes[0].transport
    before = len(transport.links)
    with liar(source, twist) as endpoint, pytest.raises(AtlasError) as refusal:
        Session(target.nodes[0], [endpoint], timeout=5)
    assert refusal.value.code is code
    assert len(transport.links) == before, "nobody connects to memory that was not checked"
    target.buffers[0].assert_untouched()


PACK = protocol.pack_tables
OPENINGS: list[tuple[Code, Twist]] = [
    (Code.BAD_HANDSHAKE, of(protocol.Lent, buffers=(0, 2**40))),
    (Code.BAD_HANDSHAKE, of(protocol.Lent, buffers=(2**61, 2**62))),
    (Code.BAD_HANDSHAKE, of(protocol.Lent, buffers=(1, 1))),
    (Code.BAD_HANDSHAKE, of(protocol.Lent, buffers=(3, 4))),
    (Code.BAD_HANDSHAKE, of(protocol.Opened, piece=1)),
    (Code.BAD_HANDSHAKE, of(protocol.Opened, piece=2**62)),
    (Code.BAD_HANDSHAKE, of(protocol.Opened, piece=8192)),
    (Code.BAD_HANDSHAKE, of(protocol.Opened, blocks={0: bytes(15)})),
    (Code.MISSING_BLOCKS, of(protocol.Opened, blocks={})),
    (Code.MISSING_BLOCKS, of(protocol.Opened, blocks=PACK({0: [1, 2]}))),
    (Code.OUT_OF_RANGE, of(protocol.Opened, blocks=PACK({0: [0, 1, 2, 2**31]}))),
    (Code.OUT_OF_RANGE, of(protocol.Opened, blocks=PACK({0: [0, 1, 2, 3], 1: [0]}))),
    (Code.TWICE, of(protocol.Opened, blocks=PACK({0: [5, 5, 5, 5]}))),
    (Code.BAD_HANDSHAKE, of(protocol.Lent, buffers=tuple(range(17)))),
    (Code.BAD_HANDSHAKE, instead(protocol.Open, protocol.Ok(seconds=9.0))),
    (Code.BAD_HANDSHAKE, instead(protocol.Gather, protocol.Checksums(sums=b""))),
    (Code.BAD_HANDSHAKE, instead(protocol.GetChecksums, protocol.Ok())),
    (Code.BAD_HANDSHAKE, instead(protocol.GetChecksums, protocol.Checksums(sums=b""))),
    (Code.BAD_HANDSHAKE, instead(protocol.GetChecksums, protocol.Checksums(sums=bytes(3)))),
    (Code.CHECKSUM, instead(protocol.GetChecksums, protocol.Checksums(sums=bytes(4)))),
    (Code.BAD_HANDSHAKE, instead(protocol.Close, protocol.Checksums(sums=b""))),
    (Code.TOO_MANY, of(protocol.Opened, piece=0)),
]


@pytest.mark.parametrize(("code", "twist"), OPENINGS)
def test_a_bad_lease_delivers_nothing(both: tuple[End, End], code: Code, twist: Twist) -> None:
    source, target = both
    with liar(source, twist) as endpoint, Session(target.nodes[0], [endpoint]) as session:
        transfer = session.pull(
            "r",
            destination_blocks=target.blocks,
            tokens=50,
            how="staged",
            checksums=True,
            timeout=5,
        )
        with pytest.raises(AtlasError) as refusal:
            transfer.wait(10)
        assert refusal.value.code is code
        assert not transfer.ready


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -5.0, 0.0, 1e300])
@pytest.mark.parametrize("kind", [protocol.Opened, protocol.Lent, protocol.Ok])
def test_absurd_times_change_nothing(both: tuple[End, End], kind: type, seconds: float) -> None:
    source, target = both
    with liar(source, of(kind, seconds=seconds)) as endpoint:
        with Session(target.nodes[0], [endpoint]) as session:
            session.pull("r", destination_blocks=target.blocks, tokens=50, streamed=True).wait(10)
        assert_arrived(source, target, 0)


def test_a_renewal_that_is_none_ends_a_stream(both: tuple[End, End]) -> None:
    source, target = both
    twist = instead(protocol.Renew, protocol.Checksums(sums=b""))
    with liar(source, twist) as endpoint, Session(target.nodes[0], [endpoint]) as session:
        transfer = session.pull("r", destination_blocks=target.blocks, tokens=50, streamed=True)
        with pytest.raises(AtlasError) as refusal:
            transfer.wait(10)
        assert refusal.value.code is Code.BAD_HANDSHAKE
        assert transfer.layers == set()


# -- below messages -----------------------------------------------------------------------

QUESTION = protocol.Renew(session=bytes(16), lease=bytes(16), seconds=1.0)
FINE = protocol.Ok(seconds=1.0)


def ask(endpoint: str, seconds: float, channels: Channels | None = None) -> Any:
    channels = channels or Channels(Security())
    return channels.ask(endpoint, QUESTION, deadline=time.monotonic() + seconds)


def test_garbage_is_refused_at_once() -> None:
    for answer, code in (
        (framed(b"\xdd\xff\xff\xff\xff"), Code.BAD_HANDSHAKE),
        (framed(b"\x91" * 100_000), Code.BAD_HANDSHAKE),
        (framed(b"\x81\xa3say\xa4tell"), Code.BAD_HANDSHAKE),
        (framed(encoding.encode(QUESTION)), Code.BAD_HANDSHAKE),
        (bytes(4), Code.BAD_HANDSHAKE),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Code.BAD_HANDSHAKE),
        (framed(bytes(8 << 20))[:100], Code.BAD_HANDSHAKE),
        (b"\xff" + bytes(8) + b"\x7f", Code.UNLIKE_VERSIONS),
        (b"\x15\x03\x03\x00\x02\x02\x28", Code.BAD_SIGNATURE),
    ):
        with told(lambda _, answer=answer: answer) as endpoint:  # type: ignore[misc]
            with pytest.raises(AtlasError) as refusal:
                ask(endpoint, 10)
            assert refusal.value.code is code


def test_no_answer_is_a_deadline_and_no_longer() -> None:
    whole = framed(encoding.encode(FINE))
    for answer in (b"", whole[:2], whole[:-1]):
        with told(lambda _, answer=answer: answer) as endpoint:  # type: ignore[misc]
            begun = time.monotonic()
            with pytest.raises(AtlasError) as refusal:
                ask(endpoint, 0.3)
            assert refusal.value.code is Code.DEADLINE
            assert time.monotonic() - begun < 3


def test_a_late_answer_is_nobodys() -> None:
    """The answer to a question that was given up is not the answer to the next one."""
    asked: list[bytes] = []
    first = threading.Event()

    def answer(heard: bytes) -> bytes:
        asked.append(heard)
        number = float(len(asked))
        if number == 1:
            assert first.wait(10)
        return framed(encoding.encode(protocol.Ok(seconds=number)))

    channels = Channels(Security())
    with told(answer) as endpoint:
        with pytest.raises(AtlasError):
            ask(endpoint, 0.2, channels)
        first.set()
        assert ask(endpoint, 10, channels) == protocol.Ok(seconds=2.0)


def test_an_answer_that_nobody_asked_for_is_nobodys() -> None:
    """A second answer behind the first is not taken for that of the next question."""
    asked: list[bytes] = []

    def answer(heard: bytes) -> bytes:
        asked.append(heard)
        said = framed(encoding.encode(protocol.Ok(seconds=float(len(asked)))))
        return said + framed(encoding.encode(protocol.Ok(seconds=99.0)))

    channels = Channels(Security())
    with told(answer) as endpoint:
        for number in (1.0, 2.0, 3.0):
            assert ask(endpoint, 10, channels) == protocol.Ok(seconds=number)


def test_a_peer_that_hangs_up_is_lost_at_once() -> None:
    with told(lambda _: None) as endpoint:
        begun = time.monotonic()
        with pytest.raises(AtlasError) as refusal:
            ask(endpoint, 30)
        assert refusal.value.code is Code.PEER_LOST
        assert time.monotonic() - begun < 10


def test_a_server_without_the_secret_is_refused() -> None:
    """Whoever answers proves itself too."""
    said = framed(encoding.encode(FINE))
    with told(lambda _: said) as endpoint, pytest.raises(AtlasError) as refusal:
        ask(endpoint, 10, Channels(Security(bytes(32))))
    assert refusal.value.code is Code.BAD_SIGNATURE
