"""Caches of two processes in a GPU's memory: what arrives, over every wire, and what is refused."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from kvatlas import AtlasError, Code
from kvatlas.planning import Plan, plan
from kvatlas.wire import Memory, Session, Transfer, make_transport
from tests.gpu.peer import Json, Peer, contents_of, move_of, until
from tests.gpu.ranks import GpuRanks
from tests.kernels.triton.cases import ORDERS
from tests.planning.models import SMALL
from tests.routing import oracle

TOKENS = 61
BOUNCED = ["shm", *(["mooncake"] if find_spec("mooncake") else [])]
"""Those that reach a GPU by way of the host; Mooncake where it is installed."""
WIRES = ["cuda", "nixl", *BOUNCED]
"""All of them between pools on a GPU."""

UNLIKE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", {"layout": "LBNHC", "tp": 2}, {"layout": "BHLNC"}),
    ("dense", {"layout": "BLHNC"}, {"layout": "LBNHC", "tp": 4}),
    ("dense", {"layout": "LBHNC", "block_size": 16}, {"layout": "LBNHC", "block_size": 32}),
    ("dense", {"layout": "BLNHC", "block_size": 48}, {"layout": "LHBNC", "block_size": 16}),
    ("dense", {"layout": "LBNHC", "pp": 2}, {"layout": "BHLNC", "tp": 2, "block_size": 32}),
    ("sliding", {"layout": "LBNHC"}, {"layout": "BLHNC", "block_size": 32}),
    ("delta hybrid", {"layout": "LBNHC", "tp": 2}, {"layout": "BLNHC"}),
    ("mamba hybrid", {}, {"tp": 2}),
    ("latent", {"block_size": 16}, {"block_size": 32}),
    ("latent hybrid", {}, {}),
]
"""Slices of tp, blocks of unlike size, hybrids and latents."""


def small(name: str, **given: Any) -> Plan:
    about: dict[str, Any] = {"memory": "2MiB", "max_len": 64, "in_flight": 0}
    return plan(SMALL[name], **about | given)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.fixture
def own_peer() -> Iterator[Peer]:
    """A process to be killed."""
    made = Peer()
    yield made
    made.kill()


@contextmanager
def ranks_of(made: Plan, transport: str, move: Any, **given: Any) -> Iterator[tuple[Any, Any]]:
    """Destinations, and what is in them before: noise."""
    rng = np.random.default_rng(9)
    poison = {rank: oracle.Memory(made, rank, rng) for rank in range(made.ranks)}
    contents = {rank: memory.pools for rank, memory in poison.items()}
    ranks = GpuRanks(made, transport, contents, move.tokens[1], **given)
    try:
        yield ranks, poison
    finally:
        ranks.close()


def right_of(move: Any, poison: Any) -> Any:
    """What every destination must hold afterwards, found without any route."""
    return {rank: oracle.expected(move, rank, memory)[0] for rank, memory in poison.items()}


def pull(node: Any, endpoints: list[str], blocks: Any, tokens: int, **about: Any) -> Transfer:
    with Session(node, endpoints) as session:
        return session.pull("r", destination_blocks=blocks, tokens=tokens, **about).wait(30)


def check(peer: Peer, wire: str, src: Plan, dst: Plan, **about: Any) -> Any:
    """Every destination rank pulls; every byte is right, and no other has changed."""
    move = move_of(src, dst, TOKENS)
    served = peer.serve(src, dst, wire, TOKENS)
    with ranks_of(dst, wire, move) as (ranks, poison):
        peer.ask("offer", request="r", busy=about.pop("busy", 0))
        for node in ranks.nodes:
            pull(node, served["endpoints"], ranks.blocks, TOKENS, **about)
        assert ranks.wrong(right_of(move, poison)) == 0, (wire, src, dst)
        metrics = [node.metrics for node in ranks.nodes]
    assert peer.ask("wrong")["wrong"] == 0
    peer.ask("close")
    return metrics


@pytest.mark.parametrize("wire", ["cuda", "shm"])
def test_a_peer_reads_staging_memory_that_is_its_alone(peer: Peer, wire: str) -> None:
    """The pools and the node's own staging stay private, and every byte arrives."""
    src, dst = small("dense", layout="LBNHC", tp=2), small("dense", layout="BHLNC")
    move, private = move_of(src, dst, TOKENS), {"shared": "staging"}
    served = peer.serve(src, dst, wire, TOKENS, options=private)
    with ranks_of(dst, wire, move, options=private) as (ranks, poison):
        (node,) = ranks.nodes
        with Session(node, served["endpoints"]) as session:
            for turn in range(3):
                peer.ask("offer", request=f"r{turn}")
                about = {"destination_blocks": ranks.blocks, "tokens": TOKENS}
                session.pull(f"r{turn}", **about).wait(30)
            assert not any(session.link(rank).peer_memory for rank in range(src.ranks))
        assert ranks.wrong(right_of(move, poison)) == 0
    assert peer.ask("wrong")["wrong"] == 0
    peer.ask("close")


@pytest.mark.parametrize("wire", WIRES)
def test_every_pair_of_orders(peer: Peer, wire: str) -> None:
    for source in ORDERS:
        for target in ORDERS:
            check(peer, wire, small("dense", layout=source), small("dense", layout=target))
            there = small("dense", layout=target, block_size=32)
            check(peer, wire, small("dense", layout=source, tp=2), there)


@pytest.mark.parametrize("wire", WIRES)
def test_slices_block_sizes_and_kinds(peer: Peer, wire: str) -> None:
    for name, source, target in UNLIKE:
        check(peer, wire, small(name, **source), small(name, **target))


def test_requests_of_one_shape_again_and_again(peer: Peer) -> None:
    """The first are read as any, the others by launches that were prepared for them."""
    for name, source, target in UNLIKE:
        src, dst = small(name, **source), small(name, **target)
        move = move_of(src, dst, TOKENS)
        served = peer.serve(src, dst, "cuda", TOKENS)
        with ranks_of(dst, "cuda", move) as (ranks, poison):
            for node in ranks.nodes:
                with Session(node, served["endpoints"]) as session:
                    for turn in range(6):
                        request = f"{node.rank} {turn}"
                        peer.ask("offer", request=request)
                        for index, pool in ranks.pools(node.rank).items():
                            pool.copy_(torch.from_numpy(poison[node.rank].pools[index]))
                        transfer = session.pull(
                            request, destination_blocks=ranks.blocks, tokens=TOKENS
                        )
                        assert transfer.wait(30).ready
                        time.sleep(0.03)  # what is prepared is so beside everything else
                    found = [session._connections.find(one) for one in served["endpoints"]]
                    warm = [any(one.shapes._kept.values()) for one in found if one is not None]
                    assert any(warm), (name, source, target)
            assert ranks.wrong(right_of(move, poison)) == 0, (name, source, target)
        peer.ask("close")


@pytest.mark.parametrize("wire", WIRES)
def test_staged_and_checked(peer: Peer, wire: str) -> None:
    """Gathered and scattered by kernels; said in the metrics which way that went."""
    src, dst = small("dense", layout="LBNHC"), small("dense", layout="BHLNC", block_size=32)
    (metrics,) = check(peer, wire, src, dst, how="staged", checksums=True)
    bounced, staged = metrics.values["host_bounce_bytes"], metrics.values["gpu_staged_bytes"]
    assert (bounced > 0, staged > 0) == ((True, False) if wire in BOUNCED else (False, True))


@pytest.mark.parametrize("wire", WIRES)
def test_what_the_producer_has_launched_is_waited_for(peer: Peer, wire: str) -> None:
    """The offer is made at once; its bytes are written a second later, by its stream."""
    src, dst = small("dense", layout="LBNHC"), small("dense", layout="BLHNC")
    check(peer, wire, src, dst, busy=1000)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("streamed", [True, False])
def test_layers_that_are_written_while_others_are_read(
    peer: Peer, wire: str, streamed: bool
) -> None:
    src, dst = small("dense", layout="LBNHC"), small("dense", layout="BHLNC")
    move = move_of(src, dst, TOKENS)
    served = peer.serve(src, dst, wire, TOKENS)
    with ranks_of(dst, wire, move) as (ranks, poison):
        peer.ask("offer_layers", request="r")
        about: dict[str, Any] = {"destination_blocks": ranks.blocks, "tokens": TOKENS}
        with Session(ranks.nodes[0], served["endpoints"]) as session:
            transfer = session.pull("r", **about, streamed=streamed).wait(30)
        assert ranks.wrong(right_of(move, poison)) == 0
        assert not streamed or transfer.layers == set(dst.layers)
    peer.ask("close")


@pytest.mark.parametrize("wire", WIRES)
def test_pushes(peer: Peer, wire: str) -> None:
    src, dst = small("dense", layout="LBNHC"), small("dense", layout="BHLNC", block_size=32)
    move = move_of(src, dst, TOKENS)
    peer.serve(src, dst, wire, TOKENS)
    with ranks_of(dst, wire, move) as (ranks, poison):
        (node,) = ranks.nodes
        expected = node.expect("r", ranks.blocks, TOKENS, source=src, pushers=["ranks"])
        assert peer.ask("push", request="r", endpoints=ranks.endpoints) == {"code": "ready"}
        assert expected.ready.is_set()
        assert ranks.wrong(right_of(move, poison)) == 0
    peer.ask("close")


@pytest.mark.parametrize("wire", ["nixl", *BOUNCED])
def test_unlike_devices(peer: Peer, wire: str) -> None:
    """A source on the GPU, a destination on the host."""
    src, dst = small("dense", layout="LBNHC"), small("dense", layout="BHLNC")
    move = move_of(src, dst, TOKENS)
    served = peer.serve(src, dst, wire, TOKENS)
    with ranks_of(dst, wire, move, device="cpu", options={}) as (ranks, poison):
        peer.ask("offer", request="r")
        pull(ranks.nodes[0], served["endpoints"], ranks.blocks, TOKENS)
        assert ranks.wrong(right_of(move, poison)) == 0
    peer.ask("close")


def failing(peer: Peer, served: Json, strike: Any, **offer: Any) -> Code:
    """A pull that waits for a busy producer, which is struck meanwhile: how it fails."""
    src, dst = small("dense", layout="LBNHC"), small("dense", layout="BHLNC")
    with ranks_of(dst, "cuda", move_of(src, dst, TOKENS)) as (ranks, _):
        peer.ask("offer", request="r", busy=2000, **offer)
        with Session(ranks.nodes[0], served["endpoints"]) as session:
            transfer = session.pull("r", destination_blocks=ranks.blocks, tokens=TOKENS, timeout=8)
            time.sleep(0.3)
            strike()
            with pytest.raises(AtlasError) as refused:
                transfer.wait(20)
            assert not transfer.ready
            assert until(lambda: transfer.released), "the copy is never seen to end"
        assert int(torch.ones(4, device="cuda").sum()) == 4, "the GPU is lost"
    code: Code = refused.value.code
    return code


def served_for_failures(peer: Peer) -> Json:
    src, dst = small("dense", layout="LBNHC"), small("dense", layout="BHLNC")
    return peer.serve(src, dst, "cuda", TOKENS)


def test_a_lease_that_expires_under_the_copy(peer: Peer) -> None:
    code = failing(peer, served_for_failures(peer), lambda: None, timeout=0.5)
    assert code in (Code.LEASE_EXPIRED, Code.UNKNOWN_REQUEST)
    peer.ask("close")


def test_an_offer_that_is_withdrawn_under_the_copy(peer: Peer) -> None:
    strike = lambda: peer.ask("withdraw", request="r")  # noqa: E731
    assert failing(peer, served_for_failures(peer), strike) is Code.LEASE_EXPIRED
    peer.ask("close")


def test_an_allocation_that_is_freed_under_the_copy(peer: Peer) -> None:
    lost = {Code.LEASE_EXPIRED, Code.PEER_LOST, Code.UNKNOWN_SESSION, Code.DEADLINE}
    assert failing(peer, served_for_failures(peer), lambda: peer.ask("free")) in lost


def test_a_producer_that_is_killed_under_the_copy(own_peer: Peer) -> None:
    lost = {Code.PEER_LOST, Code.DEADLINE, Code.WIRE_FAILED}
    assert failing(own_peer, served_for_failures(own_peer), own_peer.kill) in lost


def test_a_handle_that_is_stale(own_peer: Peer) -> None:
    """The producer has freed its memory, or has died: refused when it is opened."""
    for strike in (lambda: own_peer.ask("free"), own_peer.kill):
        metadata = base64.b64decode(served_for_failures(own_peer)["metadata"][0])
        sizes = small("dense", layout="LBNHC").pools[0].nbytes
        strike()
        mine = torch.zeros(sizes, dtype=torch.uint8, device="cuda:0")
        transport = make_transport("cuda")
        transport.register({0: Memory(mine.data_ptr(), mine.nbytes, "cuda:0")})
        theirs = {0: Memory(1 << 40, sizes, "cuda:0"), -1: Memory(1 << 41, 256 << 10, "cuda:0")}
        with pytest.raises(AtlasError) as refused:
            transport.connect(metadata, theirs)
        assert refused.value.code is Code.PEER_LOST
        transport.close()


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(AtlasError) as refused:
        make_transport("cuda").register({0: Memory(1 << 40, 4096, "cuda:99")})
    assert refused.value.code is Code.WRONG_DEVICE


def test_a_peer_of_the_same_process() -> None:
    src, dst = small("dense", layout="LBNHC"), small("dense", layout="BHLNC")
    move = move_of(src, dst, TOKENS)
    source = GpuRanks(src, "cuda", contents_of(move, 5), TOKENS)
    with ranks_of(dst, "cuda", move) as (ranks, poison):
        source.offer("r")
        pull(ranks.nodes[0], source.endpoints, ranks.blocks, TOKENS)
        assert ranks.wrong(right_of(move, poison)) == 0
    source.close()
