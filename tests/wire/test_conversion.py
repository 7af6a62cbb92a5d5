"""Transfers that convert: agreed on by both ends, and right in every number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvatlas import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Copy, scattered
from kvatlas.wire import Node, Session, make_transport, memory_of, pools_for
from tests.identities import OURS
from tests.planning.models import model_of
from tests.routing.cases import small_plan
from tests.routing.converting import assert_converted, conversion_of, fill_sources, scales_of
from tests.routing.oracle import Memory, Move
from tests.routing.test_conversion import attention, latent, states
from tests.wire.helpers import End, ends

TOKENS = 40


def hybrid(cache: str, state: str, **ask: Any) -> Plan:
    """Attention and a recurrent layer, in formats of their own."""
    mixer = {"mixer": states(state, "bf16", "TR")[1]}
    return small_plan(model_of("hybrid", {"attn": attention(cache)}, mixer, heads=8), **ask)


def agreed(src: Plan, dst: Plan, **more: Any) -> tuple[End, End]:
    """Both ends as nodes that convert between them."""
    named = conversion_of(src, dst)
    return (
        End(src, TOKENS, seed=1, convert=named, scales=scales_of(src), **more),
        End(dst, TOKENS, seed=2, convert=named, scales=scales_of(dst), **more),
    )


def filled(src: End, dst: End) -> tuple[Move, dict[str, Any]]:
    """Give the source rows that the oracle knows."""
    move = Move(src.plan, dst.plan, src.blocks, dst.blocks, (0, TOKENS))
    memories, numbers = fill_sources(move, np.random.default_rng(5))
    for rank, memory in memories.items():
        for index, pool in memory.pools.items():
            src.buffers[rank].pools[index][:] = pool
        src.buffers[rank].before = src.buffers[rank].copy()
    return move, numbers


def assert_right(move: Move, numbers: dict[str, Any], dst: End) -> None:
    """Every number has arrived, and no byte besides; guards of the pools are the buffers' own."""
    both: list[dict[int, Memory]] = []
    for when in ("before", "whole"):
        memories = {}
        for rank, buffers in enumerate(dst.buffers):
            memory = memories[rank] = Memory(move.destination, rank, np.random.default_rng(0))
            for index, pool in buffers.pools_of(getattr(buffers, when)).items():
                memory.pools[index][:] = pool
        both.append(memories)
    assert_converted(move, numbers, *both)


@pytest.mark.parametrize("way", ["pull", "push"])
def test_unlike_formats_are_converted_on_the_way(way: str) -> None:
    """Ranks, orders and blocks are unlike too; pieces are small, so that cells are cut apart."""
    for src, dst in (
        (
            hybrid("fp8", "fp32", tp=2, layout="BLHNC"),
            hybrid("bf16", "bf16", layout="BHLNC", block_size=32),
        ),
        (
            small_plan(model_of("mla", {"attn": latent("bf16")})),
            small_plan(model_of("mla", {"attn": latent("fp8_ds_mla")})),
        ),
    ):
        with ends(*agreed(src, dst)) as (here, there):
            move, numbers = filled(here, there)
            if way == "pull":
                here.offer("r")
                for node in there.nodes:
                    with Session(node, here.endpoints) as session:
                        about: dict[str, Any] = {
                            "destination_blocks": there.blocks,
                            "tokens": TOKENS,
                        }
                        done = session.pull("r", **about, checksums=True).wait(20)
                        assert done.ready
                        assert done.moved == done.total
            else:
                waited = [
                    n.expect("r", there.blocks, TOKENS, source=src, pushers=["end-1"])
                    for n in there.nodes
                ]
                for node in here.nodes:
                    with Session(node, there.endpoints) as session:
                        about = {"source_blocks": here.blocks, "tokens": TOKENS}
                        session.push("r", **about, checksums=True).wait(20)
                assert all(one.ready.wait(5) for one in waited)
            assert_right(move, numbers, there)
            here.assert_idle()
            there.assert_idle()


def test_shared_memory_converts() -> None:
    src = small_plan(model_of("m", {"attn": attention("bf16")}), tp=2)
    dst = small_plan(model_of("m", {"attn": attention("int8_per_token_head")}), block_size=32)
    nodes = []
    tables = scattered(src, TOKENS), scattered(dst, TOKENS)
    move = Move(src, dst, tables[0], tables[1], (0, TOKENS))
    memories, numbers = fill_sources(move, np.random.default_rng(5))
    try:
        pools = {}
        for made, rank in ((src, 0), (src, 1), (dst, 0)):
            transport = make_transport("shm")
            pools[made.tp, rank] = own = pools_for(made, rank, transport)
            about: dict[str, Any] = {"rank": rank, "memory": memory_of(own), "transport": transport}
            nodes.append(Node(made, **about, identity=OURS, convert="bf16->int8"))
        for rank, node in enumerate(nodes[:2]):
            for index, pool in memories[rank].pools.items():
                pools[2, rank][index][:] = pool
            node.offer("r", tables[0], TOKENS)
        with Session(nodes[2], [node.endpoint for node in nodes[:2]]) as session:
            session.pull("r", destination_blocks=tables[1], tokens=TOKENS, streamed=True).wait(20)
        before, after = (Memory(dst, 0, np.random.default_rng(0)) for _ in range(2))
        for index, pool in pools[1, 0].items():
            before.pools[index][:], after.pools[index][:] = 0, pool
        assert_converted(move, numbers, {0: before}, {0: after})
    finally:
        for node in nodes:
            node.close()


def refusal(src: End, dst: End, *, pushing: bool = False) -> AtlasError:
    """Why a session is not had, or a transfer is not begun."""
    node, others = (src.nodes[0], dst) if pushing else (dst.nodes[0], src)
    with pytest.raises(AtlasError) as refused:
        _transfer(node, others, pushing=pushing)
    return refused.value


def _transfer(node: Node, others: End, *, pushing: bool) -> None:
    blocks = scattered(node.plan, TOKENS)
    with Session(node, others.endpoints) as session:
        if pushing:
            session.push("r", source_blocks=blocks, tokens=TOKENS).wait(5)
        else:
            session.pull("r", destination_blocks=blocks, tokens=TOKENS).wait(5)


def test_both_ends_have_to_agree() -> None:
    src, dst = (small_plan(model_of("m", {"attn": attention(c)})) for c in ("fp8", "bf16"))
    named = {"convert": "fp8->bf16", "scales": 0.5}
    for here, there, code in (
        ({}, {}, Code.UNLIKE_DTYPES),
        (named, {}, Code.UNLIKE_CONVERSIONS),
        ({}, {"convert": "fp8->bf16"}, Code.UNLIKE_CONVERSIONS),
        (named, {"convert": "fp8->fp16"}, Code.UNLIKE_CONVERSIONS),
        ({"convert": "fp8->fp16"}, {"convert": "fp8->fp16"}, Code.BAD_CONVERSION),
        ({"convert": "fp8->bf16"}, {"convert": "fp8->bf16"}, Code.MISSING_SCALES),
    ):
        made = End(src, TOKENS, seed=1, **here), End(dst, TOKENS, seed=2, **there)
        with ends(*made) as (source, target):
            source.offer("r")
            for pushing in (False, True):
                assert refusal(source, target, pushing=pushing).code is code
            target.buffers[0].assert_untouched()


def test_equal_formats_with_unequal_scales_are_refused() -> None:
    plan = small_plan(model_of("m", {"attn": attention("fp8")}))
    named: dict[str, Any] = {"convert": "fp8->bf16", "scales": 0.5}
    for scales, code in ((0.5, None), (0.25, Code.BAD_CONVERSION)):
        made = (
            End(plan, TOKENS, seed=1, **named),
            End(plan, TOKENS, seed=2, **named | {"scales": scales}),
        )
        with ends(*made) as (source, target):
            source.offer("r")
            if code is None:
                _transfer(target.nodes[0], source, pushing=False)
            else:
                assert refusal(source, target, pushing=False).code is code
                target.buffers[0].assert_untouched()


def test_a_conversion_goes_one_way_and_never_direct() -> None:
    src, dst = (small_plan(model_of("m", {"attn": attention(c)})) for c in ("fp8", "bf16"))
    with ends(*agreed(src, dst)) as (here, there):
        there.offer("back")
        assert refusal(there, here).code is Code.BAD_CONVERSION
        there.nodes[0].withdraw("back")
        here.offer("r")
        with Session(there.nodes[0], here.endpoints) as session:
            about: dict[str, Any] = {"destination_blocks": there.blocks, "tokens": TOKENS}
            with pytest.raises(AtlasError) as refused:
                session.pull("r", **about, how="direct").wait(5)
            assert refused.value.code is Code.CONTRADICTORY
        there.buffers[0].assert_untouched()


def test_nodes_that_convert_serve_equal_formats_as_they_are() -> None:
    made = small_plan(model_of("m", {"attn": attention("fp8")}))
    two = (End(made, TOKENS, seed=n, convert="fp8->bf16", scales=1.0) for n in (1, 2))
    with ends(*two) as (here, there):
        here.offer("r")
        with Session(there.nodes[0], here.endpoints) as session:
            session.pull("r", destination_blocks=there.blocks, tokens=TOKENS).wait(5)


def test_a_piece_that_was_changed_on_the_wire_is_noticed() -> None:
    src, dst = (small_plan(model_of("m", {"attn": attention(c)})) for c in ("bf16", "fp16"))
    with ends(*agreed(src, dst)) as (here, there):
        filled(here, there)

        def flip(act: Any, copies: Sequence[Copy]) -> Any:
            handle = act()
            there.nodes[0].staging.memory[copies[0].destination[0]] ^= 1
            return handle

        there.arounds = flip
        here.offer("r")
        with Session(there.nodes[0], here.endpoints) as session:
            about: dict[str, Any] = {"destination_blocks": there.blocks, "tokens": TOKENS}
            with pytest.raises(AtlasError) as refused:
                session.pull("r", **about, checksums=True).wait(5)
        assert refused.value.code is Code.CHECKSUM


def test_a_gpu_scatters_what_it_has_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion is on the caller's stream and the scatter on another: one waits for the other."""
    src, dst = (small_plan(model_of("m", {"attn": attention(c)})) for c in ("fp8", "bf16"))
    with ends(*agreed(src, dst)) as (here, there):
        filled(here, there)
        mover = there.nodes[0].mover
        done: list[str] = []
        scatter = mover.scatter

        def noted(copies: Sequence[Copy], stream: Any) -> int:
            done.append("scatter")
            return scatter(copies, stream)

        monkeypatch.setattr(mover, "wait_for_caller", lambda: done.append("wait"))
        monkeypatch.setattr(mover, "scatter", noted)
        here.offer("r")
        with Session(there.nodes[0], here.endpoints) as session:
            session.pull("r", destination_blocks=there.blocks, tokens=TOKENS).wait(5)
        assert done == ["wait", "scatter"] * (len(done) // 2)
        assert done


def test_bad_terms_are_refused_when_a_node_is_made() -> None:
    made = small_plan(model_of("m", {"attn": attention("fp8")}))
    for code, wrong in (
        (Code.BAD_CONVERSION, {"convert": "fp8"}),
        (Code.UNKNOWN_DTYPE, {"convert": "fp8->fp7"}),
        (Code.BAD_SIZE, {"convert": "fp8->bf16", "scales": -1.0}),
        (Code.BAD_SIZE, {"convert": "fp8->bf16", "scales": 1e-40}),
        (Code.UNKNOWN_LAYER, {"convert": "fp8->bf16", "scales": {"no layer": 1.0}}),
    ):
        with pytest.raises(AtlasError) as refused:
            End(made, TOKENS, **wrong)
        assert refused.value.code is code
