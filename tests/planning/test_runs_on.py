"""Plans that vLLM can run: properties of every hybrid's plan, read from its placements.

Nothing here asks the planner why it chose a plan. Blocks are walked byte by byte in small pools,
and requests are counted from the groups.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise, product

import pytest

from kvatlas import AtlasError, Code
from kvatlas.geometry import Placement
from kvatlas.models import Model, catalogue
from kvatlas.planning import BACKENDS, Plan, backends_of, plan
from kvatlas.planning.runnable import obstacles
from kvatlas.planning.sized_layers import kind_of
from kvatlas.specs import FullAttention, Mamba2, Spec
from tests.planning.models import model_of

TPS = (1, 2, 4, 8)
MAX_LEN = 8192
RELEASES = ("0.32", "0.33")


@cache
def hybrids() -> tuple[str, ...]:
    kinds = {name: {kind_of(one.spec) for one in Model.load(name).layers} for name in catalogue()}
    return tuple(name for name, kept in kinds.items() if "recurrent" in kept and len(kept) > 1)


def made_both(name: str, tp: int, release: str) -> tuple[Plan, Plan] | None:
    about = {"memory": "60GiB", "tp": tp, "max_len": MAX_LEN}
    try:
        theirs = plan(name, policy=f"vllm@{release}", **about)  # type: ignore[arg-type]
    except AtlasError as refusal:
        assert refusal.code in (Code.BAD_TOPOLOGY, Code.TP_HEADS, Code.NOT_ENOUGH_MEMORY)
        return None
    return plan(name, runs_on=f"vllm@{release}", **about), theirs  # type: ignore[arg-type]


def spans_of_block(at: Placement, block: int) -> tuple[int, int]:
    """The first and last byte + 1 of a layer's page in a block, from the corners of the page."""
    starts = [at.offset + block * at.stride("B")]
    for axis in at.axes:
        if axis != "B":
            last = (at.size(axis) - 1) * at.stride(axis)
            starts = [start + step for start in starts for step in (0, last)]
    return min(starts), max(starts) + 1


@pytest.mark.parametrize("name", hybrids())
@pytest.mark.parametrize("release", RELEASES)
def test_vllm_can_run_every_hybrid(name: str, release: str) -> None:
    """One pool, whole states in one piece, pages side by side, blocks that kernels read."""
    for tp in TPS:
        found = made_both(name, tp, release)
        if found is None:
            continue
        made, theirs = found
        assert len(made.pools) == 1, (made, "one allocation")
        assert len({pool.stage for pool in made.pools}) == 1
        if made.regions == theirs.regions:
            continue  # vLLM's own plan
        pool, backends = made.pools[0], backends_of(Model.load(name))
        tables: dict[str, int] = {}
        places: dict[str, Placement] = {}
        for region in made.regions:
            for layer in region.layers:
                assert layer.name not in tables, "a state in two parts, or a layer in two groups"
                tables[layer.name] = region.group
                backend = backends[layer.name]
                places[layer.name] = made.placement(layer.name)
                block = places[layer.name].size("N")
                if backend is not None:
                    assert backend.reads(made.groups[region.group].block), (layer.name, block)
                    assert made.page(layer.name).states == made.groups[region.group].block
        for group in range(len(made.groups)):
            for block in (0, 1, pool.blocks - 1):
                members = [layer for layer, home in tables.items() if home == group]
                spans = sorted(spans_of_block(places[layer], block) for layer in members)
                for (_, end), (start, _) in pairwise(spans):
                    assert end <= start, (name, tp, "two layers of a group overlap")
                first = block * pool.block_bytes
                assert first <= spans[0][0], "a page before its block"
                assert spans[-1][1] <= first + pool.block_bytes, "a page after its block"
        assert obstacles(made) == ()


def taken(made: Plan, length: int, in_flight: int) -> int:
    return sum(group.blocks(length, in_flight=in_flight) for group in made.groups)


@pytest.mark.parametrize("name", hybrids())
def test_the_promise_holds_up_to_max_len(name: str) -> None:
    """Every length at which either plan takes one more block, while prefilling and decoding."""
    for tp in (1, 8):
        found = made_both(name, tp, "0.33")
        if found is None:
            continue
        made, theirs = found
        assert made.block_size <= theirs.block_size
        sizes = (made.block_size, theirs.block_size)
        edges = {n + 1 for size in sizes for n in range(0, MAX_LEN, size)} | {MAX_LEN}
        for length, in_flight in product(sorted(edges), (made.in_flight, 1)):
            ours = made.num_blocks / taken(made, length, in_flight)
            other = theirs.num_blocks / taken(theirs, length, in_flight)
            assert ours >= 0.99 * other, (name, tp, length, in_flight)


GRANITE = Mamba2(
    heads=8, head_dim=32, groups=1, state_size=128, conv_dtype="fp32", ssm_dtype="fp32"
)
TOKEN = FullAttention(heads=2, head_dim=32, dtype="fp32")


def tiny_granite() -> Model:
    """4 attention layers with 512 bytes per token, and 8 recurrent layers of 137,216 bytes."""
    layers: list[dict[str, Spec]] = [{"mixer": GRANITE}, {"attn": TOKEN}, {"mixer": GRANITE}]
    return model_of("tiny granite", *layers * 4)


def test_a_short_max_len_admits_smaller_blocks() -> None:
    """At 1,024 tokens states dominate, so pages may be rounded down and attention padded."""
    short, long = (
        plan(tiny_granite(), memory="1GiB", max_len=length, runs_on="vllm", backend="CPU_ATTN")
        for length in (1024, 262_144)
    )
    theirs = plan(tiny_granite(), memory="1GiB", max_len=1024, policy="vllm", backend="CPU_ATTN")
    assert short.block_size < long.block_size <= theirs.block_size
    assert short.requests(in_flight=1) > theirs.requests(in_flight=1)
    assert short.layout == "BLHNC", "CPU_ATTN takes strides"


@pytest.mark.parametrize("pack", [1, 2, 4])
def test_packs_round_pages_up_or_down(pack: int) -> None:
    """Of both roundings, the one that fits more requests of max_len; states stay whole."""
    made = plan(tiny_granite(), memory="1GiB", max_len=1024, runs_on="vllm", pack=pack)
    first = {kind_of(made.spec(name)): name for name in reversed(made.layers)}
    state, attention = made.page(first["recurrent"]).unpadded, first["full_attention"]
    held = made.groups[made.region_of(first["recurrent"])[0].group].blocks(1024)
    token = made.page(attention).unpadded // made.block_size
    each = -(-4 // pack)
    step = 16

    def requests(tokens: int) -> float:
        width = max(4 * tokens * token, each * state)
        return ((1 << 30) // width) / (-(-1024 // tokens) + held * -(-8 // each))

    up = step * -(-state // (step * token * pack))
    down = max(step, state // (step * token * pack) * step)
    assert requests(made.block_size) == max(requests(up), requests(down))
    assert made.bytes_per_block == max(4 * made.block_size * token, each * state)
    assert not obstacles(made)


def test_plans_that_no_engine_runs_are_marked() -> None:
    split = plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2)
    assert split.summary()["not_runnable"] == ["recurrent states are split into 4 parts"]
    assert "No engine can run this plan: recurrent states are split" in split.explain()
    apart = plan("Qwen3-Next-80B-A3B", memory="60GiB", requests=64)
    assert apart.summary()["not_runnable"] == ["a rank has 2 pools"]
    odd = plan("Llama-3.1-8B", memory="60GiB", layout="HLBNC")
    assert odd.summary()["not_runnable"] == ["no engine has the layout HLBNC"]
    runs = plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2, runs_on="vllm")
    assert runs.summary()["not_runnable"] == []
    assert "No engine" not in runs.explain()


def test_other_models_get_vllms_plan() -> None:
    for name in ("Llama-3.1-8B", "gpt-oss-20b", "DeepSeek-V3.2"):
        runs = plan(name, memory="60GiB", runs_on="vllm@0.33")
        assert runs.regions == plan(name, memory="60GiB", policy="vllm@0.33").regions


def test_backends_that_take_no_strides_keep_vllms_plan() -> None:
    about = {"memory": "60GiB", "backend": "FLEX_ATTENTION"}
    runs = plan("Qwen3-Next-80B-A3B", runs_on="vllm@0.33", **about)  # type: ignore[arg-type]
    theirs = plan("Qwen3-Next-80B-A3B", policy="vllm@0.33", **about)  # type: ignore[arg-type]
    assert runs.regions == theirs.regions
    assert not BACKENDS["FLEX_ATTENTION"].strided


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"runs_on": "sglang"}, Code.UNKNOWN_POLICY),
        ({"runs_on": "vllm@0.1"}, Code.UNKNOWN_POLICY),
        ({"runs_on": "vllm", "policy": "vllm"}, Code.CONTRADICTORY),
        ({"runs_on": "vllm", "states": "apart"}, Code.CONTRADICTORY),
        ({"runs_on": "vllm", "requests": 8}, Code.CONTRADICTORY),
        ({"runs_on": "vllm", "pack": 2, "backend": "FLEX_ATTENTION"}, Code.BAD_PACK),
        ({"runs_on": "vllm", "pack": 3, "backend": "FLASHINFER"}, Code.BAD_PACK),
    ],
)
def test_refusals(options: dict[str, object], code: Code) -> None:
    with pytest.raises(AtlasError) as refusal:
        plan("Qwen3-Next-80B-A3B", memory="60GiB", **options)  # type: ignore[arg-type]
    assert refusal.value.code is code, refusal.value
