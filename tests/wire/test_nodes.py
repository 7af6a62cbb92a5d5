"""What a node gives back, and leaves alone, when it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvatlas import AtlasError
from kvatlas.copying.memory_copy import rank_pools
from kvatlas.copying.movers import pools_device
from kvatlas.errors import Code
from kvatlas.planning import plan
from kvatlas.routing import scattered
from kvatlas.wire import Memory, Node, Session, encoding, make_transport, protocol
from kvatlas.wire.protocol import RegisteredMemory
from tests.identities import OURS
from tests.planning.models import SMALL
from tests.wire.helpers import Buffers, End, Local, ends, pull_all, small


def test_a_lease_that_is_refused_gives_its_staging_buffers_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = End(small("dense"), 32, seed=1)
    target = End(small("dense", layout="LBHNC"), 32, seed=2)
    with ends(source, target):
        source.offer("r")
        with monkeypatch.context() as patch:
            patch.setattr("kvatlas.wire.leases._MAX_LEASES", 0)
            with Session(target.nodes[0], source.endpoints) as session:
                for _ in range(5):  # more often than there are buffers
                    with pytest.raises(AtlasError) as refusal:
                        session.pull(
                            "r", destination_blocks=target.blocks, tokens=32, how="staged"
                        ).wait(9)
                    assert refusal.value.code is Code.TOO_MANY
        source.assert_idle()
        pull_all(source, target, "r", how="staged")


def test_tables_that_do_not_fit_the_plan_are_neither_offered_nor_expected() -> None:
    made = small("sliding", 128, policy="vllm", block_size=16)
    good = scattered(made, 80)
    some, groups = list(good[0]), len(made.groups)
    assert groups > 1
    wrong: list[tuple[Code, Any]] = [
        (Code.OUT_OF_RANGE, {**good, 0: [*some[:-1], 10**9]}),
        (Code.OUT_OF_RANGE, {**good, 0: [*some[:-1], -1]}),
        (Code.OUT_OF_RANGE, {**good, groups: [1]}),
        (Code.MISSING_BLOCKS, {**good, 0: some[:-1]}),
        (Code.MISSING_BLOCKS, {0: some}),
        (Code.TWICE, {**good, 0: [*some[:-1], some[-2]]}),
    ]
    with ends(End(made, 80)) as (end,):
        node = end.nodes[0]
        for code, tables in wrong:
            for act in (node.offer, partial(node.expect, source=made, pushers=["end-0"])):
                with pytest.raises(AtlasError) as refusal:
                    act("r", tables, 80)
                assert refusal.value.code is code, tables
        assert not node.offers
        assert not node.expected
        node.offer("r", good, 80)
        node.withdraw("r")
        node.expect("r", good, 80, source=made, pushers=["end-0"])


def test_one_model_by_path_and_by_name_is_one_model_to_nodes() -> None:
    """The fingerprint decides: either end may have it under another name, and pull or push."""
    model = replace(SMALL["dense"], name="/models/of/somebody")
    by_path = plan(model, memory="2MiB", max_len=64, in_flight=0, tp=2)
    for src, dst in ((small("dense"), by_path), (by_path, small("dense"))):
        with ends(End(src, 50, seed=1), End(dst, 50, seed=2)) as (source, target):
            source.offer("r")
            pull_all(source, target, "r", checksums=True)
            expected = [
                node.expect("pushed", source.blocks, 50, source=dst, pushers=["end-2"])
                for node in source.nodes
            ]
            for node in target.nodes:
                with Session(node, source.endpoints) as session:
                    session.push("pushed", source_blocks=target.blocks, tokens=50).wait(20)
            assert all(one.ready.wait(5) for one in expected)


def test_bad_arguments_do_not_close_the_callers_transport() -> None:
    made = small("dense", tp=2)
    good = Buffers(made, 0).memory
    index, at = next(iter(good.items()))
    wrong: list[dict[str, Any]] = [
        {"rank": 2},
        {"rank": -1},
        {"memory": {}},
        {"memory": {index: Memory(at.address, at.nbytes - 1)}},
        {"memory": {index: Memory(at.address + 1, at.nbytes)}},
        {"piece": 1},
    ]
    transport = Local()
    for given in wrong:
        with pytest.raises(AtlasError):
            Node(
                made,
                **{"rank": 0, "memory": good, "transport": transport, "identity": OURS, **given},
            )
        assert transport.open
        assert transport.registered == 0
    with Node(made, rank=0, memory=good, transport=transport, identity=OURS):
        assert transport.registered


@pytest.mark.parametrize("device", ["host", "cuda:0"])
@pytest.mark.parametrize("shared", ["all", "staging"])
def test_a_node_of_which_peers_reach_nothing_is_refused(shared: Any, device: str) -> None:
    """Its peers said that its regions were not those of its plan."""
    made, transport = small("dense"), make_transport("memory", shared=shared)
    own = Buffers(made, 0).memory
    memory = {i: Memory(at.address, at.nbytes, device) for i, at in own.items()}
    about: dict[str, Any] = {"memory": memory, "transport": transport, "buffers": 0}
    if (shared, device) == ("all", "host"):
        with Node(made, identity=OURS, **about) as node:
            assert set(node.transport.reachable) == set(memory)
        return
    with pytest.raises(AtlasError) as refusal:
        Node(made, identity=OURS, **about)
    assert refusal.value.code is Code.CONTRADICTORY
    assert transport.open
    assert transport.registered == 0


def test_a_plan_too_large_for_a_message_is_refused_where_it_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the byte: what a node can be made with, its peers can be told."""
    made = small("dense")
    with ends(End(made, 50)) as (end,):
        hello = end.nodes[0].hello(with_plan=True)
    told = encoding.encode(protocol.Welcome(hello=hello, session=hello.incarnation))
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", len(told))
    with ends(End(made, 50, seed=1), End(made, 50, seed=2)) as (source, target):
        source.offer("r")
        pull_all(source, target, "r")
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", len(told) - 1)
    with pytest.raises(AtlasError) as refusal:
        End(made, 50)
    assert refusal.value.code is Code.TOO_MANY
    assert f"{len(made.without_notes().to_json()):,} bytes as JSON" in str(refusal.value)


def test_a_plan_with_more_pages_than_peers_check_is_refused_where_it_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = small("dense")
    monkeypatch.setattr("kvatlas.wire.handshake_checks._MAX_PAGES", 1)
    with pytest.raises(AtlasError) as refusal:
        Node(made, memory=Buffers(made, 0).memory, transport=Local(), identity=OURS)
    assert refusal.value.code is Code.TOO_MANY


def test_nodes_take_caches_tensors_and_arrays_and_keep_them_alive() -> None:
    torch = pytest.importorskip("torch")
    from kvatlas.cache import allocate

    made = small("dense")
    nbytes = made.pools[0].nbytes
    cache = allocate(made)
    given: list[tuple[Any, Any]] = [(cache, cache.pools[0])]
    given += [({0: pool}, pool) for pool in (torch.zeros(nbytes // 2, dtype=torch.bfloat16),)]
    given += [({0: pool}, pool) for pool in (np.zeros(nbytes, np.uint8),)]
    for pools, pool in given:
        with Node(made, memory=pools, transport=Local(), identity=OURS) as node:
            region = node.transport.memory[0]
            assert (region.nbytes, region.device) == (nbytes, "host")
            assert region.owner is pool
    strided = torch.zeros(2 * nbytes, dtype=torch.uint8)[::2]
    for wrong in ({0: strided}, {0: np.zeros(2 * nbytes, np.uint8)[::2]}, {0: b"bytes"}, 17):
        with pytest.raises(AtlasError) as refusal:
            Node(made, memory=wrong, transport=Local(), identity=OURS)
        assert refusal.value.code is Code.BAD_TENSOR


def test_memory_of_gpu_0_is_not_taken_for_host_memory() -> None:
    """Its number was, and bytes of the host were read at its address."""
    made = small("dense", pp=2)
    at = Buffers(made, 0).memory[0]
    gpu = {0: Memory(at.address, at.nbytes, "cuda:0")}
    with pytest.raises(AtlasError) as refusal:  # there is no GPU here to order anything on
        Node(made, memory=gpu, transport=Local(), identity=OURS)
    assert refusal.value.code is Code.WRONG_DEVICE
    with pytest.raises(AtlasError) as refusal:
        rank_pools(made, 0, gpu)
    assert refusal.value.code is Code.OUT_OF_BOUNDS
    hello = RegisteredMemory.of(0, gpu[0])
    assert (hello.kind, hello.device, hello.memory) == ("cuda", 0, gpu[0])
    assert RegisteredMemory(index=0, address=64, nbytes=64).memory == Memory(64, 64)


def test_pools_on_unlike_devices_are_refused() -> None:
    with pytest.raises(AtlasError) as refusal:
        pools_device({0: Memory(64, 64), 1: Memory(64, 64, "cuda:1")})
    assert refusal.value.code is Code.WRONG_DEVICE
