"""Tokens of real models that begin with what earlier requests left, beside runs without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvatlas.engines.transformers import AtlasCache, PrefixReuse, make_plan
from kvatlas.errors import AtlasError, Code
from kvatlas.pool import BlockPool, checkpoint_policy
from tests.engines.guarded import Guarded
from tests.engines.zoo import VOCABULARY, model_of, seeded
from tests.profiles import DEEP

NEW = 10 if DEEP else 3
LONG = 130
QUICK = ["Llama", "Gemma3", "Qwen3Next"]
NAMES = [*QUICK, "DeepseekV3", "Llama4", "GptOss", "FalconH1", "NemotronH", "Lfm2", "KimiLinear"]
ATTENTION = ("kvatlas", "eager") if DEEP else ("kvatlas",)
CUT = ("Llama", "Gemma3", "DeepseekV3", "GptOss")
"""Models whose hits end at any token: they keep every token by itself."""


def tokens_behind(name: str, prompt: list[int], cache: AtlasCache | None = None) -> list[int]:
    """A prompt, and what the model says to it."""
    options: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
    made = model_of(name).generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, **options
    )
    tokens: list[int] = made[0].tolist()
    return tokens


def reuse_of(name: str, pages: Guarded, checkpoints: str = "every-block") -> PrefixReuse:
    config = model_of(name).config
    plan = make_plan(config, batch=3, max_len=LONG + 2 * NEW, prefix_caching=True)
    pool = BlockPool(plan, null_block=False, checkpoints=checkpoint_policy(checkpoints))
    return PrefixReuse(model_of(name), pages.bind(plan, pool))


def conversations() -> list[tuple[list[int], int]]:
    """Prompts that begin as ones before them, and how many tokens these have in whole blocks."""
    drawn = torch.randint(1, VOCABULARY, (4, LONG), generator=seeded(21)).tolist()
    first, other, branch, last = drawn
    few = [(first[:50], 0), ([*first[:39], *branch[:6]], 39), ([*first[:48], *other[:7]], 48)]
    many = [
        (first[:100], 0),
        (first[:100], 96),
        (first[:LONG], 96),
        ([*first[:77], *branch[:40]], 77),
        (other[:90], 0),
        ([*other[:90], *last[:20]], 90),
        ([*first[:77], *branch[:40], *last[:5]], 112),
    ]
    return many if DEEP else few


@pytest.mark.parametrize("name", NAMES if DEEP else QUICK)
def test_tokens_behind_a_hit_are_those_without_it(name: str, pages: Guarded) -> None:
    for attention in ATTENTION:
        reuse = reuse_of(name, pages)
        block = reuse.cache.plan.block_size
        for prompt, expected in conversations():
            model_of(name).set_attn_implementation(attention)
            hit = reuse.begin(prompt)
            assert hit == (expected if name in CUT else expected // block * block)
            found = tokens_behind(name, prompt, reuse.cache)
            reuse.end(found)
            model_of(name).set_attn_implementation("eager")
            assert found == tokens_behind(name, prompt)
        assert all(ids.free == ids.count for ids in reuse.pool.ids.values())
        assert any(ids.kept for ids in reuse.pool.ids.values())


def test_a_model_that_forgets_its_states_is_refused(pages: Guarded) -> None:
    with pytest.raises(AtlasError) as refusal:
        reuse_of("Jamba", pages)
    assert refusal.value.code is Code.ENGINE_REFUSES
    assert "ignores its stored recurrent states" in str(refusal.value)


def test_a_model_without_attention_is_refused_for_that(pages: Guarded) -> None:
    with pytest.raises(AtlasError) as refusal:
        reuse_of("Mamba2", pages)
    assert refusal.value.code is Code.ENGINE_REFUSES
    assert "requires an attention layer" in str(refusal.value)


def test_a_sequence_that_reuses_a_prefix_goes_on_as_one_and_forwards(pages: Guarded) -> None:
    model_of("Llama").set_attn_implementation("kvatlas")
    reuse = reuse_of("Llama", pages)
    prompt, _ = conversations()[0]
    with pytest.raises(AtlasError) as refusal:
        reuse.end(prompt)
    assert refusal.value.code is Code.UNKNOWN_REQUEST
    reuse.begin(prompt)
    refused: list[tuple[Code, Callable[[], object]]] = [
        (Code.ENGINE_REFUSES, lambda: reuse.cache.batch_repeat_interleave(2)),
        (Code.BAD_TOKENS, lambda: reuse.end(prompt[1:])),
    ]
    for code, call in refused:
        with pytest.raises(AtlasError) as refusal:
            call()
        assert refusal.value.code is code
    tokens = tokens_behind("Llama", prompt, reuse.cache)
    with pytest.raises(AtlasError) as refusal:
        reuse.cache.crop(-1)
    assert refusal.value.code is Code.ENGINE_REFUSES
    with pytest.raises(AtlasError) as refusal:
        reuse.end(tokens[:-3])
    assert refusal.value.code is Code.BAD_TOKENS
    assert reuse.begin(prompt) == 0  # whose tokens nobody knows is not found
    reuse.cache.reset()
    with pytest.raises(AtlasError) as refusal:
        reuse.end(tokens_behind("Llama", prompt, reuse.cache))
    assert refusal.value.code is Code.ENGINE_REFUSES
    assert reuse.begin(prompt) == 0  # what others wrote is not taken for the request's
    reuse.end(tokens_behind("Llama", prompt, reuse.cache))
    assert reuse.begin(prompt) == 48
    reuse.end(tokens_behind("Llama", prompt, reuse.cache))
    assert all(ids.free == ids.count for ids in reuse.pool.ids.values())
