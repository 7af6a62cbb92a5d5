"""`shared="staging"`: a peer reads and writes no byte that is not its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.copying.memory import STAGING, Memory
from kvatlas.routing import Copy, route
from kvatlas.wire import Link, Session, make_transport
from kvatlas.wire.transports.shm import ShmTransport
from tests.wire.child import Rank, contents
from tests.wire.helpers import small, until

SOURCE = small("dense", 512, layout="LBNHC", memory="4MiB")
TARGET = small("dense", 512, layout="BHLNC", block_size=32, memory="4MiB")
SEGMENTS = ["memory", "shm"]
"""Transports that give each peer its own memory."""
CHUNK = 16
TOKENS = 500


class Peers:
    """A source that shares staging alone, its reader, and a peer that it does not offer to."""

    def __init__(self, stack: ExitStack, wire: str) -> None:
        options = {"shared": "staging"}
        self.source = Rank(SOURCE, wire, 1, options=options, name="source")
        self.reader = Rank(TARGET, wire, 2, options=options, name="reader")
        self.snoop = Rank(TARGET, wire, 3, name="snoop")
        for rank in (self.source, self.reader, self.snoop):
            stack.callback(rank.close)
        self.secret = contents(SOURCE, 1)[0]
        self.rows = {
            bytes(row)
            for row in self.secret[: len(self.secret) // CHUNK * CHUNK].reshape(-1, CHUNK)
        }
        endpoints = [self.source.node.endpoint]
        self.reading = stack.enter_context(Session(self.reader.node, endpoints))
        self.snooping = stack.enter_context(Session(self.snoop.node, endpoints))

    def pull(self, session: Session, rank: Rank, request: str, **about: Any) -> None:
        session.pull(request, destination_blocks=rank.blocks, tokens=TOKENS, **about).wait(20)

    def leaked(self, link: Link) -> int:
        """Bytes of the source that a peer finds in all regions that it can reach over a link."""
        near, found = self.snoop.node.staging, 0
        for pool, region in link.peer_memory.items():
            for start in range(0, region.nbytes - near.piece + 1, near.piece):
                try:
                    link.read([run(pool, start, near.piece)]).wait(float("inf"))
                except AtlasError as refusal:  # tcp serves no byte without a lease
                    assert refusal.code is Code.LEASE_EXPIRED
                    continue
                rows = near.view(0, near.piece).reshape(-1, CHUNK)
                found += CHUNK * sum(bytes(row) in self.rows for row in rows)
        return found


def run(pool: int, start: int, nbytes: int) -> Copy:
    return Copy(pool, STAGING, np.array([start]), np.array([0]), np.array([nbytes]))


@pytest.fixture
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(stack, request.param)


@pytest.mark.parametrize("peers", [*SEGMENTS, "tcp"], indirect=True)
def test_a_finished_request_is_read_by_no_other_peer(peers: Peers) -> None:
    """A peer that `readers=` excludes read a fifth of it from the staging memory."""
    peers.source.offer("secret", readers=["reader"])
    with pytest.raises(AtlasError) as refusal:
        peers.pull(peers.snooping, peers.snoop, "secret")
    assert refusal.value.code is Code.UNKNOWN_REQUEST
    peers.pull(peers.reading, peers.reader, "secret")
    assert peers.leaked(peers.snooping.link(0)) == 0


@pytest.mark.parametrize("peers", SEGMENTS, indirect=True)
def test_memory_that_a_peer_borrows_has_no_byte_of_another(peers: Peers) -> None:
    """Nor can it reach memory of another, or the source's own."""
    peers.source.offer("secret", readers=["reader"])
    peers.pull(peers.reading, peers.reader, "secret")
    public = {0: np.zeros_like(peers.source.blocks[0])}
    peers.source.fill(1)
    for pool in peers.source.pools.values():
        pool[:] = 0
    peers.source.offer("public", blocks=public, tokens=16)
    moved = peers.snooping.pull(
        "public", destination_blocks={0: peers.snoop.blocks[0][:1]}, tokens=16
    )
    moved.wait(20)
    connection = peers.snooping._connections.find(peers.source.node.endpoint)
    assert connection is not None
    assert connection._lent
    assert [peers.leaked(link) for link in connection._lent.values()] == [0]
    for link in (connection.link, *connection._lent.values()):
        for start in (0, 1 << 20):
            beyond = Copy(0, STAGING, np.array([start]), np.array([0]), np.array([64]))
            with pytest.raises(AtlasError):
                link.read([beyond])


@pytest.mark.parametrize("peers", ["shm"], indirect=True)
def test_no_peer_writes_to_what_another_reads(peers: Peers) -> None:
    """One that wrote to the staging memory corrupted another's pull, which was ready."""
    stop, refused = threading.Event(), list[str]()
    peers.source.offer("public", tokens=16)
    mine = {0: peers.snoop.blocks[0][:1]}
    peers.snooping.pull("public", destination_blocks=mine, tokens=16).wait(20)
    connection = peers.snooping._connections.find(peers.source.node.endpoint)
    assert connection is not None
    links: list[Any] = [connection.link, *connection._lent.values()]
    assert any(link.mapped for link in links)

    def scribble() -> None:
        while not stop.is_set():
            for view in [view for link in links for view in link.mapped.values()]:
                try:
                    view[:] = 0x5A
                except ValueError as error:
                    refused.append(str(error))

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for turn in range(5):
            peers.source.offer(f"r{turn}", readers=["reader"])
            peers.pull(peers.reading, peers.reader, f"r{turn}", checksums=True)
    finally:
        until(lambda: bool(refused), 10)
        stop.set()
        thread.join()
    assert set(refused) == {"assignment destination is read-only"}


@pytest.mark.parametrize("peers", SEGMENTS, indirect=True)
def test_segments_end_with_their_sessions(peers: Peers) -> None:
    segments = peers.source.node.lending.buffers
    peers.source.offer("r0")
    peers.source.offer("r1")
    peers.pull(peers.reading, peers.reader, "r0")
    peers.pull(peers.snooping, peers.snoop, "r1")
    assert segments.exist == 2  # type: ignore[union-attr]  # all that there may be
    peers.reading.close()
    peers.snooping.close()
    peers.reader.node.channels.close()
    peers.snoop.node.channels.close()
    until(lambda: segments.exist == 0, 10)  # type: ignore[union-attr]


@pytest.mark.parametrize("peers", SEGMENTS, indirect=True)
def test_a_push_from_private_staging_arrives(peers: Peers) -> None:
    """The destination reads it from staging memory that was lent to it alone."""
    target = peers.snoop
    with Session(peers.source.node, [target.node.endpoint]) as session:
        about: Any = {"source": SOURCE, "pushers": ["source"]}
        expected = target.node.expect("r", target.blocks, TOKENS, **about)
        session.push("r", source_blocks=peers.source.blocks, tokens=TOKENS).wait(20)
        assert expected.ready.is_set()
        target.node.forget("r")
    until(target.idle)


@pytest.mark.parametrize("wire", [*SEGMENTS, "tcp"])
@pytest.mark.parametrize("shared", ["all", "staging"])
def test_no_padding_leaves_private_pools(wire: str, shared: str) -> None:
    """Padding may hold bytes of earlier requests. It is copied from shared pools alone."""
    made = small("compressed", 200, memory="32MiB")
    with ExitStack() as stack:
        source = Rank(made, wire, 1, 200, options={"shared": shared}, name="source")
        stack.callback(source.close)
        reader = Rank(made, wire, 2, 200, name="reader")
        stack.callback(reader.close)
        for pool in source.pools.values():
            pool[:] = 0x5A
        for pool in reader.pools.values():
            pool[:] = 0
        session = stack.enter_context(Session(reader.node, [source.node.endpoint]))
        source.offer("r")
        session.pull("r", destination_blocks=reader.blocks, tokens=200).wait(20)
        tables: Any = {"source_blocks": source.blocks, "destination_blocks": reader.blocks}
        whole = route(made, made, padding=False).bind(
            source_rank=0, destination_rank=0, tokens=200, **tables
        )
        arrived = sum(int(pool.astype(bool).sum()) for pool in reader.pools.values())
    assert (arrived > whole.nbytes) is (shared == "all")
    assert arrived >= whole.nbytes


def test_a_segment_cannot_be_mapped_for_writing() -> None:
    """Its pages are freed at its end, although a peer has it mapped."""
    transport, peer = ShmTransport(shared="staging"), ShmTransport()
    lent = transport.lend_to_one(1 << 20)
    lent.view[:] = 7
    link: Any = peer.connect(lent.metadata, {STAGING: lent.region})
    mapped = link.mapped[STAGING]
    assert (mapped == 7).all()
    assert not mapped.flags.writeable
    descriptor = lent.region.owner.descriptor  # type: ignore[attr-defined]
    assert os.fstat(descriptor).st_blocks * 512 >= 1 << 20
    lent.end()
    assert os.fstat(descriptor).st_blocks == 0
    assert not mapped.any()
    peer.close()
    transport.close()


def test_an_own_staging_memory_is_in_no_hello() -> None:
    for wire in SEGMENTS:
        rank = Rank(SOURCE, wire, 1, options={"shared": "staging"})
        (told,) = rank.node.hello(with_plan=False).memory
        assert told.memory == Memory(0, 0)
        assert rank.transport.reachable == {}
        rank.close()
    assert make_transport("tcp", shared="staging").separation == "leases"
