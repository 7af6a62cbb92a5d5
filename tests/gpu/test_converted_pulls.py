"""Caches of two processes in unlike formats: cast by the copy, or staged, and right either way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvatlas.copying.torch_prepared import TorchPreparedRuns
from kvatlas.planning import Plan
from kvatlas.specs import FullAttention, GatedDeltaNet, LatentAttention
from kvatlas.wire import Session
from tests.gpu.peer import Peer, move_of
from tests.gpu.ranks import GUARD, GUARDED, GpuRanks
from tests.planning.models import model_of
from tests.routing import oracle
from tests.routing.cases import small_plan
from tests.routing.converting import assert_converted, conversion_of, fill_sources, scales_of

TOKENS, SEED = 61, 5
PLAIN = ("bf16", "fp16", "fp32")


def written(cache: str) -> dict[str, Any]:
    return {"dtype": cache} if cache in PLAIN else {"cache": cache}


def dense(cache: str, **ask: Any) -> Plan:
    spec = FullAttention(heads=4, head_dim=64, **written(cache))
    return small_plan(model_of("dense", {"attn": spec}, heads=8), **ask)


def hybrid(cache: str, state: str, **ask: Any) -> Plan:
    spec = FullAttention(heads=4, head_dim=64, **written(cache))
    mixer = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=4, value_dim=4, ssm_dtype=state)
    return small_plan(model_of("hybrid", {"attn": spec}, {"mixer": mixer}, heads=8), **ask)


def latent(cache: str, **ask: Any) -> Plan:
    spec = LatentAttention(latent=128, rope=16, **written(cache))
    return small_plan(model_of("mla", {"attn": spec}), **ask)


CAST = [
    (dense("fp8", layout="LBNHC", tp=2), dense("bf16", layout="BHLNC", block_size=32)),
    (dense("bf16", layout="BLHNC", block_size=32), dense("fp8", layout="LBHNC", tp=2)),
    (dense("bf16", layout="LHBNC", tp=4), dense("fp8_e5m2", layout="LBNHC", block_size=48)),
    (dense("fp32", layout="BLNHC"), dense("fp16", layout="LHBNC", block_size=32)),
    (hybrid("fp8", "fp32", tp=2), hybrid("bf16", "bf16", block_size=32)),
    (latent("fp8"), latent("bf16")),
]
"""Element by element: orders, slices of tp and blocks are unlike too."""
STAGED = [
    (dense("bf16", layout="LBNHC", tp=2), dense("int8_per_token_head", block_size=32)),
    (latent("bf16"), latent("fp8_ds_mla")),
]


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def held_by(ranks: GpuRanks) -> dict[int, Any]:
    """The pools of every rank as the oracle keeps them; guards are as they were."""
    memories = {}
    for rank, pools in ranks.whole.items():
        memories[rank] = oracle.Memory(ranks.plan, rank, np.random.default_rng(0))
        for index, whole in pools.items():
            data = whole.cpu().numpy()
            assert (data[:GUARD] == GUARDED).all()
            assert (data[-GUARD:] == GUARDED).all()
            memories[rank].pools[index][:] = data[GUARD:-GUARD]
    return memories


def check(peer: Peer, src: Plan, dst: Plan, *, cast: bool, **about: Any) -> None:
    named, move = conversion_of(src, dst), move_of(src, dst, TOKENS)
    _, numbers = fill_sources(move, np.random.default_rng(SEED))
    served = peer.serve(src, dst, "cuda", TOKENS, seed=SEED, convert=named)
    noise = np.random.default_rng(9)
    poison = {rank: oracle.Memory(dst, rank, noise).pools for rank in range(dst.ranks)}
    ranks = GpuRanks(dst, "cuda", poison, TOKENS, convert=named, scales=scales_of(dst))
    before = held_by(ranks)
    if about.get("streamed"):
        peer.ask("offer_layers", request="r", cycles=1000)
    else:
        peer.ask("offer", request="r", busy=100)
    for node in ranks.nodes:
        with Session(node, served["endpoints"]) as session:
            asked: Any = {"destination_blocks": ranks.blocks, "tokens": TOKENS, **about}
            done = session.pull("r", **asked).wait(30)
            assert done.moved == done.total
        assert node.metrics.values["gpu_converted_bytes"] == (done.total if cast else 0)
        assert ("staged" in node.metrics.seconds) != cast
    assert_converted(move, numbers, before, held_by(ranks))
    ranks.close()
    assert peer.ask("wrong")["wrong"] == 0
    peer.ask("close")


def test_elements_are_cast_by_the_copy(peer: Peer) -> None:
    for src, dst in CAST:
        check(peer, src, dst, cast=True)


def test_pulls_of_a_known_shape_are_cast_by_prepared_launches(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for src, dst in CAST:
        with monkeypatch.context() as patch:
            check_again(peer, src, dst, patch)


def check_again(peer: Peer, src: Plan, dst: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pull several times over one session. From the third pull on, launches are prepared."""
    named, move = conversion_of(src, dst), move_of(src, dst, TOKENS)
    _, numbers = fill_sources(move, np.random.default_rng(SEED))
    served = peer.serve(src, dst, "cuda", TOKENS, seed=SEED, convert=named)
    noise = np.random.default_rng(9)
    poison = {rank: oracle.Memory(dst, rank, noise).pools for rank in range(dst.ranks)}
    ranks = GpuRanks(dst, "cuda", poison, TOKENS, convert=named, scales=scales_of(dst))
    sessions = [Session(node, served["endpoints"]) for node in ranks.nodes]
    launched, post = [], TorchPreparedRuns.post

    def recorded(self: TorchPreparedRuns, *tables: Any) -> Any:
        posted = post(self, *tables)
        launched.append((posted is not None, any(one.graph for one in self._made.values())))
        return posted

    monkeypatch.setattr(TorchPreparedRuns, "post", recorded)
    for turn in range(6):
        before = held_by(ranks)
        launched.clear()
        peer.ask("offer", request=f"r{turn}", busy=0)
        time.sleep(0.05)  # the event of the offer completes
        for session in sessions:
            asked: Any = {"destination_blocks": ranks.blocks, "tokens": TOKENS}
            done = session.pull(f"r{turn}", **asked).wait(30)
            assert done.moved == done.total
        assert_converted(move, numbers, before, held_by(ranks))
        if turn > 2:
            assert launched, "prepared launches"
            assert all(posted for posted, _ in launched)
        if turn > 4:
            assert any(graph for _, graph in launched), "a captured graph"
        for pools in ranks.whole.values():
            for whole in pools.values():
                whole[GUARD:-GUARD] = turn
        time.sleep(0.2)  # the shape is prepared after the pull
    for session in sessions:
        found = [session._connections.find(one) for one in served["endpoints"]]
        assert any(one is not None and one.shapes._kept for one in found)
        session.close()
    ranks.close()
    assert peer.ask("wrong")["wrong"] == 0
    peer.ask("close")


def test_layers_are_cast_as_they_are_written(peer: Peer) -> None:
    for src, dst in CAST[:2]:
        check(peer, src, dst, cast=True, streamed=True)


def test_what_is_checked_or_shares_scales_is_staged(peer: Peer) -> None:
    for src, dst in STAGED:
        check(peer, src, dst, cast=False)
    check(peer, *CAST[0], cast=False, checksums=True)
