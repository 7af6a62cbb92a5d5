"""vLLM and transformers of unlike topology on one folder: each goes on from the other's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvatlas.engines.transformers import AtlasCache, PrefixReuse
from tests.vllm.comparing import assert_nothing_held, assert_same, atlas, prompt
from tests.vllm.engine_process import Answer, engine
from tests.vllm.models import checkpoint

NEW = 8
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {"block_size": 32},
    "gpt_oss": {"block_size": 128},
}
"""Models that run in both engines, and the vLLM engine of each."""
ORDERS = {"gemma3": "BLNHC"}
"""Orders of the caches in transformers; LBNHC for all others."""


def answer_to(made: Any, asked: list[int], cache: Any = None) -> Answer:
    """The greedy answer of a transformers model, on its own cache or on ours."""
    ids = torch.tensor([asked])
    about: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "past_key_values": cache}
    about |= {"attention_mask": torch.ones_like(ids), "output_scores": True, "eos_token_id": None}
    out = made.generate(ids, return_dict_in_generate=True, **about)
    tokens = out.sequences[0, len(asked) :].tolist()
    chosen = [
        float(torch.log_softmax(scores[0], -1)[token])
        for scores, token in zip(out.scores, tokens, strict=True)
    ]
    return Answer(tokens, chosen, None, "length")


def answer_with_tier(name: str, made: Any, where: str, asked: list[int]) -> tuple[int, Answer]:
    """How many tokens transformers finds in a folder, and its answer, which it stores."""
    about: dict[str, Any] = {"layout": ORDERS.get(name, "LBNHC"), "prefix_caching": True}
    cache = AtlasCache.from_config(made.config, batch=2, max_len=512, **about)
    reuse = PrefixReuse(made, cache, where, timeout=60.0, staging=8 << 20)
    found = reuse.begin(asked)
    answer = answer_to(made, asked, cache)
    reuse.end(asked + answer.tokens)
    reuse.close()
    return found, answer


@pytest.mark.parametrize("name", FAMILIES)
def test_vllm_and_transformers_go_on_from_each_others_rows(
    name: str, checkpoints: Path, tmp_path: Path
) -> None:
    """The answers are those of transformers on its own cache, without a tier."""
    model, where = checkpoint(name, checkpoints), f"folder://{tmp_path}/store"
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    begun = [prompt(230, seed) for seed in (1, 2)]
    right = [answer_to(made, one) for one in begun]
    more = [one + said.tokens + prompt(30, 5) for one, said in zip(begun, right, strict=True)]
    right_after = [answer_to(made, one) for one in more]
    expected = 230 + NEW - 1
    found, got = answer_with_tier(name, made, where, begun[1])
    assert_same(right[1], got, (name, "transformers stores"))
    assert found == 0
    connector = atlas("recompute", transport="none", tier=where)
    with engine(model, name="vllm", connector=connector, **FAMILIES[name]) as other:
        assert_same(right[0], other.generate(begun[0]), (name, "vLLM stores"))
        other.idle()
        got = other.generate(more[1])
        assert_same(right_after[1], got, (name, "vLLM goes on"))
        assert got.cached == expected
        assert_nothing_held(other)
    found, got = answer_with_tier(name, made, where, more[0])
    assert_same(right_after[0], got, (name, "transformers goes on"))
    assert found == expected
