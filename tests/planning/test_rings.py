"""Plans of models that keep the tokens of an incomplete group in a ring.

`make record-vllm` with CONFIGS=tests/planning/ring_configs recorded `vllm_answers_of_rings.json`
with the planner of vLLM 0.33, which is the first release that has these models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.specs import FullAttention, Indexer, Ring
from tests.planning.models import model_of
from tests.planning.test_vllm_releases import answer_of

HERE = Path(__file__).parent
ANSWERS: dict[str, Any] = json.loads((HERE / "vllm_answers_of_rings.json").read_text())["0.33"]


def config_of(name: str) -> Model:
    return Model.load(HERE / "ring_configs" / f"{name}.json")


def asked() -> Iterator[tuple[str, int, str, Any]]:
    for name, by_tp in ANSWERS.items():
        for tp, entries in by_tp.items():
            for chips, expected in entries:
                yield from ((name, int(tp), chip, expected) for chip in chips.split())


def test_plans_are_those_of_vllm() -> None:
    wrong, cases = [], list(asked())
    for name, tp, chip, expected in cases:
        found = answer_of(config_of(name), tp=tp, policy="vllm@0.33", chip=chip)
        if found != ("refused" if isinstance(expected, str) else expected):
            wrong.append(f"{name} tp {tp} {chip}: {found} instead of {expected}")
    assert not wrong, "\n".join(wrong)
    assert len(cases) == 48


@pytest.mark.parametrize("name", ANSWERS)
def test_older_releases_do_not_have_these_models(name: str) -> None:
    for release in ("0.31", "0.32"):
        made = plan(config_of(name), memory="80GiB", policy=f"vllm@{release}", max_len=4096)
        assert any(f"vLLM {release} refuses this model" in text for text in made.warnings)
    made = plan(config_of(name), memory="80GiB", policy="vllm@0.33", max_len=4096)
    assert not any("refuses" in text for text in made.warnings)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("tp", [1, 8])
def test_policy_atlas_keeps_its_promise(name: str, tp: int) -> None:
    model = config_of(name)
    ask: dict[str, Any] = {"memory": 140 << 30, "tp": tp, "max_len": 32768, "chip": "sm90"}
    ours, theirs = plan(model, **ask), plan(model, **ask, policy="vllm@0.33")
    for length in range(1, 32769, 257):
        for in_flight in (1, 16384):
            fits = [made.requests(length, in_flight=in_flight) for made in (ours, theirs)]
            assert fits[0] >= 0.99 * fits[1], (length, in_flight)


@pytest.mark.parametrize("policy", ["vllm", "atlas"])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_request_holds_one_block_of_each_ring(name: str, policy: str) -> None:
    model = config_of(name)
    made = plan(model, memory="80GiB", policy=policy, max_len=32768)
    rings = [group for group in made.groups if group.kind == "ring"]
    assert rings
    for group in rings:
        assert all(group.blocks(length) == 1 for length in (1, 7, 4096, 32768))
    kept = {layer.name for layer in model.layers if isinstance(layer.spec, Ring)}
    assert {name for name in made.layers if isinstance(made.spec(name), Ring)} == kept
    assert Plan.from_json(made.to_json()) == made
    text = made.explain()
    assert "one block per request" in text
    assert "a window of" not in "".join(line for line in text.splitlines() if "ring" in line)


def test_a_ring_that_fills_a_page_depends_on_the_ranks() -> None:
    """Step5 keeps 1 KiB per token in a page of attention, which ranks divide by heads."""
    rows = {}
    for tp in (1, 2, 8):
        made = plan(config_of("Step5"), memory="80GiB", tp=tp, policy="vllm", max_len=4096)
        specs = {made.spec(name) for name in made.layers}
        (spec,) = (spec for spec in specs if isinstance(spec, Ring))
        attention = next(s for s in specs if isinstance(s, FullAttention))
        assert spec.rows == attention.page(16, tp=tp).nbytes // 1024
        rows[tp] = spec.rows
    assert rows == {1: 96, 2: 48, 8: 12}


def small() -> Model:
    caches = {
        "ring": Ring(group=4, rows=8, width=16),
        "index": Indexer(head_dim=32, cache="bf16", compress=4),
        "attn": FullAttention(heads=2, head_dim=32),
    }
    return model_of("rings", caches, caches)


def test_rings_are_packed_next_to_attention() -> None:
    """vLLM's backends of rings accept block-outermost orders alone."""
    for layout in ("BLNHC", "BLHNC"):
        made = plan(small(), memory="8MiB", layout=layout, max_len=96)
        assert made.layout == layout
        for name in made.layers:
            for field in made.page(name).fields:
                made.view(name, field.name)
    with pytest.raises(AtlasError) as refusal:
        plan(small(), memory="8MiB", layout="LBNHC", max_len=96)
    assert refusal.value.code is Code.LAYOUT_REFUSED


def test_a_plan_whose_ring_has_other_tokens_is_refused() -> None:
    made = plan(small(), memory="8MiB", policy="vllm", max_len=96)
    index = next(i for i, group in enumerate(made.groups) if group.kind == "ring")
    lies: list[dict[str, Any]] = [
        {"window": 8}, {"window": None}, {"held": 2}, {"kind": "recurrent"},
    ]  # fmt: skip
    for lie in lies:
        groups = list(made.groups)
        groups[index] = msgspec.structs.replace(groups[index], **lie)
        data = msgspec.to_builtins(made) | {"groups": msgspec.to_builtins(groups)}
        with pytest.raises(AtlasError) as refusal:
            Plan.from_json(msgspec.json.encode(data))
        assert refusal.value.code is Code.BAD_PLAN, lie


def test_a_ring_is_at_least_a_group() -> None:
    with pytest.raises(AtlasError) as refusal:
        Ring(group=8, rows=7, width=4)
    assert refusal.value.code is Code.BAD_SPEC
