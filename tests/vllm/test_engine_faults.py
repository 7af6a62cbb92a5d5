"""Engines that die, stall or are not asked: what was not read is computed, and no block is lost."""

from __future__ import annotations

import time
from pathlib import Path

from tests.vllm.comparing import (
    assert_nothing_held,
    assert_same,
    atlas,
    prompt,
    split,
    undisturbed,
)
from tests.vllm.engine_process import engine
from tests.vllm.models import checkpoint

LEASE = 4.0
TIMES = 5


def test_what_cannot_be_read_is_computed_and_nothing_stays_held(checkpoints: Path) -> None:
    model = checkpoint("gemma3", checkpoints)
    tokens = prompt(300)
    (right,) = undisturbed(model, [tokens])
    patient = atlas("recompute", wait_for_offer=60.0, pull_seconds=60.0)
    quick = atlas(lease_seconds=LEASE, wait_for_offer=0.5)
    with engine(model, name="decode", core="1", connector=patient, block_size=128) as decode:
        with engine(model, name="prefill", core="0", connector=quick, block_size=64) as prefill:
            # An offer that nobody reads expires, and is then not to be had.
            late = prefill.prefill(tokens)
            assert prefill.facts()["requests"] == 1
            assert_nothing_held(prefill)
            # Aborted while it waits for what does not come.
            params = late.params
            assert params is not None
            waiting = decode.add(tokens, params=params)
            deadline = time.monotonic() + 30
            while decode.facts()["requests"] == 0:
                assert time.monotonic() < deadline
            decode.abort(waiting)
            assert_nothing_held(decode)
            # Aborted before it was ever scheduled at the other engine: it has its blocks back.
            for _ in range(TIMES):
                begun = prefill.prefill(tokens)
                decode.abort(decode.add(tokens, params=begun.params))
            assert_nothing_held(prefill, decode)
            # Read as ever after all that.
            assert_same(right, split(prefill, decode, tokens), "after aborts")
            last = prefill.prefill(tokens)
            prefill.kill()
        assert_same(right, decode.generate(tokens, params=last.params), "killed before the pull")
        assert_nothing_held(decode)


def test_a_request_that_cannot_be_read_fails_alone(checkpoints: Path) -> None:
    model = checkpoint("llama", checkpoints)
    prompts = [prompt(200, seed) for seed in (1, 2)]
    right = undisturbed(model, prompts)
    failing = atlas("fail", wait_for_offer=0.2)
    with (
        engine(model, name="prefill", core="0", connector=failing, block_size=64) as prefill,
        engine(model, name="decode", core="1", connector=failing, block_size=128) as decode,
    ):
        begun = [prefill.prefill(one) for one in prompts]
        lost = begun[0].params
        assert lost is not None
        lost["kvatlas"]["request"] += " that nobody offers"
        names = [
            decode.add(one, params=answer.params)
            for one, answer in zip(prompts, begun, strict=True)
        ]
        answers = [decode.wait(name) for name in names]
        assert answers[0].reason == "error"
        assert_same(right[1], answers[1], "the other")
        assert_nothing_held(decode)
