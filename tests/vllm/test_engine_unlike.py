"""vLLM and transformers of unlike topology on one folder: each goes on from the other's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvatlas.engines.transformers import AtlasCache, PrefixReuse
from tests.vllm.comparing import assert_nothing_held, assert_same, atlas, prompt, undisturbed
from tests.vllm.engine_process import Answer, engine
from tests.vllm.models import checkpoint

NEW = 8
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"block_size": 32, "tensor_parallel_size": 2},
    "mistral": {"block_size": 64},
    "gemma2": {"block_size": 128, "tensor_parallel_size": 2},
    "gemma3": {"block_size": 32},
    "gpt_oss": {"block_size": 128},
    "falcon_h1": {"block_size": 128},
}
"""Families that run in both engines here, and the vLLM engine of each."""
ORDERS = {"llama": "BHLNC", "gemma3": "BLNHC"}
"""Orders of the caches in transformers; LBNHC for all others."""


def said_by_transformers(
    name: str, model: Path, where: str, asked: list[int]
) -> tuple[int, Answer]:
    """How many tokens transformers finds in a folder, and its greedy answer."""
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    about: dict[str, Any] = {"layout": ORDERS.get(name, "LBNHC"), "prefix_caching": True}
    cache = AtlasCache.from_config(made.config, batch=2, max_len=512, **about)
    reuse = PrefixReuse(made, cache, where, timeout=60.0, staging=8 << 20)
    found = reuse.begin(asked)
    ids = torch.tensor([asked])
    about = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    about |= {"attention_mask": torch.ones_like(ids), "output_scores": True, "eos_token_id": None}
    out = made.generate(ids, past_key_values=cache, **about)
    reuse.end(out.sequences[0].tolist())
    reuse.close()
    tokens = out.sequences[0, len(asked) :].tolist()
    chosen = [
        float(torch.log_softmax(scores[0], -1)[token])
        for scores, token in zip(out.scores, tokens, strict=True)
    ]
    return found, Answer(tokens, chosen, None, "length")


@pytest.mark.parametrize("name", FAMILIES)
def test_vllm_and_transformers_go_on_from_each_others_rows(
    name: str, checkpoints: Path, tmp_path: Path
) -> None:
    model, where = checkpoint(name, checkpoints), f"folder://{tmp_path}/store"
    ours, theirs = prompt(230, seed=1), prompt(230, seed=2)
    right = undisturbed(model, [ours, theirs])
    ours_on, theirs_on = (
        one + answer.tokens + prompt(30, seed=5)
        for one, answer in zip((ours, theirs), right, strict=True)
    )
    right += undisturbed(model, [ours_on, theirs_on])
    computed = 230 + NEW - 1
    expected = computed // 64 * 64 if name == "llama" else computed
    connector = atlas("recompute", transport="none", tier=where)
    found, got = said_by_transformers(name, model, where, theirs)
    assert_same(right[1], got, (name, "transformers stores"))
    assert found == 0
    with engine(model, name="vllm", connector=connector, **FAMILIES[name]) as other:
        assert_same(right[0], other.generate(ours), (name, "vLLM stores"))
        other.idle()
        got = other.generate(theirs_on)
        assert_same(right[3], got, (name, "vLLM goes on"))
        assert got.cached == expected
        assert_nothing_held(other)
    found, got = said_by_transformers(name, model, where, ours_on)
    assert_same(right[2], got, (name, "transformers goes on"))
    assert found == expected
