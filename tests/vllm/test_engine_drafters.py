"""Drafters that keep caches of their own: what was read has them guess as if nothing had moved.

Tokens are right whatever a drafter guesses; its guesses are what its cache shows in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.comparing import (
    Undisturbed,
    assert_nothing_held,
    assert_same,
    atlas,
    prompt,
    split,
)
from tests.vllm.drafters import (
    GUESSED,
    with_draft_model,
    with_eagle,
    with_eagle_over_windows,
    with_mtp,
)
from tests.vllm.engine_process import engine
from tests.vllm.models import checkpoint

LENGTHS = (2, 63, 64, 65, 127, 128, 129, 257, 517)
MOST_OTHERS = 0.05
"""Of all guesses: vLLM alone makes some others too where a prompt is computed in parts, and with
windows one entry of the cache is another. Without the drafter's cache most of them are others."""


@pytest.mark.parametrize("made", [with_draft_model, with_eagle, with_eagle_over_windows, with_mtp])
def test_what_is_read_has_drafters_guess_the_same(
    made: Callable[[Path], tuple[Path, dict[str, Any]]], checkpoints: Path
) -> None:
    """With prefixes cached each prompt begins with the last one, and only its rest is read."""
    model, guessing = made(checkpoints)
    with engine(model, name="undisturbed", core="0|1", speculative_config=guessing) as alone:
        right = {
            (seed, length): alone.generate(prompt(length, seed))
            for seed in (1, 2)
            for length in LENGTHS
        }
    for caching in (False, True):
        about: dict[str, Any] = {"speculative_config": guessing, "enable_prefix_caching": caching}
        about["connector"] = atlas()
        with (
            engine(model, name="one", core="0", block_size=64, **about) as first,
            engine(model, name="other", core="1", block_size=128, **about) as second,
        ):
            guesses: list[tuple[list[int], list[int]]] = []
            for (seed, length), answer in right.items():
                way = (first, second) if seed == 1 else (second, first)
                got = split(*way, prompt(length, seed))
                assert_same(answer, got, (caching, seed, length))
                assert not way[1].facts()["warned"]
                guesses += zip(answer.drafts, got.drafts, strict=False)
            others = sum(one != other for one, other in guesses)
            assert others <= MOST_OTHERS * len(guesses), (others, len(guesses))
            assert len(guesses) >= len(right)
            if not caching:
                assert_nothing_held(first, second)


def test_engines_with_and_without_a_drafter_do_not_read_from_each_other(checkpoints: Path) -> None:
    """The one lacks what the other's drafter would need, or has what nobody would read."""
    model, guessing = with_eagle(checkpoints)
    ours = atlas("recompute", lease_seconds=1.0)
    with (
        engine(model, name="with", core="0", connector=ours, speculative_config=guessing) as first,
        engine(model, name="without", core="1", connector=ours) as second,
    ):
        for way in ((first, second), (second, first)):
            answer = way[1].generate(prompt(191))
            got = split(*way, prompt(191))
            assert_same(answer, got, way[1].process.name)
            assert "model.layers.3.self_attn.attn" in way[1].facts()["warned"], (
                "the drafter's layer"
            )
        assert_nothing_held(first, second)


def test_a_drafter_that_keeps_no_cache_is_nobody_elses_affair(
    checkpoints: Path, right: Undisturbed
) -> None:
    model = checkpoint("llama", checkpoints)
    looking_back = {"method": "ngram", "num_speculative_tokens": GUESSED, "prompt_lookup_max": 2}
    about: dict[str, Any] = {"connector": atlas(), "block_size": 64}
    with (
        engine(model, name="with", core="0", speculative_config=looking_back, **about) as first,
        engine(model, name="without", core="1", **about) as second,
    ):
        for way in ((first, second), (second, first)):
            assert_same(right("llama")[257], split(*way, prompt(257)), way[1].process.name)
            assert not way[1].facts()["warned"]
        assert_nothing_held(first, second)
