"""Beams, prefixes, fewer sequences, cropping, freed blocks: what a cache does besides growing."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import pytest
import torch

from kvatlas.cache import allocate
from kvatlas.engines.transformers import AtlasCache, make_plan
from kvatlas.engines.transformers.supported_versions import warn_of_untried_version
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels import zero_blocks
from kvatlas.planning import plan
from kvatlas.specs import GatedDeltaNet, KimiDelta, Mamba2
from tests.engines.guarded import LONGEST, Guarded
from tests.engines.zoo import (
    LATENTS_OF_V32,
    NEW,
    OTHERS,
    PROMPTS,
    ZOO,
    behind,
    generate,
    model_of,
    own_tokens,
    prompts,
)
from tests.profiles import DEEP

BEAMS = 3
SHORT = 18


def in_turn(*cases: str) -> list[tuple[str, str]]:
    """Every other case, on pages and on gathered rows by turns; in the deep profile, all on both.

    `make test-transformers`, which is a step of `make ci`, runs the deep profile.
    """
    both = ("kvatlas", "eager")
    if DEEP:
        return [(case, attention) for case in cases for attention in both]
    return [(case, both[i % 2]) for i, case in enumerate(cases[::2])]


@lru_cache
def own_beams(name: str) -> torch.Tensor:
    """What beam search finds on transformers' own cache."""
    model_of(name).set_attn_implementation("eager")
    return generate(name, max_new_tokens=SHORT, num_beams=BEAMS)


@lru_cache
def own_row(name: str, row: int) -> torch.Tensor:
    """What the model says to one prompt alone, without padding beside it."""
    model_of(name).set_attn_implementation("eager")
    return generate(name, **row_of(row), max_new_tokens=SHORT)


def row_of(row: int) -> dict[str, torch.Tensor]:
    """One of the prompts."""
    return {key: rows[row : row + 1] for key, rows in prompts().items()}


def on_pages(name: str, cache: AtlasCache, attention: str, **options: Any) -> torch.Tensor:
    model_of(name).set_attn_implementation(attention)
    return generate(name, cache, **{"max_new_tokens": SHORT, **options})


def owned(cache: AtlasCache) -> int:
    """Blocks that some sequence owns."""
    return sum(blocks.count - blocks.free for blocks in cache.blocks.values())


@pytest.mark.parametrize(
    ("name", "attention"),
    in_turn("Llama", "Gemma3", "DeepseekV3", "Qwen3Next", "FalconH1", "Lfm2"),
)
def test_beam_search(name: str, attention: str, pages: Guarded) -> None:
    cache = pages.cache(name, batch=BEAMS * len(PROMPTS))
    beams = on_pages(name, cache, attention, num_beams=BEAMS)
    assert torch.equal(beams, own_beams(name))
    assert cache.batch_size == BEAMS * len(PROMPTS)


def test_beams_share_blocks_until_they_write(pages: Guarded) -> None:
    cache = pages.cache("Llama", batch=12)
    model_of("Llama").set_attn_implementation("kvatlas")
    ids = prompts()["input_ids"][:1].repeat(1, 2)[:, :40]
    with torch.no_grad():
        model_of("Llama")(ids, past_key_values=cache)
        assert owned(cache) == 3
        cache.batch_repeat_interleave(4)
        assert owned(cache) == 3
        model_of("Llama")(torch.tensor([[5], [6], [7], [8]]), past_key_values=cache)
    table = cache.batch.tables[0].sequences
    assert owned(cache) == 2 + 4
    assert len({tuple(row[:2]) for row in table}) == 1
    assert len({row[2] for row in table}) == 4


@pytest.mark.parametrize(
    ("name", "attention"),
    in_turn("Llama", "Mistral", "Llama4", "Qwen3Next", "DeepseekV3", "Jamba"),
)
def test_going_on_from_a_prefix(name: str, attention: str, pages: Guarded) -> None:
    """Generate, then again with what was said and more; the same as transformers' own cache."""
    from transformers import DynamicCache

    def two_turns(cache: Any) -> torch.Tensor:
        first = generate(name, cache, max_new_tokens=14)
        more = torch.cat((first, first.flip(1)[:, :7]), dim=1)
        return generate(name, cache, **behind(more), max_new_tokens=14)

    model = model_of(name)
    model.set_attn_implementation("eager")
    expected = two_turns(DynamicCache(config=model.config))
    model.set_attn_implementation(attention)
    assert torch.equal(two_turns(pages.cache(name)), expected)


@pytest.mark.parametrize("name", ["Gemma2", "Llama4", "Qwen3_5", "FalconH1"][:: 1 if DEEP else 2])
def test_reset_and_again(name: str, pages: Guarded) -> None:
    """Nothing of the first use is seen in the second, and every block was given back."""
    cache = pages.cache(name, layout="BHLNC")
    expected = own_tokens(name)[:, :SHORT]
    assert torch.equal(on_pages(name, cache, "kvatlas"), expected)
    cache.reset()
    assert owned(cache) == 0
    assert cache.lengths == []
    for turn, attention in enumerate(("kvatlas", "eager")):
        tokens = on_pages(name, cache, attention, **row_of(turn))
        assert torch.equal(tokens, own_row(name, turn))
        cache.reset()


@pytest.mark.parametrize(
    "name", ["Llama", "GptOss", "KimiLinear", "NemotronH"][:: 1 if DEEP else 2]
)
def test_fewer_sequences(name: str, pages: Guarded) -> None:
    cache = pages.cache(name)
    expected = own_tokens(name)[:, :SHORT]
    first = on_pages(name, cache, "kvatlas", max_new_tokens=10)
    before = owned(cache)
    kept = torch.tensor([2, 0])
    cache.batch_select_indices(kept)
    assert owned(cache) < before
    inputs = {key: rows[kept] for key, rows in behind(first).items()}
    more = on_pages(name, cache, "kvatlas", **inputs, max_new_tokens=SHORT - 10)
    assert torch.equal(more, expected[kept][:, 10:])


@pytest.mark.parametrize("name", ["Llama", "DeepseekV3"])
def test_taking_tokens_back(name: str, pages: Guarded) -> None:
    cache = pages.cache(name)
    expected = own_tokens(name)[:, :SHORT]
    first = on_pages(name, cache, "kvatlas")
    cache.crop(-11)
    assert cache.seen == max(PROMPTS) + SHORT - 1 - 11
    inputs = behind(first[:, : SHORT - 11])
    more = on_pages(name, cache, "kvatlas", **inputs, max_new_tokens=11)
    assert torch.equal(more, expected[:, SHORT - 11 :])
    owners = owned(cache)
    cache.crop(-cache.seen)
    assert owned(cache) == 0 < owners


def test_what_cannot_be_taken_back(pages: Guarded) -> None:
    for name in ("Mistral", "Qwen3Next"):
        cache = pages.cache(name)
        on_pages(name, cache, "kvatlas", max_new_tokens=NEW)
        lengths, owners = cache.lengths, owned(cache)
        with pytest.raises(AtlasError) as refusal:
            cache.crop(-30)
        assert refusal.value.code is Code.CANNOT_TAKE_BACK
        assert (cache.lengths, owned(cache)) == (lengths, owners)
    with pytest.raises(AtlasError) as refusal:
        cache.activate_past_recording()
    assert refusal.value.code is Code.CANNOT_TAKE_BACK


def test_a_window_that_is_told_to_keeps_its_past(pages: Guarded) -> None:
    cache = pages.cache("Mistral")
    expected = own_tokens("Mistral")
    cache.activate_past_recording()
    first = on_pages("Mistral", cache, "kvatlas", max_new_tokens=NEW)
    cache.crop(-30)
    inputs = behind(first[:, : NEW - 30])
    more = on_pages("Mistral", cache, "kvatlas", **inputs, max_new_tokens=30)
    assert torch.equal(more, expected[:, NEW - 30 :])


@pytest.mark.parametrize("name", ["Mistral", "Llama4"])
def test_windows_and_chunks_give_blocks_back(name: str, pages: Guarded) -> None:
    """A plan for few tokens at once holds less than all of them, and that is enough."""
    new, longest = 64, max(PROMPTS) + 64
    tight = make_plan(model_of(name).config, batch=3, max_len=longest, in_flight=max(PROMPTS))
    ample = make_plan(model_of(name).config, batch=3, max_len=longest)
    assert tight.num_blocks < ample.num_blocks
    model_of(name).set_attn_implementation("eager")
    expected = generate(name, max_new_tokens=new)
    tokens = on_pages(name, pages.bind(tight), "kvatlas", max_new_tokens=new)
    assert torch.equal(tokens, expected)


def states_of(cache: AtlasCache) -> list[torch.Tensor]:
    """Every byte of the blocks that state groups own."""
    states = []
    for table in cache.batch.tables:
        if table.recurrent:
            ids = table.ids.flatten()
            states += [layer.tensor[ids] for layer in table.layers]
    return states


@pytest.mark.parametrize("layout", ["BHLNC", "BLNHC", "LBHNC"][:: 1 if DEEP else 3])
@pytest.mark.parametrize("name", ["Qwen3Next", "FalconH1", "Lfm2"])
def test_a_freed_block_shows_no_old_bytes(name: str, layout: str, pages: Guarded) -> None:
    """Blocks that held attention become states: they are clear before anybody reads them."""
    cache = pages.cache(name, layout=layout, pack=2)
    assert len(cache.plan.pools) == 1 < len(cache.plan.groups)
    on_pages(name, cache, "kvatlas", max_new_tokens=12)
    held = {
        b for t in cache.batch.tables if not t.recurrent for blocks in t.sequences for b in blocks
    }
    cache.reset()
    while held and cache.blocks[0].take() not in held:
        pass  # blocks that held states before, out of the way
    cache.batch.admit(len(PROMPTS))
    taken = {b for t in cache.batch.tables if t.recurrent for blocks in t.sequences for b in blocks}
    assert taken & held
    assert all(bool((rows == 0).all()) for rows in states_of(cache))


def test_without_clearing_old_bytes_would_show(
    pages: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control for the test above."""
    monkeypatch.setattr("kvatlas.engines.transformers.block_table.zero_blocks", lambda *_: None)
    cache = pages.cache("Qwen3Next", layout="BHLNC", pack=2)
    cache.batch.admit(len(PROMPTS))
    assert not all(bool((rows == 0).all()) for rows in states_of(cache))
    assert zero_blocks.__name__ == "zero_blocks"


@pytest.mark.parametrize("name", ["Qwen3Next", "Bamba", "KimiLinear"])
def test_states_lie_where_the_plan_says(name: str, pages: Guarded) -> None:
    """Bytes of the pages, read through the plan alone, are the states of transformers."""
    from transformers import DynamicCache

    model = model_of(name)
    model.set_attn_implementation("eager")
    theirs = DynamicCache(config=model.config)
    generate(name, theirs, max_new_tokens=SHORT)
    mine = pages.cache(name, layout="BHLNC", pack=2)
    generate(name, mine, max_new_tokens=SHORT)
    for layer in (layer for region in mine.plan.regions for layer in region.layers):
        state = theirs.layers[layer.index]
        if not isinstance(layer.spec, GatedDeltaNet | KimiDelta | Mamba2):
            continue
        page = mine.cache[layer.name]
        blocks = mine.layers[layer.index].state_tables[0].ids[:, 0]
        taps = layer.spec.kernel - 1
        conv = page.conv[blocks].transpose(1, 2)
        torch.testing.assert_close(conv, state.conv_states[0][..., -taps:])
        ssm = page.ssm[blocks]
        turned = ssm.transpose(-1, -2) if name in ("Qwen3Next", "KimiLinear") else ssm
        torch.testing.assert_close(turned, state.recurrent_states[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layout", "attention"), in_turn("BLHNC", "BHLNC"))
def test_states_that_are_cut_by_heads(layout: str, attention: str, pages: Guarded) -> None:
    """Parts of a state lie in blocks of unlike groups; some rows of its conv are in all of them."""
    cache = pages.cache("Bamba in parts", layout=layout, states="shared")
    layers = [layer for region in cache.plan.regions for layer in region.layers]
    cut = [layer.name for layer in layers if cache.plan.parts(layer.name) == 4]
    assert cut
    homes = {cache.plan.region_of(cut[0], part)[0].group for part in range(4)}
    assert len(homes) > 1
    assert torch.equal(
        on_pages("Bamba in parts", cache, attention), own_tokens("Bamba in parts")[:, :SHORT]
    )


def test_every_step_can_be_taken_without_generate(pages: Guarded) -> None:
    """Plain forward calls, one token or several at a time."""
    model = model_of("Qwen3Next")
    model.set_attn_implementation("kvatlas")
    ids = prompts()["input_ids"][:1]
    cache = pages.cache("Qwen3Next", batch=1)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts = [
            model(part, past_key_values=cache).logits for part in torch.split(ids, [9, 1, 1, 26], 1)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-3, atol=1e-3)
    assert cache.lengths == [ids.shape[1]]


@pytest.mark.parametrize("name", ["Llama", "GptOss", "Gemma2", "Llama4", "DeepseekV3"])
def test_without_a_cache_attention_is_plain(name: str) -> None:
    model = model_of(name)
    inputs = prompts()
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**inputs, use_cache=False).logits[seen]
        model.set_attn_implementation("kvatlas")
        logits = model(**inputs, use_cache=False).logits[seen]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_pool_runs_out_of_blocks(pages: Guarded) -> None:
    cache = pages.cache("Llama", batch=1, max_len=112)
    with pytest.raises(AtlasError) as refusal:
        on_pages("Llama", cache, "kvatlas", max_new_tokens=NEW)
    assert refusal.value.code is Code.NO_BLOCKS
    cache.reset()
    assert owned(cache) == 0


def test_a_batch_that_does_not_fit_takes_nothing(pages: Guarded) -> None:
    cache = pages.cache("Mamba2", batch=2)
    cache.batch.admit(3)  # plans keep one block more than they need
    before = owned(cache)
    with pytest.raises(AtlasError) as refusal:
        cache.batch_repeat_interleave(2)
    assert refusal.value.code is Code.NO_BLOCKS
    assert (owned(cache), cache.batch_size) == (before, 3)
    cache.reset()
    with pytest.raises(AtlasError):
        cache.batch.admit(4)
    assert (owned(cache), cache.batch_size) == (0, -1)


def test_refusals(pages: Guarded) -> None:
    cache = pages.cache("Llama")
    on_pages("Llama", cache, "kvatlas", max_new_tokens=2)
    model = model_of("Llama")
    with pytest.raises(AtlasError) as refusal:
        model(torch.tensor([[1]]), past_key_values=cache)
    assert refusal.value.code is Code.BAD_TENSOR
    with pytest.raises(AtlasError) as refusal:
        AtlasCache(allocate(plan("Qwen3-8B", memory="64MiB", tp=2, max_len=16)))
    assert refusal.value.code is Code.BAD_TOPOLOGY
    with pytest.raises(AtlasError) as refusal:
        AtlasCache(allocate(plan("DeepSeek-V3.2", memory="64MiB", max_len=64)))
    assert refusal.value.code is Code.ENGINE_REFUSES


def test_padding_that_is_not_on_the_left_is_refused(pages: Guarded) -> None:
    model = model_of("Llama")
    model.set_attn_implementation("kvatlas")
    inputs = prompts()
    with pytest.raises(AtlasError) as refusal:
        model(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"].flip(1),
            past_key_values=pages.cache("Llama"),
        )
    assert refusal.value.code is Code.ENGINE_REFUSES


def test_a_mask_that_the_plan_does_not_know_is_refused(pages: Guarded) -> None:
    """Pages planned for one window, read by a model with another."""
    model = model_of("Mistral")
    model.set_attn_implementation("kvatlas")
    config = type(model.config)(**{**model.config.to_dict(), "sliding_window": 12})
    cache = pages.bind(make_plan(config, batch=3, max_len=LONGEST))
    with pytest.raises(AtlasError) as refusal:
        generate("Mistral", cache)
    assert refusal.value.code is Code.ENGINE_REFUSES


def test_the_zoo_is_whole() -> None:
    assert len(ZOO) == 18 + LATENTS_OF_V32
    assert not set(ZOO) & set(OTHERS)


def test_an_untried_transformers_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"tested with transformers 5\.17 to 5\.23.* 5\.24\.1"):
        warn_of_untried_version("5.24.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untried_version()  # the installed release
