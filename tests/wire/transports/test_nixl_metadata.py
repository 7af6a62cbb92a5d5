"""What a peer says of its NIXL agent cannot take this process down, nor lock others out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire import Memory, make_transport
from kvatlas.wire.transports import nixl_agents, nixl_metadata
from kvatlas.wire.transports.errors import read_metadata
from kvatlas.wire.transports.nixl_metadata import Published
from tests.wire.forking import forked
from tests.wire.transports.conftest import skip_without
from tests.wire.transports.ends import OVER_TCP, Peer, soon
from tests.wire.transports.peer import SIZES, End

AGENT = f"kvatlas-{'0' * 32}"
KEY = bytes.fromhex("01000000000000000000ff")
MEMORY = {0: Memory(4096, 64), 1: Memory(8192, 32)}
ADDRESS = bytes.fromhex("20" + "07" * 8 + "8780")
MOST = 40
"""Changes that pass all checks and are tried with NIXL itself: each takes an agent."""
COPY = Copy(0, 0, np.array([0]), np.array([0]), np.array([1000]))


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    skip_without(OVER_TCP)
    made = Peer(OVER_TCP, {})
    yield made
    made.end()


def changed(value: bytes) -> Iterator[bytes]:
    """Every byte changed in two ways, and every beginning."""
    for place in range(len(value)):
        for flip in (1, 0x80):
            yield value[:place] + bytes([value[place] ^ flip]) + value[place + 1 :]
        yield value[:place]


def variants(metadata: bytes) -> Iterator[bytes]:
    """Metadata changed as a whole, and each of its parts changed where the rest is right."""
    yield from changed(metadata)
    good = msgspec.msgpack.decode(metadata, type=Published)
    region = good.regions[0]
    parts = [
        *(msgspec.structs.replace(good, address=bytes(some)) for some in changed(good.address)),
        *(msgspec.structs.replace(good, address=bytes([version]) + good.address[1:])
          for version in range(256)),
        *(msgspec.structs.replace(good, regions={**good.regions, 0: other})
          for other in (msgspec.structs.replace(region, key=key) for key in changed(region.key))),
        *(msgspec.structs.replace(good, regions={**good.regions, 0: other})
          for other in (msgspec.structs.replace(region, nbytes=nbytes) for nbytes in (-1, 2**63))),
    ]  # fmt: skip
    yield from map(msgspec.msgpack.encode, parts)


def passes(metadata: bytes, regions: dict[int, Memory]) -> bool:
    """Whether it is given to NIXL."""
    try:
        nixl_metadata.check(read_metadata(metadata, Published), "UCX", regions)
    except AtlasError as problem:
        assert problem.code is Code.BAD_HANDSHAKE
        return False
    return True


def connect_to_all(
    tester: Connection, metadata: bytes, regions: dict[int, Memory], settings: dict[str, str]
) -> None:
    os.environ.update(settings)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for noisy in (1, 2):
        os.dup2(nowhere, noisy)
    near = End("nixl", dict(OVER_TCP.options), SIZES)
    tried = list(variants(metadata))
    accepted = [some for some in tried if passes(some, regions)]
    refused, harmless = len(tried) - len(accepted), 0
    for some in accepted[:: -(-len(accepted) // MOST)]:
        tester.send(some)
        try:
            link = near.transport.connect(some, regions)
            handle = link.read([COPY])
            link.sever()
            handle.release()
            harmless += 1
        except AtlasError as problem:
            assert problem.code in (Code.BAD_HANDSHAKE, Code.PEER_LOST, Code.WIRE_FAILED), problem
            refused += 1
    link = near.transport.connect(metadata, regions)
    link.read([COPY]).wait(soon())
    tester.send((refused, harmless))


def test_a_changed_byte_does_not_crash_who_connects(peer: Peer) -> None:
    child, pipe = forked(connect_to_all, peer.metadata, peer.regions, dict(OVER_TCP.settings))
    last: object = None
    try:
        while not isinstance(last, tuple):
            assert pipe.poll(30), "it hangs"
            last = pipe.recv()
    except EOFError:
        pytest.fail(f"it died of {last!r}")
    finally:
        child.kill()
        child.join()
    refused, harmless = last
    assert refused > 800
    assert harmless > 0


def test_bad_metadata_under_a_good_name_does_not_lock_the_good_one_out(peer: Peer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        near = End("nixl", dict(OVER_TCP.options), SIZES)
        good = msgspec.msgpack.decode(peer.metadata, type=Published)
        other = Peer(OVER_TCP, {})
        address = msgspec.msgpack.decode(other.metadata, type=Published).address
        posing = msgspec.msgpack.encode(msgspec.structs.replace(good, address=address))
        held = near.transport.connect(posing, peer.regions)
        there = peer.fill(3)
        link = near.transport.connect(peer.metadata, peer.regions)
        link.read([COPY]).wait(soon())
        at = near.offsets[0]
        assert np.array_equal(near.bytes[at : at + 1000], there[at : at + 1000])
        held.close()
        link.read([COPY]).wait(soon())
        near.drop()
        other.end()


@pytest.mark.parametrize("memory", [{}, MEMORY, {0: MEMORY[0], 5: MEMORY[0]}])
def test_metadata_is_put_together_as_it_was(memory: dict[int, Memory]) -> None:
    regions = {
        pool: nixl_metadata.KeyedRegion(at.number, at.address, at.nbytes, KEY)
        for pool, at in memory.items()
    }
    published = Published(AGENT, "DRAM", ADDRESS, regions)
    # Another backend's: UCX gets a margin behind its addresses.
    whole = nixl_metadata.put_together(published, "TCP").replace(b"TCP", b"UCX")
    assert nixl_metadata.take_apart(whole, AGENT, "DRAM", "UCX", memory) == published
    nixl_metadata.check(published, "UCX", memory)
    for other in (whole[:-1], whole + b"|", whole.replace(b"UCX", b"UDP"), b""):
        with pytest.raises(AtlasError) as refusal:
            nixl_metadata.take_apart(other, AGENT, "DRAM", "UCX", memory)
        assert refusal.value.code is Code.WIRE_FAILED


def test_regions_are_those_of_the_handshake() -> None:
    regions = {
        pool: nixl_metadata.KeyedRegion(at.number, at.address, at.nbytes, KEY)
        for pool, at in MEMORY.items()
    }
    good = Published(AGENT, "DRAM", ADDRESS, regions)
    nixl_metadata.check(good, "UCX", MEMORY)
    bad = [
        msgspec.structs.replace(good, agent="kvatlas-me"),
        msgspec.structs.replace(good, agent=AGENT + "\n"),
        msgspec.structs.replace(good, address=b""),
        msgspec.structs.replace(good, kind="VRAM"),
        msgspec.structs.replace(good, regions={0: regions[0]}),
        msgspec.structs.replace(good, regions={**regions, 7: regions[0]}),
    ]
    handshakes = [{**MEMORY, 0: dataclasses.replace(MEMORY[0], nbytes=65)}, {0: MEMORY[0]}]
    for published, memory in [
        *((one, MEMORY) for one in bad),
        *((good, one) for one in handshakes),
    ]:
        assert not passes(msgspec.msgpack.encode(published), memory)


def test_device_and_setting_that_disagree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(OVER_TCP)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    make_transport("nixl", device="lo").close()
    with pytest.raises(AtlasError) as refusal:
        make_transport("nixl", device="eth0")
    assert refusal.value.code is Code.WIRE_FAILED


def test_devices_that_make_ucx_read_over_tcp_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It aborts a process that is read over TCP when its reader is killed."""
    skip_without(OVER_TCP)
    monkeypatch.setattr(nixl_agents, "_RDMA", Path("/nowhere"))
    for device, transports in (
        ("eth0", "all"),
        ("eth0,lo", "all"),
        ("lo", "tcp"),
        ("lo", "tcp,self"),
    ):
        monkeypatch.setenv("UCX_TLS", transports)
        with pytest.raises(AtlasError) as refusal:
            make_transport("nixl", device=device)
        assert '"tcp"' in refusal.value.hint
    make_transport("nixl", device="lo", over_tcp=True).close()
    for transports in ("tcp,cma", "^ud", "all"):
        monkeypatch.setenv("UCX_TLS", transports)
        make_transport("nixl", device="lo").close()
