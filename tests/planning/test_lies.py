"""What liars and unlucky configs cost, and what plans say that is not so."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.planning import Plan, plan
from kvatlas.planning.plans import LARGEST_JSON
from kvatlas.routing import check, fingerprint
from kvatlas.specs import FullAttention, Mamba2
from tests.planning.models import model_of


def refused(text: dict[str, Any] | str) -> AtlasError:
    with pytest.raises(AtlasError) as refusal:
        Plan.from_json(text if isinstance(text, str) else json.dumps(text))
    assert refusal.value.code is Code.BAD_PLAN
    return refusal.value


def as_dict(made: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.to_json())
    return found


def test_a_window_that_is_not_the_layers_is_refused_and_never_shares_a_fingerprint() -> None:
    made = plan("Mistral-7B-v0.1", memory="60GiB")
    text = as_dict(made)
    text["groups"][0]["window"] = 8
    refused(text)
    for region in text["regions"]:
        for layer in region["layers"]:
            layer["spec"]["window"] = 8
    assert fingerprint(Plan.from_json(json.dumps(text))) != fingerprint(made)


def test_a_state_with_parts_missing_is_refused() -> None:
    made = plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2, states="shared")
    split = next(region for region in made.regions if region.splits > 1)
    text = as_dict(made)
    for region in text["regions"]:
        if region["parts"] and region["group"] == split.group:
            region["layers"], region["parts"] = region["layers"][1:], region["parts"][1:]
    assert "parts" in str(refused(text).got)
    text = as_dict(made)
    for region in text["regions"]:
        region["splits"], region["parts"] = 8, [0] * len(region["layers"])
    refused(text)


def test_context_parallel_ranks_that_do_not_hold_every_token_are_refused() -> None:
    text = as_dict(plan("Qwen3-8B", memory="60GiB", tp=8))
    assert "dcp 8" in str(refused({**text, "dcp": 8}).got)
    assert "dcp 2" in str(refused({**text, "dcp": 2}).got)
    windows = as_dict(plan("Mistral-7B-v0.1", memory="60GiB", tp=16))
    assert "dcp 2" in str(refused({**windows, "dcp": 2}).got)


def test_ranks_that_no_engine_has_are_refused() -> None:
    text = as_dict(plan("Qwen3-8B", memory="60GiB"))
    assert "tp 65536" in str(refused({**text, "tp": 65536}).got)
    with pytest.raises(AtlasError) as refusal:
        plan("Qwen3-8B", memory="60GiB", tp=65536)
    assert refusal.value.code is Code.BAD_TOPOLOGY


def test_plans_larger_than_any_models_are_refused_at_once() -> None:
    text = as_dict(plan("DeepSeek-V3", memory="60GiB"))
    region = text["regions"][0]
    layer = region["layers"][0]
    named = [{**layer, "name": f"layers.{index}"} for index in range(17_000)]
    kinds = [
        {**layer, "name": f"{index}", "spec": {**layer["spec"], "latent": index + 1}}
        for index in range(300)
    ]
    began = time.process_time()
    for lie in (
        {**text, "regions": [{**region, "layers": named}]},
        {**text, "regions": [{**region, "layers": kinds}]},
        {**text, "regions": [region] * 2100},
        {**text, "model": "x" * LARGEST_JSON},
    ):
        refused(lie)
    refused('{"model": ' + "[" * 100_000)
    assert time.process_time() - began < 5


def test_a_plan_as_large_as_is_read_takes_no_longer_than_its_size() -> None:
    text = as_dict(plan("Mamba2-2.7B", memory="60GiB", layout="BLNHC"))
    region, count = text["regions"][0], 1000
    page = region["page_bytes"]
    text["memory"] = 1 << 60
    text["pools"][0].update(blocks=4, block_bytes=page * count)
    text["regions"] = [
        {
            **region,
            "layers": [{**region["layers"][0], "name": f"layers.{index}"}],
            "offset": index * page,
            "page_stride": page,
            "block_stride": page * count,
        }
        for index in range(count)
    ]
    began = time.process_time()
    Plan.from_json(json.dumps(text))
    assert time.process_time() - began < 5


def test_many_layers_of_many_kinds_are_read_in_seconds() -> None:
    text = as_dict(plan("Qwen3-8B", memory="60GiB", layout="BLNHC"))
    (region,), count, kinds = text["regions"], 16_384, 250
    layer, page = region["layers"][0], region["page_bytes"]
    layers = [{**layer, "name": f"layers.{index}"} for index in range(count)]
    for window, one in enumerate(layers[-kinds:]):
        one["spec"] = {**layer["spec"], "kind": "sliding_window", "window": 1 + window}
    text["memory"] = 1 << 62
    text["pools"][0].update(blocks=4, block_bytes=page * count)
    region.update(layers=layers, page_stride=page, block_stride=page * count)
    began = time.process_time()
    assert len(Plan.from_json(json.dumps(text)).layers) == count
    assert time.process_time() - began < 5


def test_stripes_without_end_are_told_apart_without_counting_them() -> None:
    """A page of 2**28 cells, in which two groups overlay each other cell by cell."""
    text = as_dict(plan("Qwen3-8B", memory="60GiB", layout="LBNHC"))
    region, group, heads, states = text["regions"][0], text["groups"][0], 1 << 12, 1 << 16
    layer = {**region["layers"][0]}
    layer["spec"] = {**layer["spec"], "heads": heads, "head_dim": 8}
    size = {"block": states, "kernel_block": states, "page_bytes": heads * states * 32}
    named = [[{**layer, "name": f"layers.{index}"}] for index in range(2)]
    for stride in (32, 40):
        place = {"layout": "HNBLC", "offset": 0, "page_stride": 32, "block_stride": stride}
        lie = {
            **text, "layout": "HNBLC", "memory": 1 << 61,
            "groups": [{**group, "block": states}] * 2,
            "pools": [{**text["pools"][0], "blocks": 4, "block_bytes": heads * states * 256}],
            "regions": [
                {**region, **size, **place, "group": index, "layers": layers}
                for index, layers in enumerate(named)
            ],
        }  # fmt: skip
        began = time.process_time()
        Plan.from_json(json.dumps(lie))
        assert time.process_time() - began < 2


def test_large_states_do_not_hang_the_search_of_blocks() -> None:
    state = {"mixer": Mamba2(heads=8, head_dim=8, groups=1, state_size=10**7)}
    attention = {"attn": FullAttention(heads=1, head_dim=8)}
    model = model_of("large", *[state] * 12, *[attention] * 12)  # type: ignore[arg-type]
    began = time.process_time()
    plan(model, memory=1 << 60, max_len=64, in_flight=0)
    assert time.process_time() - began < 10


def test_chunks_that_start_inside_a_block_hold_one_more() -> None:
    made = plan("Llama-4-Scout", memory="60GiB", block_size=48)
    local = next(group for group in made.groups if group.kind == "chunked_local_attention")
    # Tokens 8,192 to 16,382 lie in blocks 170 to 341.
    assert local.blocks(16_383) == 172
    assert local.blocks(100) == 3
    other = plan("Llama-4-Scout", memory="60GiB", block_size=48, layout="LBHNC")
    assert check(made, other, tokens=16_383).ok


def test_padded_pages_are_unified_by_larger_blocks() -> None:
    for order in ("BLNHC", "BLHNC"):
        made = plan("DeepSeek-V4-Flash", memory="60GiB", block_size=512, layout=order)
        assert made.layout == order
    with pytest.raises(AtlasError) as refusal:
        plan("DeepSeek-V4-Flash", memory="60GiB", block_size=512, layout="LBHNC")
    assert refusal.value.code is Code.LAYOUT_REFUSED
    assert "BLNHC, BLHNC" in refusal.value.hint


def test_no_plan_is_quoted_that_vllm_refuses() -> None:
    with pytest.raises(AtlasError) as refusal:
        plan("Zamba2-7B", memory="60GiB", tp=8, policy="vllm")
    assert refusal.value.code is Code.BAD_TOPOLOGY
    told = plan("Zamba2-7B", memory="60GiB", tp=8).explain()
    assert "vLLM does not support this topology: 2 groups and tp 8" in told
    assert "vLLM's block size is" not in told
    assert "vLLM's block size is" in plan("Zamba2-7B", memory="60GiB", tp=2).explain()
