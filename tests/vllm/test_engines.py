"""Pairs of real engines: greedy tokens and logprobs are those of one that nobody disturbs.

Each test takes two engines and asks them everything; both are prefill and decode engine in turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.comparing import (
    EDGES,
    PAIRS,
    Undisturbed,
    assert_nothing_held,
    assert_same,
    atlas,
    pair_ways,
    prompt,
    split,
    undisturbed,
)
from tests.vllm.engine_process import engine
from tests.vllm.models import checkpoint
from tests.vllm.verdicts import OURS, RIGHT, Verdicts

EACH_RELEASE = {("gemma3", 64, 128), ("granite", 128, 256)}
"""Models and blocks of the pairs that are also run with other releases of vLLM."""


def pairs() -> list[Any]:
    found = []
    for name, one, other in PAIRS:
        each = (name, one["block_size"], other["block_size"]) in EACH_RELEASE
        several = any("parallel" in key for key in one)
        marks = [pytest.mark.each_release] if each and not several else []
        found.append(pytest.param(name, one, other, marks=marks))
    return found


@pytest.mark.parametrize(("name", "one", "other"), pairs())
def test_every_length_from_either_engine_to_the_other(
    name: str,
    one: dict[str, Any],
    other: dict[str, Any],
    checkpoints: Path,
    right: Undisturbed,
    verdicts: Verdicts,
) -> None:
    """Unlike blocks, ranks and kinds of layers; another prompt's cache is a control."""
    model, answers = checkpoint(name, checkpoints), right(name)
    with (
        engine(model, name="one", core="0", connector=atlas(), **one) as first,
        engine(model, name="other", core="1", connector=atlas(), **other) as second,
    ):
        for way, label in pair_ways((first, one), (second, other)):
            for length, answer in answers.items():
                got = split(*way, prompt(length))
                assert_same(answer, got, (name, label, length))
                verdicts.note(name, label, OURS, length, RIGHT)
        length = EDGES[-1]
        tokens, answer = prompt(length), answers[length]
        forged, real = (first.prefill(it).params or {} for it in (prompt(length, seed=2), tokens))
        got = second.generate(tokens, params=forged)
        assert_same(answer, got, "another prompt's cache is not read")
        forged = first.prefill(prompt(length, seed=2)).params or {}
        forged["kvatlas"]["prompt"] = real["kvatlas"]["prompt"]
        wrong = second.generate(tokens, params=forged)
        assert wrong.tokens != answer.tokens, "what was read is not used"
        assert_same(answer, second.generate(tokens, params=real), "the right one")
        assert_nothing_held(first, second)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("llama", False),
        pytest.param("gemma3", False, marks=pytest.mark.each_release),
        ("gemma3", True),
    ],
)
def test_prefixes_that_are_there_are_not_read_again(
    name: str, off: bool, checkpoints: Path
) -> None:
    """Also by later requests: a block that windows have filled in part is found by none.

    Every prompt shares its beginning with the next, shorter or longer, at either engine. One of
    them may have the hybrid manager `off`: it keeps all tokens, where the other has windows.
    """
    model = checkpoint(name, checkpoints)
    whole = prompt(700)
    tails = [(length, prompt(40, seed=length)) for length in (600, 150, 300, 192, 129, 420, 64)]
    prompts = [whole[:length] + tail for length, tail in tails]
    prompts += [whole[:length] for length in (640, 150, 151, 215, 300, 301)]
    right = undisturbed(model, prompts)
    cached: dict[str, Any] = {"enable_prefix_caching": True, "connector": atlas()}
    keeping_all = cached | {"disable_hybrid_kv_cache_manager": off}
    with (
        engine(model, name="one", core="0", block_size=64, **cached) as first,
        engine(model, name="other", core="1", block_size=128, **keeping_all) as second,
    ):
        found = 0
        for number, (tokens, answer) in enumerate(zip(prompts, right, strict=True)):
            way = (first, second) if number % 3 else (second, first)
            assert_same(answer, split(*way, tokens), (name, number, len(tokens)))
            assert not way[1].facts()["warned"], "it was read"
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


def test_requests_that_were_read_and_then_preempted_are_computed_again(checkpoints: Path) -> None:
    """A decode engine with blocks for fewer requests than it reads: one gives its blocks away."""
    model, length = checkpoint("gemma3", checkpoints), 60
    prompts = [prompt(190, seed=seed) for seed in (1, 2, 3)]
    with engine(model, name="undisturbed", core="0|1") as alone:
        right = [alone.generate(one, tokens=length) for one in prompts]
    few: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 384}
    about: dict[str, Any] = {"enable_prefix_caching": True, "block_size": 64, "connector": atlas()}
    with (
        engine(model, name="prefill", core="0", **about) as prefill,
        engine(model, name="decode", core="1", **about | few) as decode,
    ):
        told = [prefill.prefill(one).params for one in prompts]
        names = [
            decode.add(one, tokens=length, params=params)
            for one, params in zip(prompts, told, strict=True)
        ]
        for name, answer in zip(names, right, strict=True):
            assert_same(answer, decode.wait(name), name)
        facts = decode.idle()
        assert facts["preempted"], "there was room for all of them"
        assert not facts["warned"]
        prefill.idle()


def test_as_one_of_several_connectors(
    checkpoints: Path, right: Undisturbed, tmp_path: Path
) -> None:
    """A member of vLLM's MultiConnector, beside one that stores to a folder."""
    model = checkpoint("llama", checkpoints)

    def several(name: str) -> dict[str, Any]:
        ours = atlas()
        del ours["kv_load_failure_policy"]
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / name)},
        }
        members = {"connectors": [ours, example]}
        about = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        return {**about, "kv_connector_extra_config": members}

    with (
        engine(model, name="one", core="0", connector=several("one"), block_size=64) as first,
        engine(model, name="other", core="1", connector=several("other"), block_size=128) as second,
    ):
        for length in (65, 517):
            assert_same(right("llama")[length], split(first, second, prompt(length)), length)
        assert_nothing_held(first, second)
