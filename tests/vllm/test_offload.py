"""Engines that keep what has finished in a tier: it is found again after a restart, or computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from tests.vllm.comparing import assert_nothing_held, assert_same, atlas, difference, prompt
from tests.vllm.engine_host import EngineHost, engine_host
from tests.vllm.engine_process import Answer, Engine
from tests.vllm.models import checkpoint

LENGTH = 300
CLOSE_IN_HALF = 2e-2
"""Logprobs that count as equal where one of two engines has computed a cache in float16."""


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    with engine_host() as made:
        yield made


def keeping(path: Path | str, **settings: Any) -> dict[str, Any]:
    """The flag of an engine with a tier and nobody to speak to."""
    given = {"transport": "none", "tier": str(path), "tier_memory": "16MiB"}
    return atlas(**given | settings)


def right_answers(host: EngineHost, model: Path, prompts: list[list[int]]) -> list[Answer]:
    """What an engine without a connector answers."""
    with host.engine(model) as alone:
        return [alone.generate(one) for one in prompts]


def conversation(host: EngineHost, model: Path) -> tuple[list[list[int]], list[Answer]]:
    """A prompt, one that goes on after its answer, and one that shares its first tokens alone."""
    first = prompt(LENGTH)
    with host.engine(model) as alone:
        begun = alone.generate(first)
        prompts = [first + begun.tokens + prompt(40, seed=5), first[:200] + prompt(30, seed=9)]
        return [first, *prompts], [begun, *map(alone.generate, prompts)]


def ask(engine: Engine, prompts: list[list[int]], right: list[Answer]) -> list[int]:
    """Every answer is right; how many tokens of each were not computed."""
    cached = []
    for tokens, answer in zip(prompts, right, strict=True):
        got = engine.generate(tokens)
        assert_same(answer, got, len(tokens))
        cached.append(got.cached)
        engine.idle()
    return cached


def test_a_prefix_outlives_its_engine_and_is_found_under_the_same_weights_alone(
    host: EngineHost, checkpoints: Path, tmp_path: Path
) -> None:
    model, path = checkpoint("llama", checkpoints), tmp_path / "prefixes.tier"
    prompts, right = conversation(host, model)
    with host.engine(model, keeping(path), block_size=64) as first:
        assert ask(first, prompts[:1], right[:1]) == [0]
        assert_nothing_held(first)
        assert first.facts()["kvatlas_tier_stores"] == 1
    with host.engine(model, keeping(path), block_size=128) as other:
        assert ask(other, prompts, right) == [256, 256, 192], "blocks of the tier have 64 tokens"
        assert_nothing_held(other)
        facts = other.facts()
        assert facts["external_prefix_cache_hits"] == facts["kvatlas_tier_tokens"] == 704
        assert facts["kvatlas_tier_loads"] == 3
        assert facts["kvatlas_tier_failures"] == 0
    # The same under vLLM's own prefix cache: what is there is not read again.
    with host.engine(model, keeping(path), block_size=32, enable_prefix_caching=True) as caching:
        assert ask(caching, prompts, right) == [256, 320, 192]
        assert caching.facts()["kvatlas_tier_loads"] == 2
    other_weights = copytree(model, checkpoints / "llama_tuned")
    _tune(other_weights / "model.safetensors")
    tuned = right_answers(host, other_weights, prompts[:1])
    assert tuned[0].tokens != right[0].tokens
    with host.engine(other_weights, keeping(path), block_size=64) as stranger:
        assert ask(stranger, prompts[:1], tuned) == [0]


@pytest.mark.parametrize("name", ["gemma3", "granite"])
def test_windows_and_states_are_found_where_a_request_has_ended(
    name: str, host: EngineHost, checkpoints: Path, tmp_path: Path
) -> None:
    model, path = checkpoint(name, checkpoints), tmp_path / "prefixes.tier"
    prompts, right = conversation(host, model)
    with host.engine(model, keeping(path), block_size=64) as first:
        assert ask(first, prompts[:1], right[:1]) == [0]
        assert_nothing_held(first)
    with host.engine(model, keeping(path), block_size=128) as other:
        cached = ask(other, prompts[1:], right[1:])
        # The last token of an answer was never computed. Windows are also stored every 128 tokens.
        assert cached == [LENGTH + 7, 128 if name == "gemma3" else 0]
        assert_nothing_held(other)


def test_an_engine_reads_what_one_of_another_dtype_has_stored_where_it_asks_to(
    host: EngineHost, checkpoints: Path, tmp_path: Path
) -> None:
    """Of the dtypes that vLLM runs on a CPU, those whose caches are described."""
    model = checkpoint("llama", checkpoints)
    begun, longer = prompt(LENGTH), prompt(LENGTH) + prompt(40, seed=5)
    dtypes = {"fp16": "float16", "fp32": "float32"}
    right: dict[str, Answer] = {}
    for name, dtype in dtypes.items():
        with host.engine(model, keeping(tmp_path / name), dtype=dtype, block_size=64) as first:
            right[name] = first.generate(longer)
            first.idle()
            assert first.generate(begun).cached == 256, "its own"
            first.idle()
    for stored, own in (("fp16", "fp32"), ("fp32", "fp16")):
        about = (tmp_path / stored, f"{stored}->{own}")
        for path, convert, cached in ((*about, 320), (about[0], None, 0)):
            connector = keeping(path, convert=convert)
            options = {"dtype": dtypes[own], "block_size": 128}
            with host.engine(model, connector, **options) as other:
                got = other.generate(longer)
                assert got.cached == cached, (stored, own, convert)
                # fp16 has 11 bits, and logprobs here are a few units large.
                assert difference(right[own], got) < CLOSE_IN_HALF, (stored, own, convert)
                assert_nothing_held(other)


UNIFORM: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True, "enable_prefix_caching": True}


def test_engines_without_the_hybrid_manager_find_no_more_of_a_window_than_a_tier_has(
    host: EngineHost, checkpoints: Path, tmp_path: Path
) -> None:
    """They keep and cache all tokens of all layers; a tier has the windows of some positions.

    So later prompts, which share fewer tokens, must not find what was never read.
    """
    model = checkpoint("gemma3", checkpoints)
    prompts, right = conversation(host, model)
    shorter = [prompts[0][:length] + prompt(30, seed=length) for length in (130, 256)]
    asked = [*prompts[1:], *shorter, prompts[1]]
    answers = [*right[1:], *right_answers(host, model, shorter), right[1]]
    hybrid = {"enable_prefix_caching": True}
    for number, (one, other) in enumerate(((UNIFORM, UNIFORM), (hybrid, UNIFORM))):
        connector = keeping(tmp_path / str(number))
        with host.engine(model, connector, block_size=64, **one) as first:
            assert ask(first, prompts[:1], right[:1]) == [0]
        with host.engine(model, connector, block_size=128, **other) as second:
            assert ask(second, asked, answers)[:2] == [LENGTH + 7, 128]


def test_a_full_tier_and_a_damaged_file_break_no_request(
    host: EngineHost, checkpoints: Path, tmp_path: Path
) -> None:
    model, path = checkpoint("llama", checkpoints), tmp_path / "prefixes.tier"
    prompts = [prompt(LENGTH + 9 * seed, seed) for seed in range(1, 9)]
    right = right_answers(host, model, prompts)
    small = keeping(path, tier_memory="1800KiB")  # of one request of 1024 tokens, and little more
    with host.engine(model, small, block_size=64) as full:
        for _ in range(2):
            ask(full, prompts, right)
        assert ask(full, prompts[-1:], right[-1:]) == [320], "the last ones are there"
        assert_nothing_held(full)
    whole = bytearray(path.read_bytes())
    middle = range(8192, len(whole) // 2, 4096)
    for at in middle:
        whole[at] ^= 0xFF
    path.write_bytes(whole)
    with host.engine(model, small, block_size=128) as damaged:
        ask(damaged, prompts, right)
        assert_nothing_held(damaged)
    with host.engine(checkpoint("gemma3", checkpoints), small) as stranger:
        assert stranger.generate(prompts[0]).cached == 0, "another model's"
    whole[100] ^= 0xFF
    path.write_bytes(whole)
    with host.engine(model, small, block_size=128) as unreadable:
        assert ask(unreadable, prompts[:1] * 2, right[:1] * 2) == [0, 0]


def _tune(path: Path) -> None:
    """Change a few weights of a checkpoint, in its size."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    weights["model.layers.0.self_attn.v_proj.weight"] += 0.1 * torch.randn(64, 128)
    save_file(weights, path, metadata={"format": "pt"})
