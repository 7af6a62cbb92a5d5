"""Policies `vllm@...` against the recorded answers of releases of vLLM on three chips.

`tools/record_vllm.py` recorded `vllm_answers.json` with vLLM's own planner. An entry has the chips
on which it holds, and a list: block size, blocks, bytes per block, layout, backends, groups
(layers, block size, page bytes), and requests that fit at 4k prefilling and decoding, and at 32k.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import GPUS, Model, catalogue
from kvatlas.planning import Plan, fit, plan
from kvatlas.planning.backends import backends_of
from kvatlas.planning.engine_rules import CHIPS, RELEASES, chip_of
from tests.planning.test_promise import REFUSALS, holds
from tests.profiles import DEEP

HERE = Path(__file__).parent
ANSWERS: dict[str, Any] = json.loads((HERE / "vllm_answers.json").read_text())
CONFIGS: dict[str, Any] = json.loads((HERE / "vllm_figures.json").read_text())["configs"]
OF_CONFIGS: dict[str, Any] = json.loads((HERE / "vllm_answers_of_configs.json").read_text())
FACTS = Path(os.environ.get("KVATLAS_FACTS", "no-such-folder")) / "configs"
NAMES = {
    "FLASHINFER_SM100": "FLASHINFER", "COMPRESSOR": "CompressorBackend",
    "DEEPSEEK_SPARSE_SWA_DSV41": "DEEPSEEK_SPARSE_SWA",
    "DEEPSEEK_SPARSE_SWA_DSV41_SM100": "DEEPSEEK_SPARSE_SWA",
    "DEEPSEEK_V41_INDEXER_SM100": "DEEPSEEK_V41_INDEXER",
}  # fmt: skip
"""Backends whose names in vLLM differ from those in kvatlas."""


@cache
def model_of(name: str) -> Model:
    return Model.load(name if name in catalogue() else CONFIGS[name])


def answer_of(model: Model, **ask: Any) -> list[Any] | str:
    made = plan(model, memory=140 << 30, max_len=32768, in_flight=16384, **ask)
    if any("refuses this model" in warning for warning in made.warnings):
        return "refused"
    fits = [made.requests(n, in_flight=k) for n in (4096, 32768) for k in (16384, 1)]
    return [
        made.block_size,
        made.num_blocks,
        made.bytes_per_block,
        made.layout,
        [NAMES.get(name, name) for name in made.backends],
        [[len(layers), block, nbytes] for layers, block, nbytes in groups_of(made)],
        [round(fit, 4) for fit in fits],
    ]


def groups_of(made: Plan) -> Iterator[tuple[list[str], int, int]]:
    """Yield the layers, block size and page bytes of each group; pages of a mixed group add up."""
    for index, group in enumerate(made.groups):
        regions = [region for region in made.regions if region.group == index]
        layers = [layer.name for region in regions for layer in region.layers]
        nbytes = {region.page_bytes for region in regions}
        total = sum(region.page_bytes * len(region.layers) for region in regions)
        yield layers, group.block, total if group.mixed else nbytes.pop()


def mistakes(release: str, asked: Iterable[tuple[Model, int, str, Any]]) -> list[str]:
    """Return a line for each plan that is not the recorded one; a refusal is a string."""
    wrong = []
    for model, tp, chip, expected in asked:
        found = answer_of(model, tp=tp, policy=f"vllm@{release}", chip=chip)
        if found != ("refused" if isinstance(expected, str) else expected):
            wrong.append(f"{model.name} tp {tp} {chip}: {found} instead of {expected}")
    return wrong


def cases(release: str) -> Iterator[tuple[Model, int, str, Any]]:
    """Yield (model, tp, chip, expected): all of them in the deep profile, else some by turns.

    Models whose plan depends on the release or the chip are always asked at every tp.
    """
    for name, by_tp in ANSWERS[release].items():
        depends = len({figures(other[name]) for other in ANSWERS.values()}) > 1
        depends |= any(len({figures(entry) for entry in entries}) > 1 for entries in by_tp.values())
        for number, (tp, entries) in enumerate(by_tp.items()):
            if not (DEEP or depends or number == len(name) % len(by_tp)):
                continue
            for chips, expected in entries:
                listed = chips.split()
                for chip in listed if DEEP else [listed[len(name) % len(listed)]]:
                    yield model_of(name), int(tp), chip, expected


def figures(answers: Any) -> str:
    """Return the block sizes and the requests that fit, without layouts and backends."""
    if isinstance(answers, dict):
        return json.dumps([figures(entry) for entries in answers.values() for entry in entries[:1]])
    return json.dumps(answers[1] if isinstance(answers[1], str) else answers[1][::6])


@pytest.mark.slow
@pytest.mark.parametrize("release", list(RELEASES))
def test_plans_are_those_of_the_release_on_the_chip(release: str) -> None:
    wrong = mistakes(release, cases(release))
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.skipif(not FACTS.is_dir(), reason="KVATLAS_FACTS names no folder with configs")
@pytest.mark.parametrize("release", list(RELEASES))
def test_plans_of_public_configs_are_those_of_the_release_on_the_chip(release: str) -> None:
    """Every recorded config, at every tp and on every chip."""
    asked = [
        (Model.load(FACTS / f"{name}.json"), int(tp), chip, expected)
        for name, by_tp in OF_CONFIGS[release].items()
        for tp, entries in by_tp.items()
        for chips, expected in entries
        for chip in chips.split()
    ]
    wrong = mistakes(release, asked)
    print(f"vLLM {release}: {len(asked) - len(wrong)} of {len(asked)} plans are equal")
    assert not wrong, "\n".join(wrong[:20])


def test_the_answers_are_all_there() -> None:
    for recorded in (ANSWERS, OF_CONFIGS):
        assert set(recorded) == set(RELEASES)
        asked = set(recorded["0.33"])
        assert all(set(answers) == asked for answers in recorded.values())
    assert len(OF_CONFIGS["0.33"]) == 53
    # Neither models without attention nor Whisper are asked.
    assert len(set(ANSWERS["0.33"]) & set(catalogue())) == len(catalogue()) - 4
    chips = {chip for entries in ANSWERS["0.33"]["Kimi-K3"].values() for chip, _ in entries}
    assert {one for word in chips for one in word.split()} == {"sm80", "sm90", "sm100"}


@pytest.mark.parametrize(
    ("name", "tp", "release", "chip", "block", "at_4k"),
    [
        ("Qwen3.5-397B-A17B", 2, "0.32", "sm90", 2096, 250),
        ("Qwen3.5-397B-A17B", 2, "0.33", "sm80", 2096, 250),
        ("Qwen3.5-397B-A17B", 2, "0.33", "sm90", 2112, 180),
        ("Qwen3-Next-80B-A3B", 4, "0.33", "sm100", 320, 744),
        ("Kimi-K3", 8, "0.32", "sm90", 768, 202),
        ("Kimi-K3", 8, "0.32", "sm80", 768, 252),
        ("Kimi-Linear-48B-A3B", 8, "0.33", "sm90", 384, None),
    ],
)
def test_chips_that_save_states_in_the_middle_of_a_prefill(
    name: str, tp: int, release: str, chip: str, block: int, at_4k: int | None
) -> None:
    made = plan(name, memory="60GiB", tp=tp, policy=f"vllm@{release}", chip=chip)
    if at_4k is None:
        assert {group.held for group in made.groups if group.kind == "recurrent"} == {2}
    else:
        assert (made.block_size, int(made.requests(4096))) == (block, at_4k)
    assert f"vLLM {release} on {chip}" in made.explain()
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize("release", list(RELEASES))
@pytest.mark.parametrize("chip", ["sm80", "sm90", "sm100"])
def test_never_worse_than_each_release(release: str, chip: str) -> None:
    """All models of the catalogue at every tp in the deep profile, else some of them."""
    some = [("Qwen3.5-397B-A17B", 2), ("Kimi-K3", 8), ("Nemotron-H-8B", 1), ("DeepSeek-V3.2", 8)]
    for name, tp in product(catalogue(), (1, 2, 4, 8)) if DEEP else some:
        ask: dict[str, Any] = {"memory": "60GiB", "tp": tp, "chip": chip}
        try:
            vllm = plan(name, policy=f"vllm@{release}", **ask)
        except AtlasError as refusal:
            assert refusal.code in REFUSALS, refusal
            continue
        holds(plan(name, policy=f"atlas@{release}", **ask), vllm)


@pytest.mark.skipif(not FACTS.is_dir(), reason="KVATLAS_FACTS names no folder with configs")
@pytest.mark.parametrize("release", list(RELEASES))
def test_never_worse_than_each_release_for_public_configs(release: str) -> None:
    """Every config that vLLM was asked about, at every tp and on every chip."""
    compared = 0
    for name, by_tp in OF_CONFIGS[release].items():
        model = Model.load(FACTS / f"{name}.json")
        for tp, entries in by_tp.items():
            for chip in (chip for chips, _ in entries for chip in chips.split()):
                ask: dict[str, Any] = {"memory": "140GiB", "tp": int(tp), "chip": chip}
                vllm = plan(model, policy=f"vllm@{release}", **ask)
                holds(plan(model, policy=f"atlas@{release}", **ask), vllm)
                compared += 1
    assert compared >= 600


def test_a_plan_without_a_chip_warns_if_the_chip_matters() -> None:
    (warning,) = plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2, policy="vllm").warnings
    assert "sm90, sm100" in warning
    assert not plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2, policy="vllm@0.32").warnings
    assert not plan("Qwen3-8B", memory="60GiB", policy="vllm").warnings


def test_a_plan_for_a_chip_that_vllm_refuses_has_a_warning() -> None:
    for release in RELEASES:
        for name in ("DeepSeek-V3.2", "GLM-5.2", "DeepSeek-V4-Flash"):
            ask: dict[str, Any] = {"memory": "140GiB", "tp": 8}
            for policy in ("vllm", "atlas"):
                made = plan(name, policy=f"{policy}@{release}", chip="sm80", **ask)
                assert any("refuses this model on sm80" in text for text in made.warnings)
            assert not plan(name, policy=f"vllm@{release}", chip="sm90", **ask).warnings


def test_nvfp4_caches_that_vllm_refuses_have_a_warning() -> None:
    """FlashInfer reads nvfp4 caches of heads of 64 on SM100 only; 0.31 reads no others either."""
    refused = {
        (release, name, chip)
        for release in RELEASES
        for name in ("gpt-oss-20b", "Qwen3-8B")
        for chip in ("sm80", "sm90", "sm100", "sm120")
        for made in [
            plan(name, memory="20GiB", kv_dtype="nvfp4", policy=f"vllm@{release}", chip=chip)
        ]
        if any(f"refuses this model on {chip}" in text for text in made.warnings)
    }
    others = ("sm80", "sm90", "sm120")
    assert refused == {
        *((release, "gpt-oss-20b", chip) for release in RELEASES for chip in others),
        *(("0.31", "Qwen3-8B", chip) for chip in others),
    }


def test_rules_that_were_not_compared_with_vllm_are_a_warning() -> None:
    ask: dict[str, Any] = {"memory": "140GiB", "tp": 8}
    words = "were not compared with vLLM's own plans"
    for name, policy, chip, warned in (
        ("Llama-3.1-8B", "vllm", "sm120", True),
        ("Llama-3.1-8B", "atlas", "sm120", False),
        ("DeepSeek-V3.2", "atlas", "sm121", True),
        ("DeepSeek-V3.2", "vllm", "sm100", False),
        ("Llama-3.1-8B", "vllm@0.32", "sm89", False),
    ):
        made = plan(name, policy=policy, chip=chip, **ask)
        assert any(words in text for text in made.warnings) == warned, (name, chip)


def test_a_gpu_without_known_rules_is_a_warning() -> None:
    for gpu, policy, warned in (
        ("8xMI300X", "vllm", True), ("8xMI300X", "atlas", False), ("8x96GB", "vllm@0.32", True),
        ("8xH100", "vllm", False),
    ):  # fmt: skip
        found = fit("Qwen3-8B", gpu, policy=policy)
        assert any("are not known" in text for text in found.warnings) == warned, gpu
    chosen = fit("Qwen3-8B", "8x96GB", policy="vllm", chip="sm90")
    assert not chosen.warnings


def test_all_layers_of_a_sparse_model_have_the_sparse_backend() -> None:
    """In GLM-5.2, layers without an indexer use the selection of another layer."""
    model = Model.load("GLM-5.2")
    indexed = {layer.index for layer in model.layers if layer.name.endswith("k_cache")}
    assert len(indexed) < model.depth
    found = {b.name for b in backends_of(model, chip="sm90").values() if b}
    assert found == {"DEEPSEEK_V32_INDEXER", "FLASH_ATTN_MLA_SPARSE"}


@pytest.mark.parametrize("policy", ["vllm@0.30", "vllm@", "vllm@0.32-rc", "atlas@1", "@0.32"])
def test_unknown_releases_are_refused(policy: str) -> None:
    with pytest.raises(AtlasError) as refusal:
        plan("Qwen3-8B", memory="60GiB", policy=policy)
    assert refusal.value.code is Code.UNKNOWN_POLICY


def test_unknown_chips_are_refused() -> None:
    with pytest.raises(AtlasError) as refusal:
        plan("Qwen3-8B", memory="60GiB", chip="hopper")
    assert refusal.value.code is Code.UNKNOWN_GPU


def test_a_gpu_selects_its_chip() -> None:
    for gpu, block in (("8xA100", 528), ("8xH200", 576), ("8xB200", 576)):
        found = fit("Qwen3.5-397B-A17B", gpu, tp=8, policy="vllm", kv_dtype="auto", max_len=4096)
        if found.plan is not None:
            assert found.plan.block_size == block, gpu
    assert fit("Qwen3-8B", "B200", policy="vllm").plan.layout == "LBHNC"  # type: ignore[union-attr]
    assert {chip_of(name) for name in GPUS} <= {*CHIPS, None}
