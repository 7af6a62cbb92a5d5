"""tcp's data port: under the node's TLS, for holders of a lease, for the bytes of the lease."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import closing, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas.copying import Memory
from kvatlas.copying.memory import STAGING
from kvatlas.errors import AtlasError, Code
from kvatlas.wire import PeerAccess, Session, protocol
from kvatlas.wire.byte_ranges import source_ranges
from kvatlas.wire.leases import Leases, session_id
from kvatlas.wire.security import Security
from kvatlas.wire.staging import Loan
from kvatlas.wire.transports.access import Access, AskedRead
from kvatlas.wire.transports.tcp import TcpTransport
from kvatlas.wire.transports.tcp_server import GRANTED, QUESTION, REFUSED
from tests.attack.plans import source_plan, target_plan
from tests.profiles import DEEP
from tests.wire.data_plane import (
    OTHER,
    SECRET,
    TOKENS,
    Proxy,
    ask,
    assert_arrived,
    code_of_read,
    connection_of,
    dial,
    one_run,
    open_lease,
    pair,
    pull,
    ranks,
)


@pytest.mark.parametrize(
    ("how", "secret"),
    [
        pytest.param(how, secret, id=f"{how}-{name}")
        for how in ("direct", "staged", "coalesced", "auto")
        for name, secret in (("one", SECRET), ("two", (OTHER, SECRET)), ("none", None))
        if DEEP or name == "one" or how == "direct"
    ],
)
def test_every_way_moves_every_byte(how: Any, secret: Any) -> None:
    with pair(secret=secret) as (there, here):
        there.offer("r")
        with Session(here.node, [there.node.endpoint]) as session:
            pull(session, here, how=how, checksums=True)
            link: Any = session.link(0)
            with closing(link.take()) as connection:
                assert isinstance(connection, ssl.SSLSocket) == (secret is not None)
        assert_arrived(here)
        assert there.released == [("r", "read")]


@pytest.mark.parametrize("how", ["direct", "staged"])
def test_a_push_is_read_with_the_lease_of_its_destination(how: Any) -> None:
    with pair() as (there, here):
        expected = here.node.expect("r", here.blocks, TOKENS, source=there.plan, pushers=["node-1"])
        with Session(there.node, [here.node.endpoint]) as session:
            session.push("r", source_blocks=there.blocks, tokens=TOKENS, how=how).wait(20)
        assert expected.ready.is_set()
        assert_arrived(here)
        assert not there.node.offers, "nothing of it can be read afterwards"
        assert not there.node.leases


def test_secrets_rotate_on_the_data_port_too() -> None:
    both = (OTHER, SECRET)
    for one, two in ((both, SECRET), (SECRET, both), (both, OTHER), (OTHER, both)):
        with (
            ranks((source_plan(TOKENS), 1), secret=one) as (there,),
            ranks((target_plan(TOKENS), 7), secret=two) as (here,),
        ):
            there.offer("r")
            with Session(here.node, [there.node.endpoint]) as session:
                pull(session, here)
            assert_arrived(here)


def test_a_peer_of_version_3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data connections have neither TLS nor leases."""
    with pair() as (there, here):
        hello: Any = there.node.hello

        def older(**about: Any) -> Any:
            return msgspec.structs.replace(hello(**about), version=3, oldest=2)

        monkeypatch.setattr(there.node, "hello", older)
        with pytest.raises(AtlasError) as refusal:
            Session(here.node, [there.node.endpoint])
        assert refusal.value.code is Code.UNLIKE_VERSIONS


# -- attackers on the network ---------------------------------------------------------------


def test_a_process_without_the_secret_reads_nothing() -> None:
    """It has the token, the id of a session and the key of a lease: all but the secret."""
    with pair() as (there, here):
        there.offer("r")
        with Session(here.node, [there.node.endpoint]) as session:
            lease = open_lease(session, here)
            access = Access(session_id(connection_of(session).session))
            for security in (Security(), Security(OTHER)):
                pool = np.zeros(4096, np.uint8)
                with closing(TcpTransport()) as stranger:
                    stranger.register({0: Memory(pool.ctypes.data, pool.nbytes, owner=pool)})
                    stranger.security = security
                    told = there.transport.publish(), there.transport.reachable
                    with pytest.raises(AtlasError) as refusal:
                        stranger.connect(*told, access).read([one_run(0, 0)], lease=lease)
                assert refusal.value.code in (Code.BAD_SIGNATURE, Code.PEER_LOST)
                assert not pool.any()
            ask(session, protocol.Close, lease=lease, complete=False)
            pull(session, here)
        assert_arrived(here)


def test_bytes_that_are_changed_on_their_way_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [0]

    def change(some: bytes) -> bytes:
        passed[0] += len(some)
        if passed[0] < 1 << 20:
            return some
        return some[:-1] + bytes([some[-1] ^ 1])

    with pair() as (there, here), closing(Proxy(there, change, monkeypatch)) as proxy:
        there.offer("r")
        with Session(here.node, [there.node.endpoint]) as session:
            with pytest.raises(AtlasError) as refusal:
                pull(session, here)
            assert refusal.value.code is Code.CHECKSUM
        content = there.pools[0][: 1 << 16].tobytes()
        assert content[:64] not in bytes(proxy.passed), "and nothing is in the clear"


# -- peers with the secret ------------------------------------------------------------------


def test_a_peer_reads_what_its_lease_covers_and_nothing_else() -> None:
    with pair() as (there, here):
        there.offer("r")
        with Session(here.node, [there.node.endpoint]) as session:
            lease = open_lease(session, here)
            granted = source_ranges(there.node.leases._open[lease].stream)[0]
            inside, outside = int(granted.starts[0]), int(granted.stops[0])
            assert code_of_read(session, one_run(0, inside), lease) is None
            assert np.array_equal(here.pools[0][:64], there.pools[0][inside : inside + 64])
            before = here.pools[0].copy()
            for start, length in ((outside, 64), (outside - 1, 2), (inside, outside - inside + 1)):
                read = one_run(0, start, length)
                assert code_of_read(session, read, lease) is Code.FORBIDDEN
            for key in (b"", bytes(16), lease[::-1]):
                assert code_of_read(session, one_run(0, inside), key) is Code.LEASE_EXPIRED
            ask(session, protocol.Close, lease=lease, complete=False)
            assert code_of_read(session, one_run(0, inside), lease) is Code.LEASE_EXPIRED
            assert np.array_equal(here.pools[0], before), "nothing has arrived"
            pull(session, here)


def test_a_reader_that_is_not_named_gets_nothing_of_anothers_request() -> None:
    """Neither its blocks nor the buffers it is staged in, also with the keys of the other."""
    plans = (source_plan(TOKENS), 1), (target_plan(TOKENS), 7), (target_plan(TOKENS), 8)
    with ranks(*plans) as (there, named, other):
        there.offer("secret", readers=["node-7"])
        endpoint = [there.node.endpoint]
        with Session(named.node, endpoint) as session, Session(other.node, endpoint) as stranger:
            lease = open_lease(session, named, "secret")
            lent = ask(session, protocol.Borrow, lease=lease, buffers=1, seconds=1.0).buffers[0]
            piece = there.node.staging.piece
            filled = {"start": 0, "stop": piece, "buffer": lent}
            ask(session, protocol.Gather, lease=lease, **filled)
            with pytest.raises(AtlasError) as refusal:
                open_lease(stranger, other, "secret")
            assert refusal.value.code is Code.UNKNOWN_REQUEST
            before = other.pools[0].copy()
            for copy in (one_run(STAGING, lent * piece), one_run(0, 0)):
                assert code_of_read(stranger, copy, lease) is Code.LEASE_EXPIRED
            there.offer("open")
            own = open_lease(stranger, other, "open")
            mine = ask(stranger, protocol.Borrow, lease=own, buffers=1, seconds=1.0).buffers[0]
            assert mine != lent
            staged = one_run(STAGING, lent * piece)
            assert code_of_read(stranger, staged, own) is Code.FORBIDDEN
            assert np.array_equal(other.pools[0], before)
            assert code_of_read(stranger, one_run(STAGING, mine * piece), own) is None
            assert code_of_read(session, staged, lease) is None


def test_a_lease_that_ends_stops_what_is_being_sent() -> None:
    """A reader that takes its time gets the bytes of the request, and none that come after."""
    with pair() as (there, here):
        there.offer("r")
        with Session(here.node, [there.node.endpoint]) as session:
            lease = open_lease(session, here)
            granted = source_ranges(there.node.leases._open[lease].stream)[0]
            starts, lengths = granted.starts, granted.stops - granted.starts
            old = b"".join(
                there.pools[0][a:b].tobytes()
                for a, b in zip(granted.starts, granted.stops, strict=True)
            )
            with dial(there, connection_of(session).session, Security(SECRET), room=4096) as reader:
                head = QUESTION.pack(0, len(starts), lease)
                reader.sendall(head + starts.tobytes() + lengths.tobytes())
                assert reader.recv(1) == GRANTED
                begun = time.monotonic()
                there.node.withdraw("r")
                assert time.monotonic() - begun < 5, "a reader that stalls holds nobody up"
                there.fill(99)
                got = bytearray()
                with suppress(OSError):
                    while some := reader.recv(1 << 16):
                        got += some
            assert bytes(got) == old[: len(got)]


def test_a_held_lease_ends_only_after_its_last_byte_is_sent() -> None:
    """`drop` waits for a send in progress, and ends connections that do not take their bytes."""
    near, far = socket.socketpair()
    leases = Leases(lambda _: None)
    about: Any = {"request": "r", "complete": True, "stream": None, "entries": 0}
    lease = leases.grant(60.0, session=bytes(16), loan=Loan(None, 4096, (0,)), **about)
    at = np.array([0]), np.array([4096])
    asked = AskedRead(session_id(bytes(16)), None, b"", STAGING, *at, lambda: near.shutdown(2))
    sent: list[str] = []

    def send() -> None:
        with lease.reading(asked), suppress(OSError):
            while True:
                near.sendall(bytes(1 << 16))
        sent.append("over")

    thread = threading.Thread(target=send)
    thread.start()
    while not lease._sends:
        time.sleep(0.001)
    leases.drop(lease)
    assert not lease._sends
    thread.join(10)
    assert sent == ["over"]
    with pytest.raises(AtlasError) as refusal, lease.reading(asked):
        pass
    assert refusal.value.code is Code.LEASE_EXPIRED
    far.close()
    near.close()


def test_a_data_connection_proves_the_name_of_its_session() -> None:
    """A peer with its own key reads nothing with the session and the lease of another."""
    source, target = source_plan(TOKENS), target_plan(TOKENS)
    peers = {"node-7": PeerAccess(SECRET), "node-8": PeerAccess(OTHER)}
    with (
        ranks((source, 1), secret=None, peers=peers) as (there,),
        ranks((target, 7), secret=None, peers={"node-1": PeerAccess(SECRET)}) as (here,),
    ):
        there.offer("r", readers=["node-7"])
        with Session(here.node, [there.node.endpoint]) as session:
            key, lease = connection_of(session).session, open_lease(session, here)
            granted = source_ranges(there.node.leases._open[lease].stream)[0]
            run = granted.starts[:1].tobytes() + np.array([64]).tobytes()
            for secret, said in ((OTHER, REFUSED), (SECRET, GRANTED)):
                with dial(there, key, Security(secret)) as connection:
                    connection.sendall(QUESTION.pack(0, 1, lease) + run)
                    assert connection.recv(1) == said
            ask(session, protocol.Close, lease=lease, complete=False)
            pull(session, here)
        assert_arrived(here)
