"""What cannot be moved: a stable code for each reason, and before anything moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Route, route
from kvatlas.specs import (
    CrossAttention,
    FullAttention,
    LatentAttention,
    Mamba2,
    SlidingAttention,
)
from tests.planning.models import SMALL
from tests.routing.cases import small_plan, stacked

FULL = FullAttention(heads=4, head_dim=8)
DENSE = stacked("m", FULL, FULL)
SRC, DST = small_plan(DENSE, tp=2), small_plan(DENSE, tp=4, layout="BLHNC", block_size=32)
WAY = route(SRC, DST)
HUGE = 10**30
BLOCKS = SRC.num_blocks

GIVEN: dict[str, Any] = {
    "src_rank": 0, "dst_rank": 1, "src_blocks": [3, 1, 2], "dst_blocks": [5, 0], "tokens": 40,
}  # fmt: skip

BINDS: list[tuple[Code, dict[str, Any]]] = [
    # Block ids that no pool has.
    (Code.OUT_OF_RANGE, {"src_blocks": [3, 1, BLOCKS]}),
    (Code.OUT_OF_RANGE, {"src_blocks": [3, -1, 2]}),
    (Code.OUT_OF_RANGE, {"dst_blocks": [5, DST.num_blocks]}),
    (Code.OUT_OF_RANGE, {"dst_blocks": [-5, 0]}),
    (Code.OUT_OF_RANGE, {"src_blocks": [3, 1, 2**62]}),
    (Code.OUT_OF_RANGE, {"src_blocks": np.array([3, 1, 2**63 + 5], np.uint64)}),
    # The same block twice.
    (Code.TWICE, {"src_blocks": [3, 1, 3]}),
    (Code.TWICE, {"dst_blocks": [5, 5]}),
    # Tables that end too early.
    (Code.MISSING_BLOCKS, {"src_blocks": [3, 1]}),
    (Code.MISSING_BLOCKS, {"dst_blocks": []}),
    (Code.MISSING_BLOCKS, {"src_blocks": {}}),
    (Code.OUT_OF_RANGE, {"src_blocks": {0: [3, 1, 2], 1: [4]}}),
    (Code.OUT_OF_RANGE, {"dst_blocks": {-1: [5, 0]}}),
    # Tokens.
    (Code.BAD_TOKENS, {"tokens": (20, 10)}),
    (Code.BAD_TOKENS, {"tokens": -1}),
    (Code.BAD_TOKENS, {"tokens": (-5, 10)}),
    (Code.BAD_TOKENS, {"tokens": SRC.max_len + 1}),
    (Code.BAD_TOKENS, {"tokens": (0, 2**62)}),
    (Code.BAD_TOKENS, {"tokens": (1, 2, 3)}),
    (Code.BAD_TOKENS, {"tokens": ()}),
    # Ranks.
    (Code.BAD_RANK, {"src_rank": 2}),
    (Code.BAD_RANK, {"src_rank": -1}),
    (Code.BAD_RANK, {"dst_rank": 4}),
    (Code.BAD_RANK, {"dst_rank": HUGE}),
    (Code.NOT_A_SOURCE, {"src_rank": 1}),
    (Code.NOT_A_SOURCE, {"dst_rank": 3}),
    # Layers.
    (Code.UNKNOWN_LAYER, {"layers": ["layers.9.cache"]}),
    (Code.UNKNOWN_LAYER, {"layers": ["layers.0.cache", ""]}),
]


def named(case: tuple[Code, dict[str, Any]]) -> str:
    return f"{case[0]} {case[1]}"[:60]


@pytest.mark.parametrize("case", BINDS, ids=named)
def test_bind(case: tuple[Code, dict[str, Any]]) -> None:
    code, wrong = case
    WAY.bind(**GIVEN)
    with pytest.raises(AtlasError) as refusal:
        WAY.bind(**{**GIVEN, **wrong})
    assert refusal.value.code is code
    assert refusal.value.hint


TYPES: list[Any] = [1.0, 1.5, True, None, "1", b"1", float("nan"), float("inf"), object(), 1j]


@pytest.mark.parametrize(
    "wrong", TYPES, ids=lambda wrong: f"{type(wrong).__name__} {str(wrong)[:7]}"
)
def test_words_and_fractions_are_not_numbers(wrong: Any) -> None:
    """Wherever a number is asked for, and nothing but an `AtlasError` comes out."""
    for changed in (
        {"tokens": wrong}, {"tokens": (0, wrong)}, {"tokens": (wrong, 40)},
        {"src_rank": wrong}, {"dst_rank": wrong},
        {"src_blocks": wrong}, {"dst_blocks": wrong},
        {"src_blocks": [3, wrong, 2]}, {"dst_blocks": [wrong, 0]},
        {"src_blocks": {0: wrong}}, {"src_blocks": {wrong: [3, 1, 2]}},
    ):  # fmt: skip
        with pytest.raises(AtlasError):
            WAY.bind(**{**GIVEN, **changed})
    for asked in (
        {"dst_rank": wrong}, {"tokens": wrong}, {"dst_blocks": [wrong, 0]}, {"dst_blocks": wrong},
    ):  # fmt: skip
        with pytest.raises(AtlasError):
            WAY.needs(**{"dst_rank": 1, "dst_blocks": [5, 0], "tokens": 40, **asked})
    with pytest.raises(AtlasError):
        WAY.sources(wrong)


@pytest.mark.parametrize(
    "tables",
    [[[3, 1, 2]], [[3], [1], [2]], [3, HUGE, 2], ["3", "1", "2"], [[3, 1], [2]], {0: {3, 1, 2}}],
    ids=repr,
)
def test_a_table_is_one_row_of_whole_numbers(tables: Any) -> None:
    with pytest.raises(AtlasError):
        WAY.bind(**{**GIVEN, "src_blocks": tables})


def test_numpy_numbers_are_numbers() -> None:
    plain = WAY.bind(**GIVEN)
    same = WAY.bind(
        src_rank=np.int32(0),  # type: ignore[arg-type]
        dst_rank=np.uint8(1),  # type: ignore[arg-type]
        src_blocks=np.array([3, 1, 2], np.uint16),
        dst_blocks=(np.int64(5), np.int8(0)),  # type: ignore[arg-type]
        tokens=(np.int64(0), np.uint64(40)),
    )
    for one, other in zip(plain.copies, same.copies, strict=True):
        assert one.src.tolist() == other.src.tolist()
        assert one.dst.tolist() == other.dst.tolist()


def test_entries_that_are_not_needed_may_hold_anything() -> None:
    """Blocks before a range, behind it, or left behind by a window are never looked at."""
    WAY.bind(**{**GIVEN, "tokens": (16, 32), "src_blocks": [-7, 1], "dst_blocks": [5]})
    WAY.bind(**{**GIVEN, "src_blocks": [3, 1, 2, 2, -1, 2**62]})
    model = stacked("w", SlidingAttention(heads=4, head_dim=8, window=8), FULL)
    made = small_plan(model, policy="vllm")
    window = next(i for i, group in enumerate(made.groups) if group.kind == "sliding_window")
    tables = {window: [-1, -1, 9], 1 - window: [4, 5, 6]}
    route(made, made).bind(src_rank=0, dst_rank=0, src_blocks=tables, dst_blocks=tables, tokens=48)


def test_a_block_belongs_to_one_group_of_a_pool_at_a_time() -> None:
    made = small_plan(SMALL["sliding"], policy="vllm", least=1 << 18)
    assert {group.pool for group in made.groups} == {0}
    way = route(made, made)
    apart = {0: [1, 2, 3], 1: [4, 5, 6]}
    shared = {0: [1, 2, 3], 1: [4, 5, 2]}
    ranks: dict[str, Any] = {"src_rank": 0, "dst_rank": 0, "tokens": 48}
    way.bind(src_blocks=apart, dst_blocks=apart, **ranks)
    for src, dst in ((shared, apart), (apart, shared)):
        with pytest.raises(AtlasError) as refusal:
            way.bind(src_blocks=src, dst_blocks=dst, **ranks)
        assert refusal.value.code is Code.TWICE
    with pytest.raises(AtlasError) as refusal:
        way.needs(dst_rank=0, dst_blocks=shared, tokens=48)
    assert refusal.value.code is Code.TWICE


def test_groups_in_pools_of_their_own_may_use_the_same_ids() -> None:
    made = small_plan(SMALL["mamba hybrid"], states="apart")
    assert len(made.pools) == 2
    same = {index: [1] for index in range(len(made.groups))}
    route(made, made).bind(src_rank=0, dst_rank=0, src_blocks=same, dst_blocks=same, tokens=16)


def test_several_groups_want_several_tables() -> None:
    made = small_plan(SMALL["sliding"])
    with pytest.raises(AtlasError) as refusal:
        route(made, made).bind(
            src_rank=0, dst_rank=0, src_blocks=[1, 2], dst_blocks=[1, 2], tokens=20
        )
    assert refusal.value.code is Code.MISSING_BLOCKS


def test_a_recurrent_table_is_one_block_or_long_enough() -> None:
    made = small_plan(SMALL["recurrent"], least=1 << 18)
    way = route(made, made)
    last = (60 - 1) // made.groups[0].block
    given: dict[str, Any] = {"src_rank": 0, "dst_rank": 0, "tokens": 60}
    whole = list(range(last + 1))
    assert last >= 2
    way.bind(src_blocks=[7], dst_blocks=whole, **given)
    for short in (whole[:-1], []):
        with pytest.raises(AtlasError) as refusal:
            way.bind(src_blocks=[7], dst_blocks=short, **given)
        assert refusal.value.code is Code.MISSING_BLOCKS


# -- plans that do not go together ----------------------------------------------------------------


def plans(*specs: Any, name: str = "m", **more: Any) -> Plan:
    return small_plan(stacked(name, *specs), **more)


UNLIKE: list[tuple[Code, Callable[[], Any]]] = [
    (Code.UNLIKE_MODELS, lambda: route(plans(FULL), plans(FULL, name="n"))),
    (Code.MISSING_LAYERS, lambda: route(plans(FULL), plans(FULL, FULL))),
    (Code.MISSING_LAYERS, lambda: route(plans(FULL, FULL), plans(FULL))),
    (Code.UNLIKE_LAYERS, lambda: route(plans(FULL), plans(FullAttention(heads=8, head_dim=8)))),
    (Code.UNLIKE_LAYERS, lambda: route(plans(FULL), plans(FullAttention(heads=4, head_dim=16)))),
    (
        Code.UNLIKE_LAYERS,
        lambda: route(plans(FULL), plans(SlidingAttention(heads=4, head_dim=8, window=9))),
    ),
    (
        Code.UNLIKE_LAYERS,
        lambda: route(
            plans(*[SlidingAttention(heads=4, head_dim=8, window=8)]),
            plans(*[SlidingAttention(heads=4, head_dim=8, window=9)]),
        ),
    ),
    (
        Code.UNLIKE_LAYERS,
        lambda: route(
            plans(CrossAttention(heads=4, head_dim=8, source=8)),
            plans(CrossAttention(heads=4, head_dim=8, source=9)),
        ),
    ),
    (
        Code.UNLIKE_LAYERS,
        lambda: route(
            plans(Mamba2(heads=4, head_dim=8, groups=1, state_size=4)),
            plans(Mamba2(heads=4, head_dim=8, groups=2, state_size=4)),
        ),
    ),
    (
        Code.UNLIKE_LAYERS,
        lambda: route(
            plans(LatentAttention(latent=24, rope=8)), plans(LatentAttention(latent=16, rope=16))
        ),
    ),
    (
        Code.UNLIKE_DTYPES,
        lambda: route(plans(FULL), plans(FullAttention(heads=4, head_dim=8, dtype="fp16"))),
    ),
    (
        Code.UNLIKE_DTYPES,
        lambda: route(plans(FULL), plans(FullAttention(heads=4, head_dim=8, cache="fp8"))),
    ),
    (
        Code.UNLIKE_DTYPES,
        lambda: route(
            plans(FullAttention(heads=4, head_dim=8, cache="fp8_e4m3")),
            plans(FullAttention(heads=4, head_dim=8, cache="fp8_e5m2")),
        ),
    ),
    (
        Code.UNLIKE_DTYPES,
        lambda: route(
            plans(Mamba2(heads=4, head_dim=8, groups=1, state_size=4)),
            plans(Mamba2(heads=4, head_dim=8, groups=1, state_size=4, ssm_dtype="fp32")),
        ),
    ),
]


@pytest.mark.parametrize(
    ("code", "call"), UNLIKE, ids=[f"{code}-{i}" for i, (code, _) in enumerate(UNLIKE)]
)
def test_plans_of_unlike_models(code: Code, call: Callable[[], Any]) -> None:
    with pytest.raises(AtlasError) as refusal:
        call()
    assert refusal.value.code is code
    assert refusal.value.hint


def test_another_name_for_one_model_is_accepted_when_said() -> None:
    one, two = plans(FULL), plans(FULL, name="n", tp=2)
    assert isinstance(route(one, two, renamed=True), Route)


@pytest.mark.parametrize(
    "wrong", [None, 7, "plan", b"{}", {}, DENSE], ids=lambda w: type(w).__name__
)
def test_only_plans_are_routed(wrong: Any) -> None:
    for pair in ((SRC, wrong), (wrong, SRC)):
        with pytest.raises((AtlasError, TypeError)):
            route(*pair)


def test_a_layout_that_cannot_show_a_field_is_refused_before_anything_moves() -> None:
    """K of a transposed packing lies flat over its states, which LBNHC interleaves by heads."""
    with pytest.raises(AtlasError) as refusal:
        plans(FullAttention(heads=4, head_dim=8, packing="transposed"), layout="LBNHC")
    assert refusal.value.code is Code.LAYOUT_REFUSED


def test_a_hostile_plan_is_refused_when_it_is_read() -> None:
    """Nothing is routed to a peer whose plan leaves its pools."""
    text = msgspec.json.decode(SRC.to_json())
    text["regions"][0]["offset"] = SRC.pools[0].nbytes
    with pytest.raises(AtlasError):
        Plan.from_json(msgspec.json.encode(text))


PREPARED: list[tuple[Code, dict[str, Any]]] = [
    (Code.OUT_OF_RANGE, {"src_blocks": [3, 1, BLOCKS]}),
    (Code.OUT_OF_RANGE, {"dst_blocks": [-1, 0]}),
    (Code.TWICE, {"dst_blocks": [5, 5]}),
    (Code.MISSING_BLOCKS, {"src_blocks": [3, 1]}),
    (Code.BAD_TOKENS, {"tokens": (20, 10)}),
    (Code.BAD_TOKENS, {"tokens": SRC.max_len + 1}),
    (Code.NOT_AN_INTEGER, {"tokens": 1.5}),
    (Code.NOT_AN_INTEGER, {"src_blocks": [3.0, 1.0, 2.0]}),
]


@pytest.mark.parametrize("case", PREPARED, ids=named)
def test_select(case: tuple[Code, dict[str, Any]]) -> None:
    code, wrong = case
    prepared = WAY.prepare(src_rank=0, dst_rank=1)
    given = {key: GIVEN[key] for key in ("src_blocks", "dst_blocks", "tokens")}
    prepared.select(**given)
    with pytest.raises(AtlasError) as refusal:
        prepared.select(**{**given, **wrong})
    assert refusal.value.code is code


def test_prepare_wants_ranks_that_feed_each_other() -> None:
    for src, dst, code in (
        (1, 0, Code.NOT_A_SOURCE), (2, 0, Code.BAD_RANK), (0, 4, Code.BAD_RANK),
    ):  # fmt: skip
        with pytest.raises(AtlasError) as refusal:
            WAY.prepare(src_rank=src, dst_rank=dst)
        assert refusal.value.code is code


@pytest.mark.parametrize("wrong", [-1, 1.5, None, "0", True, HUGE], ids=repr)
def test_base_addresses_are_addresses(wrong: Any) -> None:
    (copy,) = WAY.bind(**GIVEN).copies
    for name in ("src_base", "dst_base"):
        with pytest.raises(AtlasError):
            copy.descriptors(**{name: wrong})
    with pytest.raises(AtlasError):
        copy.descriptors(src_base=2**63)
