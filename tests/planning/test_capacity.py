"""What fits: memory is never exceeded, nothing is lost, and what is claimed adds up."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.planning import Plan, padding, plan
from tests.planning.models import ATTENTION, CONV, DELTA, MAMBA, SLIDING, SMALL, WIDE, model_of

SHORT: dict[str, Any] = {"max_len": 64, "in_flight": 32}


def fits(made: Plan) -> None:
    for stage in range(made.pp):
        assert sum(pool.nbytes for pool in made.pools if pool.stage == stage) <= made.memory


def adds_up(made: Plan) -> None:
    """A block id is taken on every stage that has its pool."""
    taken = made.blocks_per_request()
    whole = sum(taken.get(pool.index, 0) * pool.block_bytes for pool in made.pools)
    assert padding(made).claimed == whole


@pytest.mark.parametrize("name", list(SMALL))
def test_pools_fit_and_claims_add_up(name: str) -> None:
    policies: tuple[Any, ...] = ("vllm", "atlas")
    for pp, policy in product((1, 2, 3), policies):
        made = plan(SMALL[name], memory="4MiB", pp=pp, policy=policy, **SHORT)
        fits(made)
        adds_up(made)
        assert set(made.layers) == {layer.name for layer in SMALL[name].layers}, made
        waste = padding(made)
        assert min(waste.pages, waste.empty) >= 0, made


@pytest.mark.parametrize("pp", [5, 6, 7, 8])
@pytest.mark.parametrize("name", ["Granite-4.0-h-small", "Bamba-9B"])
def test_states_for_many_requests_on_a_stage_with_nothing_else(name: str, pp: int) -> None:
    try:
        made = plan(name, memory="60GiB", pp=pp, requests=1500, max_len=2048, states="apart")
    except AtlasError as refusal:
        assert refusal.code is Code.NOT_ENOUGH_MEMORY
    else:
        fits(made)


@pytest.mark.parametrize("counts", [(6, 3, 2), (5, 1, 1), (5, 2, 2), (1, 1, 1), (2, 5, 3)])
def test_no_layer_is_lost(counts: tuple[int, int, int]) -> None:
    sliding, wide, full = counts
    model = model_of("uneven", *[SLIDING] * sliding, *[WIDE] * wide, *[ATTENTION] * full)
    policies: tuple[Any, ...] = ("vllm", "atlas")
    for policy, order in product(policies, ("BLHNC", "BHLNC", "LBNHC")):
        try:
            made = plan(model, memory="32MiB", layout=order, policy=policy, **SHORT)
        except AtlasError as refusal:
            assert policy == "vllm", order
            assert refusal.code in (Code.PAGES_NOT_UNIFIED, Code.LAYOUT_REFUSED)
        else:
            assert len(made.layers) == sum(counts), made


@pytest.mark.parametrize("name", ["Nemotron-H-8B", "Qwen3.5-397B-A17B", "Kimi-K3"])
@pytest.mark.parametrize("states", ["auto", "apart"])
def test_the_least_memory_that_is_named_is_enough(name: str, states: Any) -> None:
    """And one byte less is not."""
    with pytest.raises(AtlasError) as refusal:
        plan(name, memory="1MB", max_len=2048, states=states)
    least = int(re.search(r"at least ([\d,]+) bytes", refusal.value.hint)[1].replace(",", ""))  # type: ignore[index]
    made = plan(name, memory=least, max_len=2048, states=states)
    assert made.requests() >= 1
    fits(made)
    with pytest.raises(AtlasError):
        plan(name, memory=least - 1, max_len=2048, states=states)


def test_a_forgotten_unit_is_noticed() -> None:
    with pytest.raises(AtlasError) as refusal:
        plan("Qwen3-8B", memory=80)
    assert str(refusal.value) == (
        "Not enough memory: one request of 32,768 tokens needs 4.5 GiB per rank. "
        "Got 80 B. Did you mean 80GB? [not_enough_memory]"
    )


def test_little_memory_is_shared_rather_than_refused() -> None:
    """Pools of their own need more for the first request than a shared one."""
    small = plan("Nemotron-H-8B", memory="420MiB", max_len=2048)
    assert len(small.pools) == 1
    assert small.requests() >= 1


def test_unlike_recurrent_layers() -> None:
    model = model_of("unlike", CONV, MAMBA, ATTENTION, MAMBA, CONV, ATTENTION)
    made = plan(model, memory="1MiB", **SHORT)
    assert max(group.held for group in made.groups if group.kind == "recurrent") == 3
    with pytest.raises(AtlasError) as refusal:
        plan(model, memory="1MiB", pack=2, **SHORT)
    assert refusal.value.code is Code.BAD_PACK
    mixed = model_of("several kinds", DELTA, ATTENTION, WIDE, DELTA, SLIDING)
    assert set(plan(mixed, memory="4MiB", **SHORT).layers) == {x.name for x in mixed.layers}


def test_the_first_pool_is_attentions_on_every_topology() -> None:
    made = plan("Nemotron-H-8B", memory="60GiB", pp=8, states="apart")
    assert made.num_blocks == next(pool.blocks for pool in made.pools if pool.index == 0)
    assert made.bytes_per_block < 1 << 20


def test_kernels_that_cannot_read_a_pack_are_named() -> None:
    made = plan("Qwen3.5-35B-A3B", memory="60GiB", tp=2, backend="FLASHINFER", pack=4)
    assert any("FLASHINFER reads blocks of" in warning for warning in made.warnings)
    auto = plan("Kimi-K3", memory="60GiB", tp=4, backend="FLASHMLA")
    blocks = {r.kernel_block for r in auto.regions if auto.groups[r.group].kind != "recurrent"}
    assert blocks <= {64} or auto.warnings


@pytest.mark.parametrize("length", [0, -5, 1.5, "8k", None])
def test_requests_of_a_length_that_is_none(length: Any) -> None:
    made = plan("Llama-3.1-8B", memory="60GiB")
    if length is None:
        assert made.requests(length) == made.requests(made.max_len)
        return
    with pytest.raises(AtlasError):
        made.requests(length)
