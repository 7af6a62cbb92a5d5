"""Real engines of several processes on one tier: unlike ranks and blocks, at once and in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from examples import vllm_pair

from kvatlas.pool import BlockStored, EventSubscriber
from tests.tier import mooncake_world
from tests.vllm.comparing import assert_nothing_held, assert_same, atlas, prompt, undisturbed
from tests.vllm.engine_process import Engine, engine
from tests.vllm.models import checkpoint

LENGTH = 300
TP: dict[str, Any] = {"tensor_parallel_size": 2}
PP: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,  # as in `tests.vllm.comparing`
    "compilation_config": {"mode": 1},
}


def keeping(path: Path | str) -> dict[str, Any]:
    """The flag of an engine with a tier and nobody to speak to."""
    return atlas(transport="none", tier=str(path), tier_memory="16MiB")


@contextmanager
def tier_at(kind: str, folder: Path) -> Iterator[str]:
    """A file, or a store of a master that runs meanwhile."""
    if kind == "file":
        yield str(folder / "prefixes.tier")
        return
    if why := mooncake_world.missing():
        pytest.skip(why)
    with mooncake_world.running() as master:
        # Ranks give memory to it, and so does a host that is no engine's.
        host = master.store(segment=64 << 20)
        yield f"mooncake://{master.address}?segment=16MiB"
        host.close()


@pytest.mark.parametrize(
    ("kind", "name", "ranks", "found"),
    [
        ("file", "llama", TP, 256),
        ("file", "gemma3", TP, LENGTH + 7),
        ("file", "llama", PP, 256),
        ("mooncake", "gemma3", TP, LENGTH + 7),
    ],
)
def test_engines_of_unlike_ranks_find_at_once_what_the_other_has_stored(
    kind: str, name: str, ranks: dict[str, Any], found: int, checkpoints: Path, tmp_path: Path
) -> None:
    """Whole blocks of 64 tokens; with windows, all that was computed of a request that goes on."""
    model = checkpoint(name, checkpoints)
    with engine(model, name="undisturbed", core="0|1") as alone:
        begun = [prompt(LENGTH, seed) for seed in (1, 2)]
        right = [alone.generate(one) for one in begun]
        longer = [
            one + answer.tokens + prompt(40, 5) for one, answer in zip(begun, right, strict=True)
        ]
        right_after = [alone.generate(one) for one in longer]
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    published = {"enable_kv_cache_events": True, "publisher": "zmq",
                 "endpoint": addresses[0], "replay_endpoint": addresses[1]}  # fmt: skip
    own = {"block_size": 64, "kv_events_config": published, **ranks}
    with (
        tier_at(kind, tmp_path) as where,
        engine(model, name="several", connector=keeping(where), **own) as several,
        engine(model, name="one", core="1", connector=keeping(where), block_size=128) as one,
    ):
        for asked, (first, second) in enumerate(((several, one), (one, several))):
            got = first.generate(begun[asked])
            assert_same(right[asked], got, (first.process.name, asked))
            assert got.cached == 0
            first.idle()
            got = second.generate(longer[asked])
            assert_same(right_after[asked], got, (second.process.name, asked))
            assert got.cached == found
            second.idle()
        assert_nothing_held(one, several)
        stored = told_of(addresses, several)
        place = "LOCAL" if kind == "file" else "REMOTE"
        assert (stored.medium, stored.locality, stored.block_size) == ("STORAGE", place, 64)
        assert stored.token_ids[:64] == begun[0][:64]


def told_of(addresses: list[str], publishing: Engine) -> BlockStored:
    """The first blocks of a group that keeps all which an engine publishes as its tier's."""
    until, seeds = time.monotonic() + 60, count(100)
    with EventSubscriber(addresses[0], replay=addresses[1]) as subscriber:
        while time.monotonic() < until:
            # What was sent before is asked for again once something new comes.
            publishing.generate(prompt(70, seed=next(seeds)))
            while (received := subscriber.read(timeout=0.2)) is not None:
                for event in received.batch.events:
                    whole = getattr(event, "kv_cache_spec_kind", "") == "full_attention"
                    if isinstance(event, BlockStored) and whole and event.medium != "GPU":
                        return event
    raise AssertionError("no event comes")


def test_an_engine_goes_on_when_the_one_that_served_the_tier_is_killed(
    checkpoints: Path, tmp_path: Path
) -> None:
    model, path = checkpoint("llama", checkpoints), tmp_path / "prefixes.tier"
    prompts = [prompt(LENGTH, seed) for seed in (1, 2)]
    right = undisturbed(model, prompts)
    with (
        engine(model, name="serving", connector=keeping(path), block_size=64) as serving,
        engine(model, name="other", core="1", connector=keeping(path), block_size=128) as other,
    ):
        assert_same(right[0], serving.generate(prompts[0]), "stored")
        serving.idle()
        serving.kill()
        for answer, tokens in zip(right, prompts, strict=True):
            until = time.monotonic() + 60
            while (got := other.generate(tokens)).cached != 256:
                assert_same(answer, got, "computed while nobody serves the tier")
                assert time.monotonic() < until, "found by the one that is left"
                other.idle()
            assert_same(answer, got, "read from the tier")
        assert_nothing_held(other)


def test_vllm_serve_finds_what_another_of_other_ranks_has_stored_under_the_same_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers with a core and workers in processes of their own, asked by HTTP."""
    model = vllm_pair.make_model(tmp_path / "tiny-llama")
    connector, asked = keeping(tmp_path / "prefixes.tier"), prompt(LENGTH)
    other = copytree(model, tmp_path / "other weights")
    train(other / "model.safetensors")
    with engine(other, name="trained", connector=connector) as trained:
        for found in (0, 256):
            assert trained.generate(asked).cached == found
            trained.idle()
    monkeypatch.setattr(vllm_pair, "_CONNECTOR", connector)
    words = " ".join(f"w{token}" for token in asked)
    texts = []
    for name, kept, loaded in (("prefill", 2, 0), ("decode", 0, 1)):  # tp 2, then tp 1
        with vllm_pair.served(model, name) as engine_served:
            engine_served.wait()
            texts.append(engine_served.complete(words, 8)["choices"][0]["text"])
            until = time.monotonic() + 60
            while (counted := engine_served.counters()).get("tier_stores", 0) < kept:
                assert time.monotonic() < until, counted
                time.sleep(0.2)
        assert counted.get("tier_loads", 0) == loaded, counted
        assert counted.get("tier_tokens", 0) == 256 * loaded
        assert counted.get("tier_failures", 0) == 0
    assert texts[0] == texts[1]


def train(path: Path) -> None:
    """Change the weights of a checkpoint a little, and nothing else."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    weights["model.layers.1.self_attn.v_proj.weight"] += 0.5
    save_file(weights, path, {"format": "pt"})
