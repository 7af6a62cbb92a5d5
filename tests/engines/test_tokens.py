"""Greedy tokens on planned pages are those of transformers' own cache: every model and order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest
import torch

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.pool import NO_BLOCK
from tests.engines.guarded import Guarded
from tests.engines.side_by_side import NAME as SIDE_BY_SIDE
from tests.engines.side_by_side import SideBySide
from tests.engines.zoo import (
    LATENTS_OF_V32,
    NEW,
    PROMPTS,
    ZOO,
    behind,
    generate,
    model_of,
    own_tokens,
    prompts,
)
from tests.profiles import DEEP

ORDERS = [layout.order for layout in ENGINE_LAYOUTS]
PACKS = (1, 2, 4)
SOME = 18
"""Tokens with which sequences cross blocks and leave windows; all of them are generated once."""
Way = dict[str, Any]
Case = TypeVar("Case")


def by_turns(cases: Iterable[Case], turn: int, of: int = 3) -> list[Case]:
    """Every third case, say; all in the deep profile, which `make test-transformers` runs."""
    return list(cases) if DEEP else list(cases)[turn::of]


def ways(name: str) -> list[Way]:
    """Every order, and every pack where there is something to pack.

    Heads outside blocks and states in the same block do not go together: in LHBNC states
    lie in a pool of their own, unless there is one head for all, as in MLA.
    """
    tiny = ZOO[name]
    if not (tiny.recurrent and tiny.attention):
        return [{"layout": order} for order in ORDERS]
    packed = [{"layout": order, "pack": pack} for order in ORDERS for pack in PACKS]
    if name != "KimiLinear":
        packed = [way for way in packed if way["layout"] != "LHBNC"]
    return [
        *packed,
        {"layout": "LHBNC", "states": "apart"},
        {"layout": "BHLNC", "states": "shared"},
    ]


def some_ways(name: str) -> list[Way]:
    """Every order once with some pack: attention that reads pages takes its time."""
    packed = [way for way in ways(name) if "pack" in way]
    turns = [way for i, way in enumerate(packed) if PACKS.index(way["pack"]) == i // len(PACKS) % 3]
    rest = [way for way in ways(name) if way["layout"] not in {turn["layout"] for turn in turns}]
    return [*turns, *rest]


def in_turn(name: str, every: list[Way]) -> list[Way]:
    """Every third way, another third for the next model; all of them in the deep profile."""
    return every if DEEP else every[list(ZOO).index(name) % 3 :: 3]


@pytest.mark.parametrize("name", by_turns(ZOO, 0))
def test_the_models_say_something(name: str) -> None:
    """Tokens vary, differ from row to row, and depend on what was kept."""
    own = own_tokens(name)
    assert own.shape == (len(PROMPTS), NEW)
    assert all(len(row.unique()) > 8 for row in own)
    assert len({tuple(row.tolist()) for row in own}) == len(PROMPTS)


def check_tokens(name: str, chosen: list[Way], attention: str, pages: Guarded) -> None:
    own = own_tokens(name)[:, :SOME]
    caches = [pages.cache(name, **way) for way in chosen]
    inputs = {key: rows.repeat(len(caches), 1) for key, rows in prompts().items()}
    model_of(name).set_attn_implementation(attention)
    tokens = generate(name, SideBySide(caches), **inputs, max_new_tokens=SOME)
    for way, cache, rows in zip(chosen, caches, tokens.chunk(len(caches)), strict=True):
        assert cache.plan.layout == way["layout"]
        assert cache.plan.pack == way.get("pack", cache.plan.pack)
        assert torch.equal(rows, own), way
        for table in cache.batch.tables:
            blocks = min(table.sequences, key=len)
            assert table.recurrent or len(blocks) > 1 or table.block > SOME
            assert table.visibility.window is None or blocks[0] == NO_BLOCK


@pytest.mark.parametrize("name", by_turns(ZOO, 0))
def test_tokens_in_every_order_and_pack(name: str, pages: Guarded) -> None:
    check_tokens(name, in_turn(name, ways(name)), "eager", pages)


@pytest.mark.parametrize("name", by_turns((n for n, tiny in ZOO.items() if tiny.attention), 1))
def test_tokens_from_pages_in_every_order(name: str, pages: Guarded) -> None:
    chosen = some_ways(name)
    assert {way["layout"] for way in chosen} == set(ORDERS)
    check_tokens(name, in_turn(name, chosen), SIDE_BY_SIDE, pages)


DIRECT = [(name, "kvatlas") for name in ZOO]
DIRECT += [(name, "eager") for name in ("Gemma2", "GptOss", "Mamba2")]  # which have no sdpa
DIRECT += [(name, "sdpa") for name in ("Mistral", "Llama4", "DeepseekV3", "Qwen3Next", "FalconH1")]


@pytest.mark.parametrize(("name", "attention"), by_turns(DIRECT, 1))
def test_tokens_from_generate_itself(name: str, attention: str, pages: Guarded) -> None:
    own = own_tokens(name)
    model_of(name).set_attn_implementation(attention)
    cache = pages.cache(name, **ways(name)[list(ZOO).index(name) % len(ways(name))])
    assert torch.equal(generate(name, cache), own)
    if attention == "kvatlas" and ZOO[name].attention:
        longest = max(PROMPTS)
        assert cache.lengths == [cache.seen - longest + length for length in PROMPTS]


needs_latents = pytest.mark.skipif(
    not LATENTS_OF_V32, reason="this transformers caches no latents of DeepSeek-V3.2"
)


@needs_latents
@pytest.mark.parametrize("attention", ["eager", "sdpa", "kvatlas"])
def test_tokens_that_an_indexer_selects(attention: str, pages: Guarded) -> None:
    name = "DeepseekV32"
    own, model = own_tokens(name), model_of(name)
    model.set_attn_implementation(attention)
    cache = pages.cache(name, layout="BLNHC")
    assert all(layer.indexed for layer in cache.layers)
    assert torch.equal(generate(name, cache), own)
    cache.reset()
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 1 << 20
    try:
        assert not torch.equal(generate(name, cache), own)
    finally:
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = model.config.index_topk


@needs_latents
@pytest.mark.parametrize("layout", ORDERS)
def test_selected_records_give_the_tokens_of_their_rows(layout: str, pages: Guarded) -> None:
    """Read from pages of fp8 records, and by transformers' attention over gathered rows."""
    name, tokens = "DeepseekV32 of records", []
    for attention in ("eager", "kvatlas"):
        model_of(name).set_attn_implementation(attention)
        cache = pages.cache(name, layout=layout, kv_dtype="fp8")
        spec = cache.layers[0].pages.spec
        assert spec.cache == "fp8_ds_mla"
        tokens.append(generate(name, cache, max_new_tokens=SOME))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", by_turns(ZOO, 2))
def test_a_wrong_cache_says_something_else(name: str, pages: Guarded) -> None:
    """The control: pages whose bytes are elsewhere on the way change the tokens."""
    own = own_tokens(name)
    model_of(name).set_attn_implementation("kvatlas")
    cache = pages.cache(name)
    first = generate(name, cache, max_new_tokens=4)
    assert torch.equal(first, own[:, :4])
    for pool in cache.cache.pools.values():
        pool.copy_(pool.roll(pool.numel() // 4 // 64 * 64))
    more = generate(name, cache, **behind(first), max_new_tokens=12)
    assert not torch.equal(more, own[:, 4:16])


def test_heads_outside_blocks_do_not_pack() -> None:
    with pytest.raises(AtlasError) as refusal:
        Guarded().cache("Qwen3Next", layout="LHBNC", pack=2)
    assert refusal.value.code is Code.BAD_PACK
