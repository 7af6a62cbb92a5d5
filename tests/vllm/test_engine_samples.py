"""Requests for several samples (`n` > 1) between real engines: every sample is the right one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm.comparing import assert_nothing_held, atlas, prompt
from tests.vllm.engine_process import Answer, Engine, engine
from tests.vllm.models import checkpoint

SAMPLES = 4
LEASE = 60.0
"""Far longer than a test: blocks that come back were released, and did not expire."""
TOKENS = 300


class Engines(NamedTuple):
    """A prefill engine, and decode engines by their `kv_load_failure_policy`."""

    prefill: Engine
    decode: dict[str, Engine]


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return checkpoint("gemma3", checkpoints)


@pytest.fixture(scope="module")
def right(model: Path) -> Answer:
    """The samples of an engine without any connector."""
    with engine(model, name="undisturbed", core="0|1") as alone:
        found = alone.sample(prompt(TOKENS), SAMPLES)
    assert len({tuple(one) for one in found.samples}) > 1, "samples that do not differ"
    return found


@pytest.fixture(scope="module", params=["shm", "tcp"])
def engines(model: Path, request: pytest.FixtureRequest) -> Iterator[Engines]:
    """Decode engines that run two requests at once: half of the siblings wait in the queue."""
    settings = {"transport": request.param, "lease_seconds": LEASE}
    few: dict[str, Any] = {"block_size": 128, "max_num_seqs": 2}
    fail, recompute = (atlas(policy, **settings) for policy in ("fail", "recompute"))
    with (
        engine(model, name="prefill", core="0", connector=fail, block_size=64) as prefill,
        engine(model, name="fail", core="1", connector=fail, **few) as failing,
        engine(
            model,
            name="recompute",
            core="1",
            connector=recompute,
            enable_prefix_caching=True,
            **few,
        ) as recomputing,
    ):
        yield Engines(prefill, {"fail": failing, "recompute": recomputing})


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("prefilled", [1, SAMPLES])
def test_every_sample_is_that_of_an_engine_alone(
    policy: str, prefilled: int, engines: Engines, right: Answer
) -> None:
    """Also if the proxy leaves `n` in the request to the prefill engine, as vLLM's own does."""
    prefill, decode, tokens = engines.prefill, engines.decode[policy], prompt(TOKENS)
    decode.forget()
    first = decode.facts()["pulled"]
    decode.generate(tokens, params=prefill.prefill(tokens).params)
    before = decode.idle()["pulled"]
    decode.forget()
    told = prefill.prefill(tokens, samples=prefilled).params
    got = decode.sample(tokens, SAMPLES, params=told)
    assert got.reasons == ["length"] * SAMPLES
    assert got.samples == right.samples
    facts = decode.idle()
    one, read = before - first, facts["pulled"] - before
    if policy == "fail":
        assert read == SAMPLES * one, "each sample was read"
    else:
        assert 0 < read <= SAMPLES * one, "later samples found blocks of earlier ones"
    assert not facts["warned"]
    begun = time.monotonic()
    assert_nothing_held(prefill)
    assert time.monotonic() < begun + 10, "blocks came back long before their lease ended"


def _has_read(facts: dict[str, Any], *, before: int) -> bool:
    return bool(facts["pulled"] > before)


def test_samples_that_are_aborted_leave_nothing_behind(engines: Engines, right: Answer) -> None:
    prefill, decode, tokens = engines.prefill, engines.decode["fail"], prompt(TOKENS)
    for wait in (False, True):
        before = decode.facts()["pulled"]
        name = decode.add(tokens, params=prefill.prefill(tokens).params, samples=SAMPLES)
        if wait:
            decode.until(partial(_has_read, before=before))
        decode.abort(name)
        decode.idle()
        begun = time.monotonic()
        assert_nothing_held(prefill, decode)
        assert time.monotonic() < begun + 10
    got = decode.sample(tokens, SAMPLES, params=prefill.prefill(tokens).params)
    assert got.samples == right.samples
    assert_nothing_held(prefill, decode)


def test_vllm_names_the_requests_of_several_samples_as_the_connector_reads_them() -> None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.parallel_sampling import ParentRequest

    from kvatlas.engines.vllm.offer_readers import parent_of

    made = EngineCoreRequest(
        request_id="cmpl-7-0-abcd", external_req_id="cmpl-7-0", prompt_token_ids=[1],
        mm_features=None, sampling_params=SamplingParams(n=2), pooling_params=None,
        arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    parent = ParentRequest(made)
    names = [parent.get_child_info(index)[0] for index in range(2)]
    assert [parent_of(name) for name in names] == [made.request_id] * 2
    assert parent_of(made.request_id) is None
