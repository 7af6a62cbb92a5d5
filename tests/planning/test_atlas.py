"""Policy atlas: small blocks without more padding, and what it says about it."""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model, catalogue
from kvatlas.planning import padding, plan
from kvatlas.planning.sized_layers import kind_of


def is_hybrid(name: str) -> bool:
    kinds = {kind_of(layer.spec) for layer in Model.load(name).layers}
    return "recurrent" in kinds and len(kinds) > 1


HYBRIDS = [name for name in catalogue() if is_hybrid(name)]
KERNEL_BLOCK = 16


def test_there_are_hybrids_to_try() -> None:
    assert len(HYBRIDS) >= 18


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_every_hybrid_gets_an_eighth_of_the_block_and_no_more_padding(name: str, tp: int) -> None:
    try:
        atlas = plan(name, memory="60GiB", tp=tp)
    except AtlasError as refusal:
        assert refusal.code in (Code.BAD_TOPOLOGY, Code.TP_HEADS, Code.NOT_ENOUGH_MEMORY)
        with pytest.raises(AtlasError):
            plan(name, memory="60GiB", tp=tp, policy="vllm")
        return
    try:
        vllm = plan(name, memory="60GiB", tp=tp, policy="vllm")
    except AtlasError as refusal:
        assert refusal.code is Code.BAD_TOPOLOGY  # groups that vLLM does not repeat
        return
    assert atlas.block_size * 8 <= vllm.block_size or atlas.block_size == KERNEL_BLOCK
    assert padding(atlas).share <= padding(vllm).share + 1e-12
    # Dividing memory beforehand rounds each pool to whole blocks, no more than that.
    assert atlas.requests() >= vllm.requests() - 1


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrids_plan_says_which_way_it_took(name: str) -> None:
    made = plan(name, memory="60GiB")
    told = made.explain()
    assert "vLLM's block is" in told
    if len(made.pools) > 1:
        assert "pool of their own" in told
        assert "neither pool can borrow" in told
        assert "In one pool, the tightest" in told or "No block of at most" in told
    else:
        assert "Here a block holds" in told
        assert "The price is the number of tables" in told


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


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BHLNC"])
def test_deepseek_v4_in_orders_that_vllm_refuses(order: str) -> None:
    with pytest.raises(AtlasError):
        plan("DeepSeek-V4-Flash", memory="60GiB", layout=order, policy="vllm")
    made = plan("DeepSeek-V4-Flash", memory="60GiB", layout=order)
    assert made.layout == order
    assert made.requests() > 1
    assert len(made.pools) == (1 if order == "BHLNC" else len(made.groups))


def test_kernel_blocks_in_block_outermost_orders() -> None:
    ask = {"memory": "40GiB", "block_size": 256, "backend": "FLASHINFER", "layout": "BLHNC"}
    vllm = plan("Llama-3.1-8B", policy="vllm", **ask)  # type: ignore[arg-type]
    assert vllm.regions[0].kernel_block == 256
    assert any("cannot be split" in warning for warning in vllm.warnings)
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
    assert auto == apart
    assert (len(shared.pools), len(apart.pools)) == (1, 2)
    assert shared.block_size * 8 <= 2096
    assert shared.requests(4096) > 2 * apart.requests(4096)
    assert padding(shared).share > padding(apart).share
    kimi = plan("Kimi-K3", memory="60GiB", tp=8, states="apart")
    assert len(kimi.pools) == 2
