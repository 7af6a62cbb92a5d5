"""Greedy tokens on planned pages are those of transformers' own cache: every model and order."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import ENGINE_LAYOUTS
from tests.engines.guarded import Guarded
from tests.engines.side_by_side import NAME as SIDE_BY_SIDE
from tests.engines.side_by_side import SideBySide
from tests.engines.zoo import NEW, PROMPTS, ZOO, generate, model_of, prompts

ORDERS = [layout.order for layout in ENGINE_LAYOUTS]
PACKS = (1, 2, 4)
Way = dict[str, Any]


@lru_cache
def own_tokens(name: str) -> torch.Tensor:
    """What the model says on transformers' own cache."""
    model_of(name).set_attn_implementation("eager")
    return generate(name)


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
    apart = [{"layout": order, "states": "apart"} for order in ("LHBNC", "BLNHC")]
    shared = [{"layout": order, "states": "shared"} for order in ("BLHNC", "BHLNC")]
    return [*packed, *apart, *shared]


@pytest.mark.parametrize("name", ZOO)
def test_the_models_say_something(name: str) -> None:
    """Tokens vary, differ from row to row, and depend on what was kept."""
    own = own_tokens(name)
    assert own.shape == (len(PROMPTS), NEW)
    assert all(len(row.unique()) > 8 for row in own)
    assert len({tuple(row.tolist()) for row in own}) == len(PROMPTS)


@pytest.mark.parametrize("reads", ["pages", "gathered"])
@pytest.mark.parametrize("name", ZOO)
def test_tokens_in_every_order_and_pack(name: str, reads: str, pages: Guarded) -> None:
    own = own_tokens(name)
    model = model_of(name)
    caches = [pages.cache(name, **way) for way in ways(name)]
    inputs = {key: rows.repeat(len(caches), 1) for key, rows in prompts().items()}
    model.set_attn_implementation(SIDE_BY_SIDE if reads == "pages" else "eager")
    found = generate(name, SideBySide(caches), **inputs)
    for way, cache, rows in zip(ways(name), caches, found.chunk(len(caches)), strict=True):
        assert cache.plan.layout == way["layout"]
        assert cache.plan.pack == way.get("pack", cache.plan.pack)
        assert torch.equal(rows, own), way


@pytest.mark.parametrize("attention", ["kvatlas", "eager", "sdpa"])
@pytest.mark.parametrize("name", ZOO)
def test_tokens_from_generate_itself(name: str, attention: str, pages: Guarded) -> None:
    own = own_tokens(name)
    try:
        model_of(name).set_attn_implementation(attention)
    except ValueError:
        pytest.skip("this model has no such attention")
    at = list(ZOO).index(name) + len(attention)
    way = ways(name)[at % len(ways(name))]
    cache = pages.cache(name, **way)
    assert torch.equal(generate(name, cache), own), way
    if attention == "kvatlas" and ZOO[name].attention:
        longest = max(PROMPTS)
        assert cache.lengths == [cache.seen - longest + length for length in PROMPTS]


@pytest.mark.parametrize("name", ZOO)
def test_a_wrong_cache_says_something_else(name: str, pages: Guarded) -> None:
    """The control: one block of bytes that is lost on the way changes the tokens."""
    own = own_tokens(name)
    model_of(name).set_attn_implementation("kvatlas")
    cache = pages.cache(name)
    first = generate(name, cache, max_new_tokens=8)
    assert torch.equal(first, own[:, :8])
    ids = torch.cat((prompts()["input_ids"], first), dim=1)
    mask = torch.nn.functional.pad(prompts()["attention_mask"], (0, first.shape[1]), value=1)
    for pool in cache.cache.pools.values():
        pool.zero_()
    more = generate(name, cache, input_ids=ids, attention_mask=mask, max_new_tokens=NEW - 8)
    assert not torch.equal(more, own[:, 8:])


def test_heads_outside_blocks_do_not_pack() -> None:
    with pytest.raises(AtlasError) as refusal:
        Guarded().cache("Qwen3Next", layout="LHBNC", pack=2)
    assert refusal.value.code is Code.BAD_PACK
