"""Tokens of real models that begin with what other engines left in a tier, beside runs without."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvatlas.engines.transformers import AtlasCache, PrefixReuse, make_plan
from kvatlas.errors import AtlasError, Code
from kvatlas.pool import BlockPool, PrefixIdentity
from tests.engines.guarded import Guarded
from tests.engines.test_prefix_reuse import DEEP, NEW
from tests.engines.zoo import VOCABULARY, model_of, seeded
from tests.tier import mooncake_world

QUICK = ["Llama", "Gemma3", "Qwen3Next"]
NAMES = [*QUICK, "DeepseekV3", "Llama4", "GptOss", "FalconH1", "NemotronH", "Lfm2", "KimiLinear"]
WHOLE = ("Llama", "DeepseekV3")
"""Models that see all tokens: whole blocks of these are found, and no others."""
BLOCK = 16
UNLIKE: tuple[dict[str, Any], ...] = (
    {"layout": "LBNHC", "max_len": 140},
    {"layout": "BLNHC", "max_len": 180, "block_size": 32},
)


@contextmanager
def engine(name: str, pages: Guarded, where: Any, number: int, **about: Any) -> Iterator[Any]:
    """One of two engines of unlike order, block size and longest request, on one tier."""
    options = UNLIKE[number] if name in QUICK[:2] else {**UNLIKE[number], "layout": "LBNHC"}
    try:
        plan = make_plan(model_of(name).config, batch=3, prefix_caching=True, **options)
    except AtlasError:  # states want blocks of their own size
        options = {key: value for key, value in options.items() if key != "block_size"}
        plan = make_plan(model_of(name).config, batch=3, prefix_caching=True, **options)
    options = {"block_size": BLOCK, **about}
    if "://" in str(where):
        options = {"staging": 1 << 20, "deadline": 30.0, **options}
    else:
        options = {"memory": "1MiB", **options}
    cache = pages.bind(plan, BlockPool(plan, null_block=False))
    made = PrefixReuse(model_of(name), cache, where, **options)
    try:
        yield made
    finally:
        made.close()
        assert all(ids.free == ids.count for ids in made.pool.ids.values())


def said_to(name: str, prompt: list[int], cache: AtlasCache | None = None) -> list[int]:
    """A prompt and what a model says to it, which may be the token that pads, and counts."""
    ids = torch.tensor([prompt])
    about: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "past_key_values": cache}
    made = model_of(name).generate(ids, max_new_tokens=NEW, do_sample=False, **about)
    tokens: list[int] = made[0].tolist()
    return tokens


def ask(name: str, reuse: PrefixReuse, prompt: list[int], **about: Any) -> tuple[int, list[int]]:
    """How many tokens were found, and what is said then: the same as without a tier."""
    model_of(name).set_attn_implementation("kvatlas")
    found = reuse.begin(prompt, **about)
    said = said_to(name, prompt, reuse.cache)
    reuse.end(said)
    model_of(name).set_attn_implementation("eager")
    assert said == said_to(name, prompt)
    return found, said


def prompts() -> list[list[int]]:
    return torch.randint(1, VOCABULARY, (3, 130), generator=seeded(33)).tolist()


def converse(name: str, pages: Guarded, where: Any) -> None:
    """What one engine has said, the other goes on from; and back."""
    first, more, last = prompts()
    with engine(name, pages, where, 0) as one:
        found, said = ask(name, one, first[:50])
        assert found == 0
    computed = len(said) - 1  # the last token was never given to the model
    with engine(name, pages, where, 1) as other:
        found, said = ask(name, other, said + more[:20])
        assert found == (computed // BLOCK * BLOCK if name in WHOLE else computed)
        assert other.tiered is not None
        assert other.tiered.counts["loaded"] == 1
    with engine(name, pages, where, 0) as one:
        assert ask(name, one, [*said[:3], *last[:40]])[0] == 0
        found, _ = ask(name, one, said + last[:9])
        computed = len(said) - 1
        assert found == (computed // BLOCK * BLOCK if name in WHOLE else computed)


@pytest.mark.parametrize("name", NAMES if DEEP else QUICK)
def test_tokens_behind_what_another_engine_stored_are_those_without_it(
    name: str, pages: Guarded, tmp_path: Path
) -> None:
    for where in (f"folder://{tmp_path}/store", tmp_path / "file"):
        converse(name, pages, where)


@pytest.mark.skipif(bool(mooncake_world.missing()), reason=mooncake_world.missing() or "it is here")
def test_tokens_agree_through_mooncake_store(pages: Guarded) -> None:
    with mooncake_world.running() as master:
        keeper = master.store()  # the memory of engines goes when they do
        for name in QUICK if DEEP else QUICK[2:]:
            converse(name, pages, f"mooncake://{master.address}")
        keeper.close()
