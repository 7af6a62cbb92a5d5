"""Quantised caches: logits stay near, and pages hold the bytes of their cache dtype.

The bounds are on the largest difference of logits, as a share of the largest logit, over a
prompt that is read in two steps; each is about twice what was measured when it was written.
"""

from __future__ import annotations

import pytest
import torch

from tests.engines.guarded import Guarded
from tests.engines.zoo import VOCABULARY, generate, model_of, seeded

DENSE = {
    "fp32": 1e-5,
    "bf16": 0.01,
    "fp8": 0.16,
    "fp8_e5m2": 0.35,
    "fp8_per_token_head": 0.2,
    "int8_per_token_head": 0.02,
    "int4_per_token_head": 0.5,
    "nvfp4": 0.5,
    "turboquant_k8v4": 0.3,
    "turboquant_4bit_nc": 0.4,
    "turboquant_k3v4_nc": 0.6,
    "turboquant_3bit_nc": 0.9,
}


def difference(name: str, kv_dtype: str, attention: str, pages: Guarded, first: int = 12) -> float:
    """How far logits are from those without a cache, as a share of the largest."""
    model = model_of(name)
    ids = torch.randint(1, VOCABULARY, (1, 21), generator=seeded(3))
    cache = pages.cache(name, batch=1, kv_dtype=kv_dtype)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        exact = model(ids, use_cache=False).logits
        model.set_attn_implementation(attention)
        model(ids[:, :first], past_key_values=cache)
        logits = model(ids[:, first:], past_key_values=cache).logits
    return float((logits - exact[:, first:]).abs().max() / exact.abs().max())


@pytest.mark.parametrize("attention", ["kvatlas", "sdpa"])
@pytest.mark.parametrize("kv_dtype", DENSE)
def test_logits_stay_near(kv_dtype: str, attention: str, pages: Guarded) -> None:
    far = difference("Qwen3", kv_dtype, attention, pages)
    assert far < DENSE[kv_dtype]
    if kv_dtype != "fp32":
        assert far > DENSE[kv_dtype] / 1000  # what is stored is not what was given


@pytest.mark.parametrize("attention", ["kvatlas", "sdpa"])
@pytest.mark.parametrize(("kv_dtype", "bound"), [("fp32", 1e-5), ("bf16", 0.004), ("fp8", 0.1)])
@pytest.mark.parametrize("name", ["DeepseekV3", "KimiLinear"])
def test_latents_stay_near(
    name: str, kv_dtype: str, bound: float, attention: str, pages: Guarded
) -> None:
    assert difference(name, kv_dtype, attention, pages) < bound


@pytest.mark.parametrize("kv_dtype", ["int8_per_token_head", "fp8", "nvfp4"])
def test_both_ways_of_reading_say_the_same(kv_dtype: str, pages: Guarded) -> None:
    """Quantisation changes tokens; how pages are read does not."""
    said = []
    for attention in ("kvatlas", "eager"):
        model_of("Qwen3").set_attn_implementation(attention)
        cache = pages.cache("Qwen3", kv_dtype=kv_dtype)
        said.append(generate("Qwen3", cache, max_new_tokens=16))
    assert torch.equal(*said)


def test_pages_are_as_small_as_their_dtype(pages: Guarded) -> None:
    """Two heads of 16 elements: K and V of 16 tokens in both layers."""
    sizes = {
        kv_dtype: pages.cache("Qwen3", kv_dtype=kv_dtype).plan.bytes_per_block
        for kv_dtype in (
            "fp32",
            "bf16",
            "fp8",
            "int8_per_token_head",
            "int4_per_token_head",
            "nvfp4",
        )
    }
    rows = 16 * 2 * 2 * 2
    assert sizes == {
        "fp32": rows * 64,
        "bf16": rows * 32,
        "fp8": rows * 16,
        "int8_per_token_head": rows * 20,
        "int4_per_token_head": rows * 12,
        "nvfp4": rows * 9,
    }


@pytest.mark.parametrize("name", ["Qwen3Next", "Bamba"])
def test_states_in_half_the_bytes(name: str, pages: Guarded) -> None:
    """States are kept in what the plan says, whatever the model computes in."""
    halves = pages.cache(name, ssm_dtype="bf16")
    whole = pages.cache(name)
    model_of(name).set_attn_implementation("kvatlas")
    tokens = generate(name, halves, max_new_tokens=4)
    assert torch.equal(tokens[:, :1], generate(name, whole, max_new_tokens=1))
    layer = next(n for n in halves.plan.layers if "mixer" in n or "linear" in n)
    assert halves.cache[layer].ssm.dtype == torch.bfloat16
