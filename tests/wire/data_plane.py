"""Nodes over tcp for tests of its data port: what readers ask for, with and without a right to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Copy
from kvatlas.wire import Session, protocol
from kvatlas.wire.client.connections import PeerConnection
from kvatlas.wire.leases import session_id
from kvatlas.wire.security import Security
from kvatlas.wire.transports.tcp_server import CHALLENGE_BYTES, WELCOME, proof
from tests.attack.plans import after, source_plan, target_plan
from tests.wire.child import Rank

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
TOKENS = 400


@contextmanager
def ranks(*made: tuple[Plan, int], secret: Any = SECRET, **given: Any) -> Iterator[list[Rank]]:
    """Nodes of this process over tcp, by plan and seed."""
    with ExitStack() as stack:
        found = []
        for plan, seed in made:
            found.append(Rank(plan, "tcp", seed, TOKENS, secret=secret, **given))
            stack.callback(found[-1].close)
        yield found


def pair(**given: Any) -> Any:
    """A source, and a destination with another layout."""
    return ranks((source_plan(TOKENS), 1), (target_plan(TOKENS), 7), **given)


def pull(session: Session, here: Rank, request: str = "r", **about: Any) -> None:
    about = {"timeout": 20} | about
    session.pull(request, destination_blocks=here.blocks, tokens=TOKENS, **about).wait()


def assert_arrived(here: Rank) -> None:
    right = after(source_plan(TOKENS), 1, target_plan(TOKENS), 7, TOKENS)
    assert not here.wrong(right), "every byte of the request has arrived, and no other"


def one_run(region: int, start: int, length: int = 64) -> Copy:
    return Copy(region, 0, np.array([start]), np.array([0]), np.array([length]))


def code_of_read(session: Session, copy: Copy, lease: bytes) -> Code | None:
    """How a read ends that a peer makes by itself; None if it gets the bytes."""
    try:
        session.link(0).read([copy], lease=lease).wait(time.monotonic() + 10)
    except AtlasError as refusal:
        return refusal.code
    return None


def connection_of(session: Session) -> PeerConnection:
    (connection,) = session._connections._open.values()
    return connection


def ask(session: Session, kind: Any, **about: Any) -> Any:
    """Ask the only peer of a session something."""
    connection = connection_of(session)
    question = kind(session=connection.session, **about)
    channels = session.node.channels
    return channels.ask(connection.endpoint, question, deadline=time.monotonic() + 10)


def open_lease(session: Session, here: Rank, request: str = "r", **given: Any) -> bytes:
    """The key of a lease for all tokens of a request."""
    blocks = protocol.pack_tables(protocol.by_group(here.blocks))
    about: dict[str, Any] = {
        "direction": "pull", "request": request, "blocks": blocks, "seconds": 20.0,
        "start": 0, "stop": TOKENS, "identity": session.node.identity,
    }  # fmt: skip
    opened: protocol.Opened = ask(session, protocol.Open, **about | given)
    return opened.lease


def dial(rank: Rank, session: bytes, security: Security, room: int = 0) -> socket.socket:
    """A data connection to a node, authenticated, with a small buffer to receive if asked for."""
    at: Any = msgspec.msgpack.decode(rank.transport.publish())
    plain = socket.socket()
    plain.settimeout(10)
    if room:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    plain.connect((at["address"], at["port"]))
    one = security.open(plain, at["address"], 0)
    challenge = b""
    while len(challenge) < CHALLENGE_BYTES:
        challenge += one.recv(CHALLENGE_BYTES - len(challenge))
    one.sendall(proof(at["token"], challenge, session_id(session)))
    assert one.recv(1) == WELCOME
    return one


class Proxy:
    """Stands between a node's data port and its readers, and may change what the node sends."""

    def __init__(
        self, rank: Rank, change: Callable[[bytes], bytes], patch: pytest.MonkeyPatch
    ) -> None:
        self._change = change
        self._listening = socket.create_server(("127.0.0.1", 0))
        publish = rank.transport.publish
        at: Any = msgspec.msgpack.decode(publish())
        self._to = at["address"], at["port"]
        port = self._listening.getsockname()[1]
        self.passed = bytearray()
        """What the node has sent so far."""

        def changed() -> bytes:
            said: Any = msgspec.msgpack.decode(publish())
            return msgspec.msgpack.encode(said | {"port": port})

        patch.setattr(rank.transport, "publish", changed)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                there = socket.create_connection(self._to)
                for src, dst, change in ((caller, there, False), (there, caller, True)):
                    threading.Thread(
                        target=self._pass_on, args=(src, dst, change), daemon=True
                    ).start()

    def _pass_on(self, src: socket.socket, dst: socket.socket, change: bool) -> None:
        with suppress(OSError):
            while some := src.recv(1 << 16):
                if change:
                    self.passed += some
                dst.sendall(self._change(some) if change else some)
        for one in (src, dst):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()
