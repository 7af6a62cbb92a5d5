"""Policy atlas: which way it takes, and what it says about it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model, catalogue
from kvatlas.planning import backends_of, plan
from kvatlas.planning.placing import kernels_read
from kvatlas.planning.shared_blocks import SharedBlock, SharedBlockSearch
from kvatlas.planning.sized_layers import kind_of
from tests.planning.models import ATTENTION, CONV, MAMBA, WIDE, model_of


def is_hybrid(name: str) -> bool:
    kinds = {kind_of(layer.spec) for layer in Model.load(name).layers}
    return "recurrent" in kinds and len(kinds) > 1


HYBRIDS = [name for name in catalogue() if is_hybrid(name)]


def test_there_are_hybrids_to_try() -> None:
    assert len(HYBRIDS) >= 18


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrids_plan_says_which_way_it_took(name: str) -> None:
    made = plan(name, memory="60GiB")
    told = made.explain()
    assert len(made.pools) == 1
    if "This is vLLM's plan" in told:
        assert made.regions == plan(name, memory="60GiB", policy="vllm").regions
    else:
        assert "vLLM's block size is" in told
        assert "In this plan a block holds" in told
        assert "of the requests that vLLM's plan fits" in told
    rules = (
        "support no block smaller",
        "No smaller block can hold",
        "Every smaller block fits fewer",
    )
    assert any(rule in told for rule in rules)


@pytest.mark.parametrize("name", HYBRIDS)
def test_pools_apart_are_for_those_who_ask(name: str) -> None:
    asks: tuple[dict[str, Any], ...] = ({"states": "apart"}, {"requests": 8})
    for ask in asks:
        made = plan(name, memory="140GiB", tp=2, max_len=4096, **ask)
        assert len(made.pools) == 2
        assert "in a separate pool" in made.explain()
        assert "neither pool can borrow" in made.explain()


def test_packs_are_searched_and_taken_where_they_pay() -> None:
    """LFM2's states are small: attention pages hold them as they are, in one pool."""
    made = plan("LFM2-1.2B", memory="20GiB")
    assert len(made.pools) == 1
    assert made.block_size == 16


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
@pytest.mark.parametrize("name", ["Qwen3.5-35B-A3B", "Nemotron-H-8B", "Kimi-Linear-48B-A3B"])
def test_orders_that_vllm_refuses_for_hybrids(name: str, order: str) -> None:
    with pytest.raises(AtlasError) as refusal:
        plan(name, memory="60GiB", layout=order, policy="vllm")
    assert refusal.value.code is Code.LAYOUT_REFUSED
    assert plan(name, memory="60GiB", layout=order).layout == order


def test_orders_that_a_backend_declares_bind() -> None:
    """DeepSeek-V4's indexer takes BLHNC and BLNHC, whatever the policy."""
    assert plan("DeepSeek-V4-Flash", memory="60GiB").layout == "BLHNC"
    assert plan("DeepSeek-V4-Flash", memory="60GiB", layout="BLNHC").layout == "BLNHC"
    for order in ("LBHNC", "LBNHC", "LHBNC", "BHLNC"):
        with pytest.raises(AtlasError) as refusal:
            plan("DeepSeek-V4-Flash", memory="60GiB", layout=order)
        assert refusal.value.code is Code.LAYOUT_REFUSED
        assert "BLHNC" in refusal.value.hint


def test_kernel_blocks_in_block_outermost_orders() -> None:
    ask = {"memory": "40GiB", "block_size": 256, "backend": "FLASHINFER", "layout": "BLHNC"}
    vllm = plan("Llama-3.1-8B", policy="vllm", **ask)  # type: ignore[arg-type]
    assert vllm.regions[0].kernel_block == 256
    assert any("that cannot be split" in warning for warning in vllm.warnings)
    atlas = plan("Llama-3.1-8B", **ask)  # type: ignore[arg-type]
    assert atlas.regions[0].kernel_block == 64
    assert not atlas.warnings
    assert (atlas.num_blocks, atlas.bytes_per_block) == (vllm.num_blocks, vllm.bytes_per_block)


def test_plain_models_are_planned_as_vllm_plans_them() -> None:
    for name in ("Llama-3.1-8B", "gpt-oss-20b", "Gemma-3-27B", "DeepSeek-V3"):
        atlas, vllm = plan(name, memory="60GiB"), plan(name, memory="60GiB", policy="vllm")
        assert atlas.regions == vllm.regions
        assert atlas.tokens == vllm.tokens


def test_groups_that_vllm_does_not_repeat() -> None:
    """8 Mamba-2 groups at tp 16: the bytes allow it, so atlas plans it."""
    with pytest.raises(AtlasError):
        plan("Nemotron-H-8B", memory="60GiB", tp=16, policy="vllm")
    assert plan("Nemotron-H-8B", memory="60GiB", tp=16).tp == 16


def test_states_can_be_told_where_to_lie() -> None:
    """In one pool short requests borrow what long ones do not use."""
    ask: dict[str, Any] = {"memory": "60GiB", "tp": 2}
    auto, shared, apart = (
        plan("Qwen3.5-397B-A17B", states=states, **ask) for states in ("auto", "shared", "apart")
    )
    assert auto == shared
    assert (len(shared.pools), len(apart.pools)) == (1, 2)
    assert auto.block_size == 176
    assert shared.requests(4096) > 2 * apart.requests(4096)
    kimi = plan("Kimi-K3", memory="60GiB", tp=8, states="apart")
    assert len(kimi.pools) == 2


def test_shared_states_are_refused_where_they_cannot_be() -> None:
    """They are never quietly put apart instead."""
    unlike = model_of("unlike", CONV, MAMBA, ATTENTION, MAMBA, CONV, WIDE)
    ask: dict[str, Any] = {"memory": "4MiB", "max_len": 64, "in_flight": 32, "layout": "LHBNC"}
    assert len(plan(unlike, **ask).pools) > 1
    with pytest.raises(AtlasError) as refusal:
        plan(unlike, states="shared", **ask)
    assert refusal.value.code is Code.PAGES_NOT_UNIFIED


def test_short_requests_are_planned_as_quickly_as_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few blocks are looked at in full, whatever the greatest length is."""
    looked_at: list[SharedBlock] = []
    keeps = SharedBlockSearch._keeps_promise

    def counted(search: SharedBlockSearch, block: SharedBlock) -> bool:
        looked_at.append(block)
        return keeps(search, block)

    monkeypatch.setattr(SharedBlockSearch, "_keeps_promise", counted)
    for name in ("Kimi-K3", "Nemotron-3-Ultra-550B-A55B", "Qwen3.6-27B"):
        for max_len in (1, 100):
            looked_at.clear()
            plan(name, memory="60GiB", max_len=max_len)
            assert len(looked_at) < 100, (name, max_len)


def test_a_plan_that_kernels_cannot_read_is_known_by_its_kernel_blocks() -> None:
    """Not by the words of its warning."""
    ask: Any = {"memory": "40GiB", "block_size": 256, "backend": "FLASHINFER", "layout": "BLHNC"}
    backends = backends_of(Model.load("Llama-3.1-8B"), "FLASHINFER")
    vllm, atlas = plan("Llama-3.1-8B", policy="vllm", **ask), plan("Llama-3.1-8B", **ask)
    assert not kernels_read(backends, msgspec.structs.replace(vllm, warnings=()))
    assert kernels_read(backends, atlas)


def test_parts_of_a_state_on_all_ranks_are_laid_out_like_the_first() -> None:
    """Plans are checked by the first part on rank 0, which stands for all others."""
    split = 0
    for name, tp in (("Qwen3.5-35B-A3B", 1), ("Nemotron-H-8B", 2)):
        made = plan(name, memory="60GiB", tp=tp)
        for region in made.regions:
            first = region.first_page(tp)
            split += region.splits > 1
            for rank, index in product(range(tp), range(len(region.layers))):
                page = region.page(tp, rank, index)
                fields = tuple(replace(field, ranges=()) for field in page.fields)
                alike = tuple(replace(field, ranges=()) for field in first.fields)
                assert replace(page, fields=fields) == replace(first, fields=alike)
    assert split
