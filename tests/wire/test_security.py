"""Who may talk: those who know a secret, and nobody who has only listened."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Session, TlsContexts, encoding, protocol
from kvatlas.wire.channels import Channels
from kvatlas.wire.connection import split_endpoint
from kvatlas.wire.rpc import Server
from kvatlas.wire.secret_identity import SecretIdentity
from kvatlas.wire.security import Security
from tests.wire.faulty import pull
from tests.wire.helpers import End, ends, small
from tests.wire.raw import connected, framed

OLD, NEW, OTHER = b"o" * 16, b"n" * 32, b"somebody else's secret"
QUESTION = protocol.Renew(session=bytes(16), lease=bytes(16), seconds=1.0)


@contextmanager
def server(security: Security, listen: str = "tcp://127.0.0.1:0") -> Iterator[str]:
    with closing(Server(listen, lambda *_: protocol.Ok(seconds=1.0), security=security)) as made:
        yield made.endpoint


def ask(endpoint: str, security: Security) -> Any:
    with closing(Channels(security)) as channels:
        return channels.ask(endpoint, QUESTION, deadline=time.monotonic() + 10)


def test_secrets_that_are_text_empty_or_short_are_refused_at_once() -> None:
    bad: list[Any] = [
        "a text that is long enough", "", b"", b"x", b"x" * 15, (), (OLD, b""), (OLD, "text"),
        bytearray(32), 32, (OLD, OLD), [bytes([n]) * 16 for n in range(5)],
    ]  # fmt: skip
    for secret in bad:
        with pytest.raises(AtlasError) as refusal:
            End(small("dense"), 50, secret=secret)
        assert refusal.value.code is Code.BAD_SECRET
        assert "bytes" in refusal.value.hint or "secret" in refusal.value.hint
        assert "long enough" not in str(refusal.value), "a secret is not shown"


def test_ends_that_share_no_secret_refuse_each_other() -> None:
    for ours, theirs in ((OLD, OTHER), (OLD, None), (None, OTHER), ((NEW, OLD), OTHER)):
        source = End(small("dense"), 50, secret=ours)
        target = End(small("dense"), 50, secret=theirs)
        with ends(source, target):
            for asks, answers in ((source, target), (target, source)):
                with pytest.raises(AtlasError) as refusal:
                    Session(asks.nodes[0], answers.endpoints, timeout=5)
                assert refusal.value.code is Code.BAD_SIGNATURE
            assert not any(node.metrics.values["messages"] for node in source.nodes + target.nodes)


def test_a_stranger_learns_nothing_of_who_answers() -> None:
    """No certificate, which would tell whether two nodes share a secret."""
    with server(Security(OLD)) as endpoint:
        for name in (None, "kvatlas", SecretIdentity(OTHER).name):
            stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
            plain = connected(endpoint)
            with stranger.wrap_socket(
                plain, server_hostname=name, do_handshake_on_connect=False
            ) as said:
                with pytest.raises(ssl.SSLError):
                    said.do_handshake()
                with suppress(ValueError):  # the handshake is not done
                    assert not said.getpeercert(binary_form=True)
        assert ask(endpoint, Security(OLD)) == protocol.Ok(seconds=1.0)


def test_who_names_the_secret_must_know_it() -> None:
    """The name of a secret travels in the clear: it opens nothing."""
    with server(Security(OLD)) as endpoint:
        for identity in (None, SecretIdentity(OTHER)):
            stranger = (
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if identity is None else identity.client
            )
            stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
            plain = connected(endpoint)
            with (
                stranger.wrap_socket(plain, server_hostname=SecretIdentity(OLD).name) as said,
                suppress(ssl.SSLError, ConnectionError),
            ):
                said.sendall(b"\x00\x00\x00\x01?")
                assert not said.recv(1), "it is hung up on without a word"


def test_secrets_rotate_without_a_failed_question() -> None:
    """Every pair of nodes that can meet while (new, old) is given to one after the other."""
    both: tuple[Any, ...] = (NEW, OLD)
    for one, two in (
        (OLD, OLD), (OLD, both), (both, both), (both, NEW), (NEW, NEW),
        (OLD, both[::-1]), (both, both[::-1]), (both[::-1], NEW),
    ):  # fmt: skip
        for asks, answers in ((one, two), (two, one)):
            with server(Security(answers)) as endpoint:
                assert ask(endpoint, Security(asks)) == protocol.Ok(seconds=1.0)
    with server(Security(NEW)) as endpoint, pytest.raises(AtlasError) as refusal:
        ask(endpoint, Security(OLD))
    assert refusal.value.code is Code.BAD_SIGNATURE


def test_a_peer_is_met_again_when_it_has_another_secret() -> None:
    """The one who asks has both, and remembers which the peer knew the last time."""
    with closing(Channels(Security((NEW, OLD)))) as channels:
        with server(Security(OLD)) as endpoint:
            channels.ask(endpoint, QUESTION, deadline=time.monotonic() + 10)
        with server(Security(NEW), endpoint):
            channels.ask(endpoint, QUESTION, deadline=time.monotonic() + 10)


def test_an_answer_that_nobody_asked_for_is_nobodys_inside_tls_either() -> None:
    """It lies where TLS has decrypted it, and the socket looks empty."""
    first, unasked = protocol.Checksums(sums=bytes(100_000)), protocol.Ok(seconds=99.0)
    listening = socket.create_server(("127.0.0.1", 0))
    security = Security(OLD)

    def serve(accepted: socket.socket) -> None:
        with security.wrap(accepted) as caller:
            security.identify(caller)
            while caller.recv(1 << 16):
                caller.sendall(b"".join(framed(encoding.encode(one)) for one in (first, unasked)))

    def run() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=listening.accept()[:1], daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    with closing(listening), closing(Channels(Security(OLD))) as channels:
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        for _ in range(3):
            assert channels.ask(endpoint, QUESTION, deadline=time.monotonic() + 10) == first


def test_tls_contexts_take_the_place_of_secrets() -> None:
    ours = Security(tls=TlsContexts(SecretIdentity(OLD).server, SecretIdentity(OLD).client))
    theirs = Security(tls=TlsContexts(SecretIdentity(OTHER).server, SecretIdentity(OTHER).client))
    with server(ours) as endpoint:
        assert ask(endpoint, ours) == protocol.Ok(seconds=1.0)
        with pytest.raises(AtlasError) as refusal:
            ask(endpoint, theirs)
        assert refusal.value.code is Code.BAD_SIGNATURE
    lax = SecretIdentity(OLD).client
    lax.verify_mode = ssl.CERT_NONE
    for secret, client in ((None, lax), (OLD, SecretIdentity(OLD).client)):
        with pytest.raises(AtlasError) as refusal:
            Security(secret, tls=TlsContexts(SecretIdentity(OLD).server, client))
        assert refusal.value.code is Code.BAD_SECRET
    with pytest.raises(AtlasError) as refusal:
        Security(tls=SecretIdentity(OLD).server)  # type: ignore[arg-type]
    assert refusal.value.code is Code.BAD_SECRET


def test_quotas_are_counted_by_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two peers of one host, each with a certificate of its own: one cannot use the other's up."""
    monkeypatch.setattr("kvatlas.wire.rpc._MAX_CONNECTIONS", 4)
    one, two = SecretIdentity(OLD), SecretIdentity(OTHER)
    for trusts, other in ((one.server, two), (two.client, one)):
        trusts.load_verify_locations(cadata=other.certificate)
    with server(Security(tls=TlsContexts(one.server, one.client))) as endpoint, ExitStack() as kept:

        def asked(identity: SecretIdentity, seconds: float = 20.0) -> Any:
            security = Security(tls=TlsContexts(one.server, identity.client))
            channels = kept.enter_context(closing(Channels(security)))
            return channels.ask(endpoint, QUESTION, deadline=time.monotonic() + seconds)

        for _ in range(2):
            assert asked(one) == protocol.Ok(seconds=1.0)
        with pytest.raises(AtlasError) as refusal:
            asked(one, 2.0)
        assert refusal.value.code is Code.BUSY, "two of four may be of one certificate"
        for _ in range(2):
            assert asked(two) == protocol.Ok(seconds=1.0), "which is not that of the host"


def test_listening_beyond_this_host_takes_a_secret() -> None:
    made = small("dense")
    for listen in ("tcp://0.0.0.0:0", "tcp://[::]:0"):
        with pytest.raises(AtlasError) as refusal:
            End(made, 50, listen=[listen])
        assert refusal.value.code is Code.UNPROTECTED
        assert "secret" in refusal.value.hint
    for given in ({"secret": OLD}, {"unprotected": True}):
        with ends(End(made, 50, listen=["tcp://0.0.0.0:0"], **given)) as (end,):
            assert end.endpoints[0].startswith("tcp://0.0.0.0:")
    for listen in ("tcp://localhost:0", "tcp://127.0.0.2:0"):
        with ends(End(made, 50, listen=[listen])):
            pass


# -- what was recorded --------------------------------------------------------------------


class Recorder:
    """Passes on what two ends say to each other, and keeps what the first one said."""

    def __init__(self, endpoint: str) -> None:
        self._to = split_endpoint(endpoint)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.said: list[bytes] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                there = socket.create_connection(self._to)
                for way in ((caller, there, True), (there, caller, False)):
                    threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    def _pass_on(self, src: socket.socket, dst: socket.socket, keep: bool) -> None:
        with suppress(OSError):
            while some := src.recv(1 << 16):
                if keep:
                    self.said.append(some)
                dst.sendall(some)
        for one in (src, dst):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()


def test_what_was_recorded_does_nothing_when_it_is_said_again() -> None:
    """At the same node, at another one with the secret, and after a restart."""
    source, target = End(small("dense"), 50, secret=OLD), End(small("dense"), 50, secret=OLD)
    another = End(small("dense"), 50, secret=OLD)
    with ends(source, target, another):
        source.offer("r")
        with closing(Recorder(source.endpoints[0])) as recorder:
            with Session(target.nodes[0], [recorder.endpoint]) as session:
                pull(session, target).wait(10)
            recorded = list(recorder.said)
        assert b"hello" not in b"".join(recorded), "it is not in the clear"
        assert source.released == [(0, "r", "read")]
        endpoint = source.endpoints[0]
        for node in (source.nodes[0], another.nodes[0]):
            replayed(node, recorded)
        source.nodes[0].close()
        with ends(End(small("dense"), 50, secret=OLD, listen=[endpoint])) as (restarted,):
            replayed(restarted.nodes[0], recorded)


def replayed(node: Any, recorded: list[bytes]) -> None:
    before = node.metrics.values["messages"], len(node.server.answer.sessions)
    with connected(node.endpoint) as stranger, suppress(ConnectionError):
        for some in recorded:
            stranger.sendall(some)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    assert (node.metrics.values["messages"], len(node.server.answer.sessions)) == before
