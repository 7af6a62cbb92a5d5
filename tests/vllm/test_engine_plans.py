"""vLLM runs plans of kvatlas: tokens and logprobs are those of vLLM with its own plan."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core

from kvatlas import AtlasError, Code
from kvatlas.engines.vllm import planner_core
from kvatlas.engines.vllm.planned_groups import KernelBlocks
from kvatlas.engines.vllm.planner import install_planner
from kvatlas.engines.vllm.planner_hooks import PlannerSetting
from kvatlas.engines.vllm_plugin import install
from tests.profiles import DEEP
from tests.vllm.comparing import CLOSE, assert_same, atlas, difference, prompt, split
from tests.vllm.models import checkpoint
from tests.vllm.packed_engines import HEADER, PLAIN, Figures, ask, planned_engine

pytestmark = pytest.mark.each_release

RELEASE = ".".join(vllm.__version__.split(".")[:2])

PROMISE = 0.99
"""The fraction of the requests of vLLM's plan that a plan fits."""

CASES: tuple[tuple[str, bool, int, tuple[str, ...]], ...] = (
    ("granite_packed", True, 1, ("atlas",)),
)
"""Models, prefix caching, ranks, and plans to compare with vLLM's own."""
if DEEP:
    _PACKS = {
        "granite_packed": ("atlas,pack=1", "atlas,pack=2", "atlas,pack=4"),
        "nemotron_h": ("atlas,pack=1", "atlas,pack=2", "atlas,pack=4"),
        "falcon_h1": ("atlas,pack=2", "atlas,pack=3"),
        "zamba2": ("atlas,pack=1", "atlas,pack=2"),
    }
    CASES = tuple(
        (name, caching, tp, (*(("atlas",) if caching else ()), *packs))
        for name, packs in _PACKS.items()
        for caching in (True, False)
        for tp in (1, 2)
    )

_MEBIBYTES = {"zamba2": 24}
"""Memory for caches where 12 MiB do not hold the longest request."""

KEPT = {("falcon_h1", True, "atlas,pack=2")}
"""Where vLLM keeps its plan, as no smaller block fits 99% of its requests: with prefix caching."""

_AT_ONCE = {"falcon_h1": 32, "zamba2": 32}
"""Tokens of a step with prefix caching: at most a block of the smallest plan."""


def test_vllm_finds_the_plug_in() -> None:
    (found,) = (one for one in entry_points(group="vllm.general_plugins") if "kvatlas" in one.name)
    assert found.value == "kvatlas.engines.vllm_plugin:install"


@pytest.mark.parametrize(("name", "caching", "tp", "plans"), CASES)
def test_tokens_are_those_of_plain_vllm(
    name: str, caching: bool, tp: int, plans: tuple[str, ...], checkpoints: Path, capsys: Any
) -> None:
    """Around block borders, with chunked prefill, reuse of few blocks and 16 requests at once."""
    model = checkpoint(name, checkpoints)
    found: list[Figures] = []
    batch = _AT_ONCE.get(name, 64) if caching else 512
    options: dict[str, Any] = {"tensor_parallel_size": tp} if tp > 1 else {}
    mebibytes = _MEBIBYTES.get(name, 12)
    for plan in (PLAIN, *plans):
        about = options | {"caching": caching, "batch": batch, "memory": mebibytes << 20}
        with planned_engine(model, plan, **about) as made:
            found.append(ask(made, plan, long=160 if DEEP else 40))
    right = found[0]
    with capsys.disabled():
        said = f"{name}, tp {tp}, prefix caching {'on' if caching else 'off'}"
        print(f"\nvLLM {vllm.__version__}, {said}, {mebibytes} MiB per rank\n{HEADER}")
        print("\n".join(one.row(right) for one in found))
    for one in found[1:]:
        kept = (one.block, one.blocks) == (right.block, right.blocks)
        assert kept == ((name, caching, one.plan) in KEPT), one.plan
        assert kept or one.block < right.block
        for key, answer in right.answers.items():
            assert_same(answer, one.answers[key], (one.plan, key))
        assert one.last_hits >= right.last_hits
        assert one.fits >= PROMISE * right.fits
    if caching:
        assert found[1].hits > 0


def test_a_control_with_overlapping_layers_is_wrong(checkpoints: Path) -> None:
    model = checkpoint("granite_packed", checkpoints)
    with planned_engine(model, PLAIN) as made:
        right = made.generate(prompt(193))
    about = {"imports": "tests.vllm.overlapping_pages"}
    with planned_engine(model, "atlas,pack=4", **about) as made:  # type: ignore[arg-type]
        assert difference(right, made.generate(prompt(193))) > CLOSE


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("atlas", {"num_gpu_blocks_override": 64}),
        ("atlas,pack=4", {"imports": "tests.vllm.misplaced_pages"}),
    ],
)
def test_vllm_keeps_its_own_plan(plan: str, options: dict[str, Any], checkpoints: Path) -> None:
    """A fixed number of blocks; a vLLM that places layers other than planned."""
    model = checkpoint("granite_packed", checkpoints)
    with planned_engine(model, plan, caching=True, **options) as made:
        assert (made.started["block"], made.started["groups"]) == (288, 3)
        made.generate(prompt(65))


@pytest.mark.parametrize("caching", [False, True] if DEEP else [True])
def test_hand_overs_between_packed_and_plain_engines(caching: bool, checkpoints: Path) -> None:
    """Blocks of 64 tokens and 9 groups on one side, 288 tokens and 3 groups on the other."""
    model = checkpoint("granite_packed", checkpoints)
    about: dict[str, Any] = {"caching": caching, "connector": atlas()}
    with (
        planned_engine(model, "atlas,pack=4", core="0", **about) as packed,
        planned_engine(model, PLAIN, core="1", **about) as plain,
        planned_engine(model, PLAIN, caching=caching) as alone,
    ):
        assert (packed.started["block"], plain.started["block"]) == (64, 288)
        for number, length in enumerate((2, 64, 129, 288, 517)):
            for way in ((packed, plain), (plain, packed)):
                tokens = prompt(length, seed=number + 7 * (way[0] is packed))
                assert_same(alone.generate(tokens), split(*way, tokens), (length, caching))


RANKS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {
        "pipeline_parallel_size": 2,
        "enforce_eager": False,  # as in `comparing`: without it a stage has no buffer on a CPU
        "compilation_config": {"mode": 1},
    },
}


@pytest.mark.parametrize("ranks", list(RANKS) if DEEP else [])
def test_several_ranks(ranks: str, checkpoints: Path) -> None:
    """Each rank is a process, which reports its kernels to the engine core and adopts the plan."""
    model = checkpoint("granite_packed", checkpoints)
    with planned_engine(model, PLAIN, caching=True) as made:
        right = ask(made, PLAIN)
    with planned_engine(model, "atlas", caching=True, **RANKS[ranks]) as made:
        got = ask(made, "atlas")
    assert got.block == 64
    for key, answer in right.answers.items():
        assert_same(answer, got.answers[key], (ranks, key))


REPLACED = {
    "0.32": ((kv_cache_utils, "get_kv_cache_groups"), (kv_cache_utils, "_pool_bytes_per_block")),
    "0.33": ((core, "get_kv_cache_configs"),),
}
"""Functions of vLLM that the planner replaces, by release."""


@pytest.mark.parametrize(("owner", "changed"), REPLACED[RELEASE])
def test_another_signature_is_refused(
    owner: Any, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM whose functions are not those that the planner knows; nothing is replaced."""
    monkeypatch.setattr(owner, changed, kv_cache_utils.get_max_concurrency_for_kv_cache_config)
    before = core.get_kv_cache_configs
    with pytest.raises(AtlasError, match=r"expected .*\(vllm_config, kv_cache_") as refusal:
        install_planner("atlas")
    assert refusal.value.code is Code.ENGINE_REFUSES
    assert core.get_kv_cache_configs is before


def test_an_unknown_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setenv("KVATLAS_PLAN", "atlas")
    with pytest.raises(AtlasError, match=r"vLLM 0\.34\.0"):
        install()


def test_without_the_setting_nothing_is_imported_or_replaced() -> None:
    code = (
        "import sys; from kvatlas.engines.vllm_plugin import install; install(); "
        "print(*(name for name in sys.modules if name.startswith(('kvatlas.', 'vllm'))))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["kvatlas.engines", "kvatlas.engines.vllm_plugin"]


def test_a_worker_without_the_planner_keeps_the_plan_away() -> None:
    reported = planner_core.SpecsWithKernels({"layer": object()})
    reported.kernels = {"layer": KernelBlocks("FLASH_ATTN", (16,), True)}
    assert planner_core.reported_kernels([reported, reported, {}]) == reported.kernels
    with pytest.raises(AtlasError, match="a worker has no planner"):
        planner_core.reported_kernels([reported, {"layer": object()}])


@pytest.mark.parametrize("failure", [AssertionError, NotImplementedError, KeyError, ValueError])
def test_whatever_fails_vllm_keeps_its_own_plan(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise failure("as vLLM raises it")

    monkeypatch.setattr(planner_core, "reported_kernels", fails)
    theirs: list[Any] = []
    setting = PlannerSetting(on=True)
    engine = planner_core.EngineToPlan(SimpleNamespace(), [], [], setting, "0.32")
    chosen = planner_core.choose_configs(engine, theirs, fails)
    assert chosen is theirs
