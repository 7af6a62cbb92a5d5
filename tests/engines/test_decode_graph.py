"""Steps in fixed tensors give the tokens of steps without: what a captured graph is made of."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from kvatlas.engines.transformers import AtlasCache, DecodeGraph
from kvatlas.errors import AtlasError, Code
from kvatlas.pool import NO_BLOCK
from tests.engines.guarded import Guarded
from tests.engines.test_tokens import by_turns
from tests.engines.zoo import ZOO, generate, model_of, own_tokens, prompts, tiny_of

STEPS = 20
"""Tokens with which sequences cross blocks, and tables outgrow their first room."""
SERVED = [name for name in ZOO if tiny_of(name).argument == "past_key_values"]


@pytest.mark.parametrize("name", by_turns(SERVED, 1, of=4))
def test_tokens_of_steps_in_fixed_tensors(name: str, pages: Guarded) -> None:
    own, model = own_tokens(name)[:, :STEPS], model_of(name)
    model.set_attn_implementation("kvatlas")
    cache = pages.cache(name, layout="BHLNC", **({"block_size": 16} if name == "Llama" else {}))
    with DecodeGraph(model, cache) as graph:
        for _ in range(2):  # a second batch of as many sequences is run in the same tensors
            assert generate(name, cache, max_new_tokens=STEPS).equal(own)
            cache.reset()
    assert graph.steps == 2 * (STEPS - 1)
    assert "forward" not in vars(model)


def test_a_choice_among_sequences_is_another_batch(pages: Guarded) -> None:
    model, cache = model_of("Llama"), pages.cache("Llama")
    model.set_attn_implementation("kvatlas")
    inputs = prompts()
    with torch.no_grad():
        first = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
        with DecodeGraph(model, cache) as graph:
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
            places = (mask.sum(1) - 1).unsqueeze(1)
            whole = model(
                first, attention_mask=mask, position_ids=places, past_key_values=cache
            ).logits.clone()
            cache.crop(-1)
            cache.batch_select_indices(torch.tensor([2, 0]))
            some = model(
                first[[2, 0]], attention_mask=mask[[2, 0]], position_ids=places[[2, 0]],
                past_key_values=cache,
            ).logits  # fmt: skip
    assert graph.steps == 2
    assert torch.allclose(some, whole[[2, 0]], atol=1e-5)


def test_a_mask_that_pages_cannot_be_read_with_is_refused(pages: Guarded) -> None:
    model, cache = model_of("Llama"), pages.cache("Llama")
    model.set_attn_implementation("kvatlas")
    inputs = prompts()
    with torch.no_grad(), DecodeGraph(model, cache):
        model(**inputs, past_key_values=cache)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=0)
        with pytest.raises(AtlasError) as refused:
            model(torch.ones((3, 1), dtype=torch.long), attention_mask=mask, past_key_values=cache)
    assert refused.value.code == Code.ENGINE_REFUSES


def test_a_mask_of_a_later_step_that_hides_a_token_is_refused(pages: Guarded) -> None:
    model, cache, ids = model_of("Llama"), pages.cache("Llama"), torch.ones((3, 1)).long()
    model.set_attn_implementation("kvatlas")
    inputs = prompts()
    with torch.no_grad(), DecodeGraph(model, cache) as graph:
        model(**inputs, past_key_values=cache)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        model(ids, attention_mask=mask, past_key_values=cache)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        mask[1, -3] = 0
        with pytest.raises(AtlasError) as refused:
            model(ids, attention_mask=mask, past_key_values=cache)
        assert refused.value.code == Code.ENGINE_REFUSES
        mask[1, -3] = 1
        model(ids, attention_mask=mask, past_key_values=cache)
    assert graph.steps == 2


def test_a_mask_that_is_refused_leaves_recurrent_states_as_they_were(pages: Guarded) -> None:
    model, said = model_of("Qwen3Next"), []
    model.set_attn_implementation("kvatlas")
    for refused in (False, True):
        cache, mask = pages.cache("Qwen3Next"), prompts()["attention_mask"]
        with torch.no_grad(), DecodeGraph(model, cache):
            ids = model(**prompts(), past_key_values=cache).logits[:, -1:].argmax(-1)
            for step in range(2):
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                if step and refused:
                    hiding = mask.clone()
                    hiding[1, -3] = 0
                    with pytest.raises(AtlasError):
                        model(ids, attention_mask=hiding, past_key_values=cache)
                ids = model(ids, attention_mask=mask, past_key_values=cache).logits.clone()
                said.append(ids)
                ids = ids.argmax(-1)
        cache.reset()
    assert said[1].equal(said[3])


def test_a_mask_with_room_for_later_tokens_is_taken_at_every_step(pages: Guarded) -> None:
    model, cache, inputs = model_of("Llama"), pages.cache("Llama"), prompts()
    model.set_attn_implementation("kvatlas")
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 4), value=0)
    with torch.no_grad(), DecodeGraph(model, cache) as graph:
        ids = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
        for step in range(3):
            mask[:, cache.seen] = 1
            model(ids, attention_mask=mask, past_key_values=cache)
            assert graph.steps == step + 1


def test_attention_that_reads_no_pages_is_refused() -> None:
    model = model_of("Llama")
    model.set_attn_implementation("sdpa")
    cache = AtlasCache.from_config(model.config, batch=1, max_len=64)
    with pytest.raises(AtlasError, match="A decode graph requires attention") as refused:
        DecodeGraph(model, cache)
    assert refused.value.code == Code.ENGINE_REFUSES


def test_steps_without_positions_or_with_several_a_token_are_those_of_the_model(
    pages: Guarded,
) -> None:
    model, inputs = model_of("Llama"), prompts()
    model.set_attn_implementation("kvatlas")
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    assert not mask.all(), "some sequence is padded"
    said = []
    for steps in (0, 1):
        cache = pages.cache("Llama")
        with torch.no_grad(), DecodeGraph(model, cache) as graph:
            first = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
            step = graph.model.forward if steps else graph._forward
            said.append(step(first, attention_mask=mask, past_key_values=cache).logits)
        assert graph.steps == steps
        options = {"past_key_values": cache, "position_ids": torch.zeros((3, 3, 1))}
        assert not graph._is_step(first, options), "three a token, as for pictures"
        cache.reset()
    assert torch.allclose(said[0], said[1], atol=1e-5)


def test_a_graph_is_not_replayed_on_tables_that_came_to_lie_where_others_lay(
    pages: Guarded,
) -> None:
    model, cache = model_of("Llama"), pages.cache("Llama")
    model.set_attn_implementation("kvatlas")
    with torch.no_grad(), DecodeGraph(model, cache) as graph:
        first = model(**prompts(), past_key_values=cache).logits[:, -1:].argmax(-1)
        (table,) = cache.batch.tables
        narrow = table.ids.clone()
        place = torch.empty(2 * narrow.numel(), dtype=torch.long)
        table._ids = place[: narrow.numel()].view(narrow.shape).copy_(narrow)
        model(first, past_key_values=cache)
        step = graph._step
        assert step is not None
        step._graph = cast("torch.cuda.CUDAGraph", object())  # which nobody can replay
        wide = torch.cat((table.ids, torch.full_like(narrow, NO_BLOCK)), 1)
        table._ids = place.view(wide.shape).copy_(wide)
        model(first, past_key_values=cache)
        assert not graph.captured
        model.set_attn_implementation("eager")
        model(first, past_key_values=cache)
        assert graph.steps == 2, "attention that needs all rows has them"
