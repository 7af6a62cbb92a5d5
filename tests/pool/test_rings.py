"""Requests of a model with rings: one block each, never reused, and hits of everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.pool import BlockPool
from kvatlas.simulate import PoolModel, ReplayPolicy
from kvatlas.simulate.fast_replay import FastReplay
from kvatlas.simulate.traces import TraceBuilder, TraceRequest
from kvatlas.specs import Ring
from kvatlas.tier import Tier
from kvatlas.tier.canonical_rows import canonical_rows
from kvatlas.wire.offers import Offer
from tests.planning.test_rings import small

CONFIGS = Path(__file__).parents[1] / "planning" / "ring_configs"


def made(**ask: Any) -> Plan:
    return plan(small(), memory="8MiB", max_len=512, policy="vllm", **ask)


def ring_group(own: Plan) -> int:
    return next(n for n, group in enumerate(own.groups) if group.kind == "ring")


def test_a_request_keeps_its_ring_and_others_hit_what_it_stored() -> None:
    own = made()
    ring, step = ring_group(own), max(group.block for group in own.groups)
    pool, prompt = BlockPool(own), list(range(300))
    assert pool.admit("one", prompt) == 0
    for tokens in (1, 40, 300):
        pool.reserve("one", tokens)
        pool.computed("one", tokens)
        held = pool.tables("one")[ring]
        assert len(held) == 1
    assert pool.admit("two", [*prompt[:200], 7, 7]) == 200 // step * step
    pool.reserve("two", 202)
    assert pool.tables("two")[ring] != held, "a ring of its own"
    pool.free("one")
    pool.free("two")
    assert pool.admit("three", prompt) == 299 // step * step
    # A hit ends where a group of tokens begins, so that it needs no row of a ring.
    assert step % small_ring(own).group == 0


def small_ring(own: Plan) -> Ring:
    return next(iter(own.rings.values()))


def test_simulated_hits_need_no_ring() -> None:
    own = made()
    model = PoolModel.of(own)
    assert [one.needs for one in model.classes] == ["all"]
    builder = TraceBuilder("made", 16)
    builder.add("line 1", TraceRequest(100, list(range(6))))
    outcome = FastReplay(model, builder.finish(), ReplayPolicy()).run()
    assert outcome.peak == 6 + 1 + 1  # the ring, and the block that is being filled


def test_tiers_refuse_rings() -> None:
    own = made(layout="BLHNC")
    for opened in (lambda: Tier(own), lambda: canonical_rows(own)):
        with pytest.raises(AtlasError) as refusal:
            opened()
        assert refusal.value.code is Code.BAD_PLAN
        assert "rings" in str(refusal.value)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_tiers_refuse_every_model_with_rings(name: str) -> None:
    model = Model.load(CONFIGS / f"{name}.json")
    with pytest.raises(AtlasError, match="cannot store rings") as refusal:
        canonical_rows(model)
    assert refusal.value.code is Code.BAD_PLAN


def test_an_offer_has_the_rows_that_its_ring_still_has() -> None:
    """By brute force: a ring of 8 rows after 301 tokens, and what each shorter prefix needs."""
    own = made()
    ring, stop = small_ring(own), 301
    kept = {token % ring.rows: token for token in range(stop)}
    offer = Offer("one", {}, 0, stop, expires=0.0)
    for end in range(stop + 1):
        needed = range(end // ring.group * ring.group, end)
        there = all(kept[token % ring.rows] == token for token in needed)
        try:
            offer.check_asked((0, end), {}, own)
            assert there, end
        except AtlasError as refusal:
            assert refusal.code is Code.BAD_TOKENS
            assert "no longer has the rows" in str(refusal)
            assert not there, end
