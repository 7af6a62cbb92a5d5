"""Pairs of real engines: greedy tokens and logprobs are those of one that nobody disturbs.

Engines start in half a minute, so each test takes two and asks them everything; both are
prefill and decode engine in turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.comparing import (
    assert_nothing_held,
    assert_same,
    atlas,
    prompt,
    split,
    undisturbed,
)
from tests.vllm.engine_process import engine
from tests.vllm.models import checkpoint

EDGES = (2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 517)
"""Around the edges of blocks of 64 and 128, and of windows of 64."""


def both_ways(name: str, folder: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Every length from either engine to the other, and another prompt's cache as a control."""
    model = checkpoint(name, folder)
    prompts = [prompt(length) for length in EDGES]
    right = undisturbed(model, prompts)
    with (
        engine(model, name="one", core="0", connector=atlas(), **one) as first,
        engine(model, name="other", core="1", connector=atlas(), **other) as second,
    ):
        for way in ((first, second), (second, first)):
            for tokens, answer in zip(prompts, right, strict=True):
                got = split(*way, tokens)
                assert_same(answer, got, (name, way[0].process.name, len(tokens)))
        forged, real = (
            first.prefill(one).params or {}
            for one in (prompt(len(prompts[-1]), seed=2), prompts[-1])
        )
        got = second.generate(prompts[-1], params=forged)
        assert_same(right[-1], got, "another prompt's cache is not read")
        forged = first.prefill(prompt(len(prompts[-1]), seed=2)).params or {}
        forged["kvatlas"]["prompt"] = real["kvatlas"]["prompt"]
        wrong = second.generate(prompts[-1], params=forged)
        assert wrong.tokens != right[-1].tokens, "what was read is not used"
        assert_same(right[-1], second.generate(prompts[-1], params=real), "the right one")
        assert_nothing_held(first, second)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "granite", "falcon_h1"])
def test_unlike_blocks_both_ways(name: str, checkpoints: Path) -> None:
    both_ways(name, checkpoints, {"block_size": 64}, {"block_size": 128})


@pytest.mark.parametrize("name", ["llama", "granite"])
def test_unlike_tensor_parallelism_both_ways(name: str, checkpoints: Path) -> None:
    wide = {"tensor_parallel_size": 2, "block_size": 64}
    both_ways(name, checkpoints, wide, {"block_size": 128})


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prefixes_that_are_there_are_not_read_again(name: str, checkpoints: Path) -> None:
    """Also by later requests: a block that windows have filled in part is found by none.

    Every prompt shares its beginning with the next, shorter or longer, at either engine.
    """
    model = checkpoint(name, checkpoints)
    whole = prompt(700)
    tails = [(length, prompt(40, seed=length)) for length in (600, 150, 300, 192, 129, 420, 64)]
    prompts = [whole[:length] + tail for length, tail in tails]
    prompts += [whole[:length] for length in (640, 150, 151, 215, 300, 301)]
    right = undisturbed(model, prompts)
    cached: dict[str, Any] = {"enable_prefix_caching": True}
    with (
        engine(model, name="one", connector=atlas(), core="0", block_size=64, **cached) as first,
        engine(
            model, name="other", connector=atlas(), core="1", block_size=128, **cached
        ) as second,
    ):
        found = 0
        for number, (tokens, answer) in enumerate(zip(prompts, right, strict=True)):
            way = (first, second) if number % 3 else (second, first)
            assert_same(answer, split(*way, tokens), (name, number, len(tokens)))
            alone = way[1].generate(tokens)
            assert_same(answer, alone, (name, number, "again"))
            found += alone.cached
        assert found > 0
        first.idle()
        second.idle()


def test_chunked_prefill_many_at_once_and_two_prefill_engines(checkpoints: Path) -> None:
    model = checkpoint("gemma3", checkpoints)
    prompts = [prompt(40 + 29 * number, seed=number + 1) for number in range(16)]
    right = undisturbed(model, prompts)
    chunks: dict[str, Any] = {"max_num_batched_tokens": 96, "enable_chunked_prefill": True}
    with (
        engine(model, name="one", connector=atlas(), core="0", block_size=64, **chunks) as first,
        engine(model, name="two", connector=atlas(), core="0", block_size=32, **chunks) as second,
        engine(model, name="decode", connector=atlas(), core="1", block_size=128) as decode,
    ):
        prefills = [(first, second)[number % 2] for number in range(16)]
        names = [
            one.add(tokens, tokens=1, params={"do_remote_decode": True})
            for one, tokens in zip(prefills, prompts, strict=True)
        ]
        begun = [one.wait(name) for one, name in zip(prefills, names, strict=True)]
        names = [
            decode.add(tokens, params=one.params)
            for tokens, one in zip(prompts, begun, strict=True)
        ]
        for name, answer, tokens in zip(names, right, prompts, strict=True):
            assert_same(answer, decode.wait(name), len(tokens))
        assert_nothing_held(first, second, decode)
