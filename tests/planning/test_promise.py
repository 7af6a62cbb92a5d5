"""Policy atlas is never worse than vLLM: for every model, topology, length and phase.

What a plan fits is counted here from its groups and pools, block by block, and blocks that
were not taken are tried one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model, catalogue
from kvatlas.planning import Plan, plan
from kvatlas.planning.sized_layers import kind_of, page_of
from tests.planning.models import ATTENTION, CONV, DELTA, MAMBA, SLIDING, SMALL, WIDE, model_of
from tests.profiles import DEEP

DECODING = 1
LENGTHS = (1, 512, 4096, 16_384, 32_768)
TPS = (1, 2, 4, 8)
PROMISE = 0.99
KERNEL_BLOCK = 16
SIZES = ("20GiB", "60GiB", "140GiB")
REFUSALS = (Code.BAD_TOPOLOGY, Code.TP_HEADS, Code.NOT_ENOUGH_MEMORY)


def fits(made: Plan, length: int, in_flight: int) -> float:
    """Requests that every pool has blocks for."""
    found = []
    for pool in made.pools:
        groups = [group for group in made.groups if group.pool == pool.index]
        taken = sum(group.blocks(length, in_flight=in_flight, dcp=made.dcp) for group in groups)
        found.append(pool.blocks / taken)
    return min(found)


def both(model: Any, **ask: Any) -> tuple[Plan, Plan] | None:
    """(atlas, vllm), or nothing where vLLM refuses."""
    try:
        vllm = plan(model, policy="vllm", **ask)
    except AtlasError as refusal:
        assert refusal.code in REFUSALS, refusal
        return None
    return plan(model, **ask), vllm


def sizes_for(name: str) -> tuple[str, ...]:
    """One size of memory for each model, by turns; `make bench` and the deep profile have all."""
    return SIZES if DEEP else (SIZES[list(catalogue()).index(name) % len(SIZES)],)


def holds(atlas: Plan, vllm: Plan, lengths: tuple[int, ...] = LENGTHS) -> None:
    """At these lengths, and where a block more is taken in either plan."""
    sizes = (atlas.block_size, atlas.block_size + 1, vllm.block_size, 3 * vllm.block_size)
    for length, in_flight in product((*lengths, *sizes), (atlas.in_flight, DECODING)):
        ours, theirs = fits(atlas, length, in_flight), fits(vllm, length, in_flight)
        assert ours >= PROMISE * theirs, (atlas, vllm, length, in_flight)
        assert ours == pytest.approx(atlas.requests(length, in_flight=in_flight))


@pytest.mark.parametrize("name", list(catalogue()))
def test_never_worse_than_vllm(name: str) -> None:
    model = Model.load(name)
    for tp, memory in product(TPS, sizes_for(name)):
        plans = both(model, memory=memory, tp=tp)
        if plans is not None:
            holds(*plans)
            assert len(plans[0].pools) == 1


@pytest.mark.parametrize("name", ["Qwen3.5-397B-A17B", "Kimi-K3", "Zamba2-2.7B", "Nemotron-H-8B"])
def test_never_worse_than_vllm_on_pipelines_and_in_other_settings(name: str) -> None:
    for ask in (
        {"pp": 2},
        {"pp": 4, "tp": 2},
        {"pp": 3, "max_len": 4096},
        {"kv_dtype": "fp8"},
        {"prefix_caching": False},
        {"in_flight": 1, "max_len": 131_072},
        {"block_size": 64},
    ):
        plans = both(name, memory="200GiB", **ask)
        if plans is not None:
            holds(*plans)


@pytest.mark.parametrize("name", list(SMALL))
def test_never_worse_than_vllm_for_small_models_of_every_kind(name: str) -> None:
    for tp, pp, memory in product((1, 2), (1, 2), ("8MiB", "20MiB")):
        try:
            plans = both(SMALL[name], memory=memory, tp=tp, pp=pp, max_len=64, in_flight=32)
        except AtlasError as refusal:
            assert refusal.code in (Code.PAGES_NOT_UNIFIED, Code.LAYOUT_REFUSED), refusal
            continue
        if plans is not None:
            holds(*plans, lengths=(1, 16, 17, 33, 64))


def test_hybrids_of_several_kinds_share_one_pool() -> None:
    for layers in (
        (DELTA, ATTENTION, WIDE, DELTA, SLIDING),
        (CONV, MAMBA, ATTENTION, MAMBA, CONV, ATTENTION),
    ):
        made = plan(model_of("mixed", *layers), memory="16MiB", max_len=64, in_flight=32)
        assert len(made.pools) == 1
        assert len(made.layers) == len(layers)


def smaller_blocks(name: str, tp: int, largest: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(tokens, bytes, tables of attention, tables of states, blocks held): all there are."""
    layers = Model.load(name).layers
    states = [layer.spec for layer in layers if kind_of(layer.spec) == "recurrent"]
    attention = [layer.spec for layer in layers if kind_of(layer.spec) != "recurrent"]
    token = page_of(attention[0], KERNEL_BLOCK, tp).unpadded // KERNEL_BLOCK
    held = 3 if type(states[0]).__name__ == "Mamba2" else 2
    for splits in (1, 2, 4, 8):
        try:
            part = page_of(states[0], 1, tp * splits).nbytes
        except AtlasError:
            continue
        for few in range(1, len(attention) + 1):
            for many in range(1, 65 - few):
                wide, deep = -(-len(attention) // few), -(-len(states) * splits // many)
                for tokens in range(KERNEL_BLOCK, largest, KERNEL_BLOCK):
                    nbytes = max(wide * tokens * token, deep * part)
                    yield tokens, nbytes, few, many, held


@pytest.mark.parametrize(
    ("name", "tp"), [("Granite-4.0-h-small", 1), ("Nemotron-3-Super-120B-A12B", 8)]
)
def test_vllms_own_plan_is_taken_only_where_no_smaller_block_keeps_the_promise(
    name: str, tp: int
) -> None:
    memory = 60 << 30
    made, vllm = plan(name, memory=memory, tp=tp), plan(name, memory=memory, tp=tp, policy="vllm")
    assert made.regions == vllm.regions
    assert "This is vLLM's plan" in made.explain()

    @cache
    def theirs(length: int) -> float:
        return vllm.requests(length, in_flight=DECODING)

    for tokens, nbytes, few, many, held in smaller_blocks(name, tp, vllm.block_size):
        blocks = memory // nbytes

        def kept(
            length: int, *, size: int = tokens, few: int = few, rest: int = many * held,
            blocks: int = blocks,
        ) -> bool:  # fmt: skip
            return blocks / (few * -(-length // size) + rest) >= PROMISE * theirs(length)

        if kept(32_768) and kept(vllm.block_size) and kept(512):
            assert not all(kept(length) for length in range(1, 32_769, tokens)), tokens


def test_a_length_past_all_machines_costs_nothing() -> None:
    made = plan("Qwen3.5-397B-A17B", memory=1 << 50, tp=8, max_len=2**31)
    assert made.requests() > 0
