"""The release of vLLM that runs, next to the installed one, and what is new in it.

`make test-vllm VERSION=0.33` runs these tests. With the installed release they are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from kvatlas import AtlasError
from kvatlas.engines.vllm import KVAtlasConnector
from tests.vllm.comparing import assert_nothing_held, assert_same, atlas, prompt, split, undisturbed
from tests.vllm.engine_process import engine
from tests.vllm.models import checkpoint
from tests.vllm.packed_engines import PLAIN, planned_engine
from tests.vllm.released_engine import installed_engine, overlay

pytestmark = [
    pytest.mark.each_release,
    pytest.mark.skipif(overlay() is None, reason="the installed release of vLLM runs"),
]

LENGTHS = (2, 64, 65, 191, 192, 257, 517)


def test_hand_overs_from_and_to_the_installed_release(checkpoints: Path, tmp_path: Path) -> None:
    """As during a rolling update; one engine has blocks of 64 tokens, the other of 128."""
    model = checkpoint("gemma3", checkpoints)
    right = undisturbed(model, [prompt(length) for length in LENGTHS])
    with (
        engine(model, name="new", core="0", connector=atlas(), block_size=64) as new,
        installed_engine(
            model, name="old", core="1", connector=atlas(), block_size=128, folder=tmp_path
        ) as old,
    ):
        assert new.started["version"] != old.started["version"]
        for length, answer in zip(LENGTHS, right, strict=True):
            for way in ((new, old), (old, new)):
                assert_same(answer, split(*way, prompt(length)), (length, way[0].process.name))
        assert_nothing_held(new, old)


def test_a_packed_engine_and_a_plain_one_of_the_installed_release(
    checkpoints: Path, tmp_path: Path
) -> None:
    model = checkpoint("granite_packed", checkpoints)
    about: dict[str, Any] = {"caching": True, "connector": atlas()}
    plain: dict[str, Any] = {
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 12 << 20,
        "num_gpu_blocks_override": None,
        "block_size": 32,
        "max_num_batched_tokens": 64,
    }
    with (
        planned_engine(model, "atlas,pack=4", core="0", **about) as packed,
        installed_engine(
            model, name="old", core="1", connector=atlas(), folder=tmp_path, **plain
        ) as old,
        planned_engine(model, PLAIN, caching=True) as alone,
    ):
        assert (packed.started["block"], old.started["block"]) == (64, 288)
        for number, length in enumerate((64, 129, 289, 517)):
            for way in ((packed, old), (old, packed)):
                tokens = prompt(length, seed=number + 7 * (way[0] is packed))
                assert_same(alone.generate(tokens), split(*way, tokens), length)


@pytest.mark.parametrize(
    ("vendor", "block"), [("PlacesAsVllm", 64), ("GroupsItself", 288), ("PlacesElsewhere", 288)]
)
def test_next_to_a_platform_plug_in(vendor: str, block: int, checkpoints: Path) -> None:
    """Its builder places the groups of the plan; otherwise vLLM's plan is used."""
    model = checkpoint("granite_packed", checkpoints)
    vendors = {"imports": "tests.vllm.vendor_platform", "settings": {"TEST_VENDOR": vendor}}
    with planned_engine(model, "atlas", caching=True, **vendors) as made:  # type: ignore[arg-type]
        assert made.started["block"] == block
        assert (vendor in made.started["planner"]) == (block == 288)
        made.generate(prompt(129))


def test_a_plug_in_that_groups_layers_itself_is_refused_by_name() -> None:
    from kvatlas.engines.vllm.planner_0_33 import check_builder
    from tests.vllm.vendor_platform import GroupsItself, PlacesAsVllm

    check_builder(PlacesAsVllm)
    with pytest.raises(AtlasError, match=r"tests\.vllm\.vendor_platform\.GroupsItself"):
        check_builder(GroupsItself)


def test_hand_overs_after_sleep(checkpoints: Path) -> None:
    """Either engine sleeps and wakes up: its caches have other content, and it another endpoint."""
    model = checkpoint("gemma3", checkpoints)
    prompts = [prompt(length) for length in (65, 257)]
    right = undisturbed(model, prompts)
    config = KVTransferConfig(kv_connector="KVAtlasConnector", kv_role="kv_both")
    assert KVAtlasConnector.supports_sleep_mode(config)
    about: dict[str, Any] = {
        "environment": {"TEST_IMPORTS": "tests.vllm.sleeping_workers"},
        "connector": atlas(),
        "enable_prefix_caching": True,
    }
    with (
        engine(model, name="one", core="0", block_size=64, **about) as first,
        engine(model, name="other", core="1", block_size=128, **about) as second,
    ):
        endpoints: set[str] = set()
        for sleeper in (None, first, second):
            if sleeper is not None:
                sleeper.idle(60)
                sleeper.sleep_and_wake_up()
            for tokens, answer in zip(prompts, right, strict=True):
                for way in ((first, second), (second, first)):
                    begun = way[0].prefill(tokens)
                    assert begun.params is not None
                    endpoints |= set(begun.params["kvatlas"]["endpoints"])
                    assert_same(answer, way[1].generate(tokens, params=begun.params), len(tokens))
                    assert not way[1].facts()["warned"]
        assert len(endpoints) == 4
