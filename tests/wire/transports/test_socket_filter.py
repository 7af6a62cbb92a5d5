"""Where transports can be reached: at the address that they were given, and nowhere else."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from kvatlas.copying.memory_copy import as_bytes, memory_of
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy, route, scattered
from kvatlas.wire import Node, Session, make_transport, pools_for
from kvatlas.wire.transports.socket_filter import connected, listeners, narrow
from tests.identities import OURS
from tests.wire.forking import forked
from tests.wire.helpers import Buffers, small
from tests.wire.transports.conftest import skip_without
from tests.wire.transports.ends import KINDS, OVER_TCP, Kind, soon
from tests.wire.transports.peer import SIZES, End


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def own_address() -> str:
    """An address of this machine that is not the loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no other address")
        return str(asked.getsockname()[0])


def listen(tester: Connection, kind: Kind) -> None:
    """Be an end with a link, and tell at which ports it listens."""
    os.environ.update(kind.settings)
    near, far = (End(kind.name, dict(kind.options), SIZES) for _ in range(2))
    link = near.transport.connect(far.transport.publish(), far.regions)
    link.read([one(0, 0)]).wait(soon())
    tester.send([each.getsockname()[:2] for each in listeners().values()])
    tester.recv()
    link.close()


@pytest.mark.parametrize("kind", [*KINDS[2:], OVER_TCP], ids=lambda kind: kind.label)
def test_nothing_listens_beyond_the_loopback(kind: Kind) -> None:
    skip_without(kind)
    other = own_address()
    child, pipe = forked(listen, kind)
    assert pipe.poll(30)
    found = pipe.recv()
    assert found
    for host, port in found:
        assert host == "127.0.0.1" or kind.name == "mooncake"  # that is narrowed from outside
        assert answers("127.0.0.1", port)
        assert not answers(other, port)
        assert not answers("127.0.0.2", port)
    pipe.send("enough")
    child.join(10)
    child.kill()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_listener_is_narrowed_to_some_addresses(family: socket.AddressFamily) -> None:
    with socket.socket(family) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        asked = "127.0.0.1", "127.0.0.2", "127.0.0.3"
        assert all(answers(host, port) for host in asked)
        narrow(listener, asked[1:])
        assert [answers(host, port) for host in asked] == [False, True, True]
        if family == socket.AF_INET6 and socket.has_ipv6:
            assert not answers("::1", port)


def test_who_is_connected_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not connected([port])
        with socket.create_connection(("127.0.0.1", port)):
            assert connected([port])


def own_device() -> str:
    """A network device of this machine that is not the loopback."""
    others = sorted(name for _, name in socket.if_nameindex() if name != "lo")
    if not others:
        pytest.skip("this machine has no other network device")
    return others[0]


@pytest.mark.parametrize("kind", KINDS[2:], ids=lambda kind: kind.label)
def test_a_transport_beyond_this_host_takes_a_secret(kind: Kind) -> None:
    """A node without one is refused whichever of its ends would be open to the network.

    With one, so is a transport that does not authenticate its peers with it.
    """
    skip_without(kind)
    beyond: dict[str, Any] = {"host": own_address()}
    if kind.name == "nixl":
        beyond = {"device": own_device(), "over_tcp": True}
    made = small("dense")
    about: dict[str, Any] = {"memory": Buffers(made, 0).memory, "identity": OURS}
    secret: dict[str, Any] = {"secret": bytes(range(16))}
    trusted: dict[str, Any] = {"unprotected": True}
    transport = make_transport(kind.name, **beyond)
    for given in ({},) if kind.name == "tcp" else ({}, secret):
        with pytest.raises(AtlasError) as refusal:
            Node(made, transport=transport, **about, **given)
        assert refusal.value.code is Code.UNPROTECTED
        assert "unprotected=True" in refusal.value.hint
        assert not transport.registered, "nobody can read anything there"
    Node(made, transport=transport, **about, **(secret if kind.name == "tcp" else trusted)).close()
    if kind.name == "tcp":
        Node(made, transport=make_transport("tcp", **beyond), **about, **trusted).close()


def test_mooncake_refuses_to_be_everywhere() -> None:
    skip_without(KINDS[3])
    for host in ("0.0.0.0", "no.such.host.invalid"):  # noqa: S104
        with pytest.raises(AtlasError) as refusal:
            make_transport("mooncake", host=host)
        assert refusal.value.code is Code.WIRE_FAILED


OPTIONS: dict[str, dict[str, Any]] = {"nixl": {"device": "lo"}, "mooncake": {"host": "127.0.0.1"}}


PRIVATE = [kind for kind in KINDS if kind.name in ("memory", "shm", "tcp")]
"""Those that can keep pools from peers, and peers apart."""


@pytest.mark.parametrize("kind", PRIVATE, ids=lambda kind: kind.label)
def test_pools_that_are_not_shared_are_out_of_reach(kind: Kind) -> None:
    """They can be read into from here, and are nowhere in what peers are told."""
    far, near = End(kind.name, {"shared": "staging"}, SIZES), End(kind.name, {}, SIZES)
    segments = far.transport.lends_segments
    assert segments == (kind.name != "tcp")
    assert far.transport.reachable == ({} if segments else {-1: far.regions[-1]})
    if kind.name != "shm":  # these regions are not in shared memory
        assert near.transport.reachable == near.regions
    link = near.transport.connect(far.transport.publish(), far.transport.reachable)
    assert [link.reaches(pool) for pool in (0, 1, -1)] == [False, False, not segments]
    far.fill(1)
    for pool in (0, 1, -1) if segments else (0, 1):
        with pytest.raises(AtlasError) as refusal:
            link.read([one(pool, 0)])
        assert refusal.value.code is Code.OUT_OF_BOUNDS
    back = far.transport.connect(near.transport.publish(), near.transport.reachable)
    near.fill(2)
    if back.reaches(0):
        back.read([one(0, 0)]).wait(soon())
        there, here = far.offsets[0], near.offsets[0]
        assert np.array_equal(far.bytes[there : there + 64], near.bytes[here : here + 64])
    with pytest.raises(AtlasError) as refusal:
        _reach(near, far)
    assert refusal.value.code in (Code.BAD_HANDSHAKE, Code.WIRE_FAILED)
    near.drop()
    far.drop()


@pytest.mark.parametrize("kind", [kind for kind in PRIVATE if kind.name != "tcp"], ids=str)
def test_memory_for_one_peer_is_read_by_that_peer_alone(kind: Kind) -> None:
    """It cannot be written where the system allows that, and reads as zeros once it has ended."""
    far, near = End(kind.name, {"shared": "staging"}, SIZES), End(kind.name, {}, SIZES)
    mine, other = far.transport.lend_to_one(8192), far.transport.lend_to_one(8192)
    assert not mine.view.any()
    mine.view[:], other.view[:] = 7, 9
    link = near.transport.connect(mine.metadata, {-1: mine.region})
    link.read([one(-1, 0)]).wait(soon())
    here = near.offsets[0]
    assert (near.bytes[here : here + 64] == 7).all()
    if kind.name == "shm":
        seen: Any = link
        with pytest.raises(ValueError, match="read-only"):
            seen.mapped[-1][:] = 9
        assert (mine.view == 7).all()
    far_off = Copy(-1, 0, np.array([8192]), np.array([0]), np.array([64]))
    with pytest.raises(AtlasError) as refusal:
        link.read([far_off])
    assert refusal.value.code is Code.OUT_OF_BOUNDS
    mapped = getattr(link, "mapped", {}).get(-1)
    mine.end()
    assert mapped is None or not mapped.any()
    with pytest.raises(AtlasError) as refusal:
        link.read([one(-1, 0)])
    assert refusal.value.code is Code.PEER_LOST
    with pytest.raises(AtlasError) as refusal:
        near.transport.connect(mine.metadata, {-1: mine.region})
    assert refusal.value.code is Code.PEER_LOST
    assert (other.view == 9).all()
    other.end()
    near.drop()
    far.drop()


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_transports_that_cannot_keep_peers_apart_say_so(name: str) -> None:
    """Everybody who reaches their ports, or has their keys, reads all registered memory."""
    with pytest.raises(AtlasError) as refusal:
        make_transport(name, shared="staging")
    assert refusal.value.code is Code.WIRE_FAILED
    assert refusal.value.problem == f"The transport '{name}' cannot keep peers apart"


@pytest.mark.parametrize("kind", PRIVATE, ids=lambda kind: kind.label)
def test_a_node_that_shares_staging_alone_is_read_to_the_byte(kind: Kind) -> None:
    """Nobody reaches its pools, and what is offered arrives all the same, and is released."""
    skip_without(kind)
    plans = small("dense"), small("dense", layout="BHLNC")
    tables = [scattered(made, 50) for made in plans]
    transports = [make_transport(kind.name, shared=shared) for shared in ("staging", "all")]
    pools = [pools_for(*end) for end in zip(plans, (0, 0), transports, strict=True)]
    pools[0][0][:] = np.random.default_rng(3).integers(0, 256, pools[0][0].size, dtype=np.uint8)
    right = pools[1][0].copy()
    (copy,) = (
        route(*plans)
        .bind(
            source_rank=0,
            destination_rank=0,
            source_blocks=tables[0],
            destination_blocks=tables[1],
            tokens=50,
        )
        .copies
    )
    for a, b, n in zip(copy.source, copy.destination, copy.length, strict=True):
        right[b : b + n] = pools[0][0][a : a + n]
    source, target = (
        Node(made, memory=memory_of(own), transport=transport, identity=OURS, piece=4096)
        for made, own, transport in zip(plans, pools, transports, strict=True)
    )
    why: list[tuple[str, str]] = []
    with source, target, Session(target, [source.endpoint]) as session:
        assert not any(map(source.transport.shares, pools[0]))
        source.offer("r", tables[0], 50, released=lambda *said: why.append(said))
        moved = session.pull("r", destination_blocks=tables[1], tokens=50).wait(20)
        assert moved.ready
        assert np.array_equal(pools[1][0], right)
        assert why == [("r", "read")]


def _reach(near: End, far: End) -> None:
    """Say that the pools are shared, and read from one."""
    link = near.transport.connect(far.transport.publish(), far.regions)
    link.read([one(0, 0)]).wait(soon())


def one(source_pool: int, destination_pool: int) -> Copy:
    return Copy(source_pool, destination_pool, np.array([0]), np.array([0]), np.array([64]))


@pytest.mark.parametrize("kind", [KINDS[0], *KINDS[2:]], ids=lambda kind: kind.label)
def test_an_empty_region_is_registered_as_any_other(kind: Kind) -> None:
    skip_without(kind)
    ends = [make_transport(kind.name) for _ in range(2)]
    for end in ends:
        nothing, pool = end.allocate(0), end.allocate(64)
        pool[:] = 3 if end is ends[0] else 0
        end.register(memory_of({0: pool, -1: nothing}))
    link = ends[1].connect(ends[0].publish(), ends[0].memory)
    link.read([one(0, 0)]).wait(soon())
    assert bytes(as_bytes(ends[1].memory[0])) == b"\3" * 64
    for end in ends:
        end.close()
