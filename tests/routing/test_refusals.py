"""What cannot be moved: a stable code for each reason, and before anything moves."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.planning import Plan, plan
from kvatlas.routing import check, check_tables, fingerprint, route
from kvatlas.specs import (
    CrossAttention,
    FullAttention,
    LatentAttention,
    Mamba2,
    SlidingAttention,
)
from tests.planning.models import SMALL, model_of
from tests.routing.cases import moving, small_plan, stacked

FULL = FullAttention(heads=4, head_dim=8)
DENSE = stacked("m", FULL, FULL)
SRC, DST = small_plan(DENSE, tp=2), small_plan(DENSE, tp=4, layout="BLHNC", block_size=32)
WAY = route(SRC, DST)
HUGE = 10**30
BLOCKS = SRC.num_blocks

GIVEN: dict[str, Any] = {
    "source_rank": 0, "destination_rank": 1,
    "source_blocks": [3, 1, 2], "destination_blocks": [5, 0], "tokens": 40,
}  # fmt: skip

BINDS: list[tuple[Code, dict[str, Any]]] = [
    # Block ids that no pool has.
    (Code.OUT_OF_RANGE, {"source_blocks": [3, 1, BLOCKS]}),
    (Code.OUT_OF_RANGE, {"source_blocks": [3, -1, 2]}),
    (Code.OUT_OF_RANGE, {"destination_blocks": [5, DST.num_blocks]}),
    (Code.OUT_OF_RANGE, {"destination_blocks": [-5, 0]}),
    (Code.OUT_OF_RANGE, {"source_blocks": [3, 1, 2**62]}),
    (Code.OUT_OF_RANGE, {"source_blocks": np.array([3, 1, 2**63 + 5], np.uint64)}),
    # The same block twice.
    (Code.TWICE, {"source_blocks": [3, 1, 3]}),
    (Code.TWICE, {"destination_blocks": [5, 5]}),
    # Tables that end too early.
    (Code.MISSING_BLOCKS, {"source_blocks": [3, 1]}),
    (Code.MISSING_BLOCKS, {"destination_blocks": []}),
    (Code.MISSING_BLOCKS, {"source_blocks": {}}),
    (Code.OUT_OF_RANGE, {"source_blocks": {0: [3, 1, 2], 1: [4]}}),
    (Code.OUT_OF_RANGE, {"destination_blocks": {-1: [5, 0]}}),
    # Tokens.
    (Code.BAD_TOKENS, {"tokens": (20, 10)}),
    (Code.BAD_TOKENS, {"tokens": -1}),
    (Code.BAD_TOKENS, {"tokens": (-5, 10)}),
    (Code.BAD_TOKENS, {"tokens": SRC.max_len + 1}),
    (Code.BAD_TOKENS, {"tokens": (0, 2**62)}),
    (Code.BAD_TOKENS, {"tokens": (1, 2, 3)}),
    (Code.BAD_TOKENS, {"tokens": ()}),
    # Ranks.
    (Code.BAD_RANK, {"source_rank": 2}),
    (Code.BAD_RANK, {"source_rank": -1}),
    (Code.BAD_RANK, {"destination_rank": 4}),
    (Code.BAD_RANK, {"destination_rank": HUGE}),
    (Code.NOT_A_SOURCE, {"source_rank": 1}),
    (Code.NOT_A_SOURCE, {"destination_rank": 3}),
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
        {"source_rank": wrong}, {"destination_rank": wrong},
        {"source_blocks": wrong}, {"destination_blocks": wrong},
        {"source_blocks": [3, wrong, 2]}, {"destination_blocks": [wrong, 0]},
        {"source_blocks": {0: wrong}}, {"source_blocks": {wrong: [3, 1, 2]}},
    ):  # fmt: skip
        with pytest.raises(AtlasError):
            WAY.bind(**{**GIVEN, **changed})
    for asked in (
        {"destination_rank": wrong}, {"tokens": wrong},
        {"destination_blocks": [wrong, 0]}, {"destination_blocks": wrong},
    ):  # fmt: skip
        with pytest.raises(AtlasError):
            WAY.needs(
                **{"destination_rank": 1, "destination_blocks": [5, 0], "tokens": 40, **asked}
            )
    with pytest.raises(AtlasError):
        WAY.sources(wrong)


@pytest.mark.parametrize(
    "tables",
    [[[3, 1, 2]], [[3], [1], [2]], [3, HUGE, 2], ["3", "1", "2"], [[3, 1], [2]], {0: {3, 1, 2}}],
    ids=repr,
)
def test_a_table_is_one_row_of_whole_numbers(tables: Any) -> None:
    with pytest.raises(AtlasError):
        WAY.bind(**{**GIVEN, "source_blocks": tables})


def test_numpy_numbers_are_numbers() -> None:
    plain = WAY.bind(**GIVEN)
    same = WAY.bind(
        source_rank=np.int32(0),  # type: ignore[arg-type]
        destination_rank=np.uint8(1),  # type: ignore[arg-type]
        source_blocks=np.array([3, 1, 2], np.uint16),
        destination_blocks=(np.int64(5), np.int8(0)),  # type: ignore[arg-type]
        tokens=(np.int64(0), np.uint64(40)),
    )
    for one, other in zip(plain.copies, same.copies, strict=True):
        assert one.source.tolist() == other.source.tolist()
        assert one.destination.tolist() == other.destination.tolist()


def test_entries_that_are_not_needed_may_hold_anything() -> None:
    """Blocks before a range, behind it, or left behind by a window are never looked at."""
    WAY.bind(**{**GIVEN, "tokens": (16, 32), "source_blocks": [-7, 1], "destination_blocks": [5]})
    WAY.bind(**{**GIVEN, "source_blocks": [3, 1, 2, 2, -1, 2**62]})
    model = stacked("w", SlidingAttention(heads=4, head_dim=8, window=8), FULL)
    made = small_plan(model, policy="vllm")
    window = next(i for i, group in enumerate(made.groups) if group.kind == "sliding_window")
    tables = {window: [-1, -1, 9], 1 - window: [4, 5, 6]}
    route(made, made).bind(
        source_rank=0,
        destination_rank=0,
        source_blocks=tables,
        destination_blocks=tables,
        tokens=48,
    )


def test_a_block_belongs_to_one_group_of_a_pool_at_a_time() -> None:
    made = small_plan(SMALL["sliding"], policy="vllm", least=1 << 18)
    assert {group.pool for group in made.groups} == {0}
    way = route(made, made)
    apart = {0: [1, 2, 3], 1: [4, 5, 6]}
    shared = {0: [1, 2, 3], 1: [4, 5, 2]}
    ranks: dict[str, Any] = {"source_rank": 0, "destination_rank": 0, "tokens": 48}
    way.bind(source_blocks=apart, destination_blocks=apart, **ranks)
    for src, dst in ((shared, apart), (apart, shared)):
        with pytest.raises(AtlasError) as refusal:
            way.bind(source_blocks=src, destination_blocks=dst, **ranks)
        assert refusal.value.code is Code.TWICE
    with pytest.raises(AtlasError) as refusal:
        way.needs(destination_rank=0, destination_blocks=shared, tokens=48)
    assert refusal.value.code is Code.TWICE


def test_groups_in_pools_of_their_own_may_use_the_same_ids() -> None:
    made = small_plan(SMALL["mamba hybrid"], states="apart")
    assert len(made.pools) == 2
    same = {index: [1] for index in range(len(made.groups))}
    route(made, made).bind(
        source_rank=0, destination_rank=0, source_blocks=same, destination_blocks=same, tokens=16
    )


def test_several_groups_want_several_tables() -> None:
    made = small_plan(SMALL["sliding"])
    with pytest.raises(AtlasError) as refusal:
        route(made, made).bind(
            source_rank=0,
            destination_rank=0,
            source_blocks=[1, 2],
            destination_blocks=[1, 2],
            tokens=20,
        )
    assert refusal.value.code is Code.MISSING_BLOCKS


def test_a_recurrent_table_is_one_block_or_long_enough() -> None:
    made = small_plan(SMALL["recurrent"], least=1 << 18)
    way = route(made, made)
    last = (60 - 1) // made.groups[0].block
    given: dict[str, Any] = {"source_rank": 0, "destination_rank": 0, "tokens": 60}
    whole = list(range(last + 1))
    assert last >= 2
    way.bind(source_blocks=[7], destination_blocks=whole, **given)
    for short in (whole[:-1], []):
        with pytest.raises(AtlasError) as refusal:
            way.bind(source_blocks=[7], destination_blocks=short, **given)
        assert refusal.value.code is Code.MISSING_BLOCKS


def test_layers_from_a_generator_are_those_that_it_names() -> None:
    names = SRC.layers[:1]
    ends: dict[str, Any] = {"source_rank": 0, "destination_rank": 0}
    tables: dict[str, Any] = {
        "source_blocks": [7, 1, 4],
        "destination_blocks": [5, 0],
        "tokens": 40,
    }
    needed: dict[str, Any] = {"destination_rank": 0, "destination_blocks": [5, 0], "tokens": 40}
    asks: list[Callable[[Any], int]] = [
        lambda layers: WAY.bind(**ends, **tables, layers=layers).nbytes,
        lambda layers: WAY.stream(**ends, **tables, layers=layers).nbytes,
        lambda layers: WAY.needed_bytes(**needed, layers=layers),
        lambda layers: sum(int(n.sum()) for _, n in WAY.needs(**needed, layers=layers).values()),
        lambda layers: WAY.prepare(**ends, layers=layers).counts[0],
        lambda layers: len(route(SRC, DST, layers=layers).layers),
        lambda layers: check(SRC, DST, layers=layers, tokens=40).nbytes,
    ]
    for asked in asks:
        assert asked(name for name in names) == asked(names) > 0
    for asked in asks[:4]:
        with pytest.raises(AtlasError) as refusal:
            asked(name for name in (*names, "no such layer"))
        assert refusal.value.code is Code.UNKNOWN_LAYER


def test_lengths_are_checked_before_arrays_are_made() -> None:
    long = plan("Qwen3-8B", memory="700TiB", max_len=1 << 32)
    way = route(long, long)
    ends: dict[str, Any] = {"source_rank": 0, "destination_rank": 0}
    tables: dict[str, Any] = {
        "source_blocks": [1, 2],
        "destination_blocks": [3, 4],
        "tokens": 1 << 31,
    }
    tracemalloc.start()
    for call in (
        lambda: way.bind(**ends, **tables),
        lambda: way.stream(**ends, **tables),
        lambda: way.needs(destination_rank=0, destination_blocks=[3, 4], tokens=1 << 31),
        lambda: way.needed_bytes(destination_rank=0, destination_blocks=[3, 4], tokens=1 << 31),
        lambda: way.prepare(**ends).select(**tables),
        lambda: check_tables(long, 0, [1, 2], 1 << 31),
    ):
        with pytest.raises(AtlasError) as refusal:
            call()
        assert refusal.value.code is Code.MISSING_BLOCKS
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_tables_are_held_to_the_plan_that_they_are_for() -> None:
    """What a node is given, before anybody asks for it: every group, in range, once."""
    hybrid = small_plan(SMALL["sliding"], policy="vllm", block_size=16)
    groups = range(len(hybrid.groups))
    assert len(groups) > 1
    tokens = 80
    entries = {g: [10 * g + e for e in range(5)] for g in groups}
    wrong: list[tuple[Code, Any]] = [
        (Code.OUT_OF_RANGE, {**entries, 0: [*entries[0][:4], 10**9]}),
        (Code.OUT_OF_RANGE, {**entries, 0: [*entries[0][:4], -1]}),
        (Code.OUT_OF_RANGE, {**entries, len(groups): [1]}),
        (Code.MISSING_BLOCKS, {**entries, 0: entries[0][:4]}),
        (Code.MISSING_BLOCKS, {g: entries[g] for g in groups if g}),
        (Code.TWICE, {**entries, 0: [*entries[0][:4], entries[0][3]]}),
        (Code.TWICE, {**entries, 0: [*entries[0][:4], entries[1][4]]}),
        (Code.NOT_AN_INTEGER, {**entries, 0: [0.5] * 5}),
    ]
    for code, tables in wrong:
        with pytest.raises(AtlasError) as refusal:
            check_tables(hybrid, 0, tables, tokens)
        assert refusal.value.code is code, tables
    window = next(group.window for group in hybrid.groups if group.window)
    for recompute in (0, 1, 16):
        kept = check_tables(hybrid, 0, entries, tokens, recompute=recompute)
        for index, group in enumerate(hybrid.groups):
            # What no token sees any more may be anything, so nobody is told what it is.
            first = max(0, tokens - recompute - window + 1) // 16 if group.window else 0
            assert kept[index].tolist() == [-1] * first + entries[index][first:]
    for rank in (-1, hybrid.ranks, None):
        with pytest.raises(AtlasError) as refusal:
            check_tables(hybrid, rank, entries, tokens)  # type: ignore[arg-type]
        assert refusal.value.code is Code.BAD_RANK
    with pytest.raises(AtlasError) as refusal:
        check_tables(hybrid, 0, entries, hybrid.max_len + 1)
    assert refusal.value.code is Code.BAD_TOKENS


def test_tables_that_routes_take_are_good_tables() -> None:
    """Nonsense where nothing of a block moves, one id for a recurrent state: all is well."""
    for name, model in SMALL.items():
        for policy in ("atlas", "vllm"):
            try:
                src, dst = (small_plan(model, policy=policy, tp=tp) for tp in (1, 2))
            except AtlasError:
                continue
            for single in (False, True):
                move = moving(src, dst, (0, 70), single=single)
                for end, tables in ((src, move.source_blocks), (dst, move.destination_blocks)):
                    for rank in range(end.ranks):
                        assert check_tables(end, rank, tables, 70).keys() == tables.keys(), name


# -- plans that do not go together ----------------------------------------------------------------


def plans(*specs: Any, name: str = "m", **more: Any) -> Plan:
    return small_plan(stacked(name, *specs), **more)


UNLIKE: list[tuple[Code, Callable[[], Any]]] = [
    (Code.UNLIKE_MODELS, lambda: route(plans(FULL), small_plan(model_of("m", {"other": FULL})))),
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


def test_unlike_models_are_refused_with_both_names() -> None:
    """Also where they have layers of the same names: most models call them alike."""
    for other in (
        plans(FULL, FULL, name="two"),
        plans(FullAttention(heads=8, head_dim=8), name="two"),
    ):
        with pytest.raises(AtlasError, match="'one' and 'two'"):
            route(plans(FULL, name="one"), other)


def test_no_word_of_the_source_makes_fewer_bytes_enough() -> None:
    """A window edited at the source is refused; a window that it keeps is the layer's own."""
    window = SlidingAttention(heads=4, head_dim=8, window=40)
    honest, everything = (plans(window, FULL, policy=policy) for policy in ("vllm", "uniform"))
    text = honest.to_json().decode()
    assert text.count('"window":40') == 2  # of the group, and of the layer's spec
    with pytest.raises(AtlasError) as refusal:
        Plan.from_json(text.replace('"window":40', '"window":8', 1).encode())
    assert refusal.value.code is Code.BAD_PLAN
    with pytest.raises(AtlasError) as refusal:
        route(Plan.from_json(text.replace('"window":40', '"window":8').encode()), honest)
    assert refusal.value.code is Code.UNLIKE_LAYERS
    state = 2 * 4 * 8 * 2  # bytes of K and V
    full = {index: range(6 * index, 6 * index + 6) for index in range(len(honest.groups))}
    for src, dst, tokens in (
        (honest, honest, 39 + 96),
        (everything, honest, 39 + 96),
        (honest, everything, 39 + 96),
        (everything, everything, 96 + 96),
    ):
        tables = {index: list(full[index]) for index in range(len(dst.groups))}
        needed = route(src, dst).needed_bytes(
            destination_rank=0, destination_blocks=tables, tokens=96
        )
        assert needed == tokens * state


def test_one_model_by_path_and_by_name_is_one_model() -> None:
    one, two = plans(FULL), plans(FULL, name="/models/m", tp=2)
    assert fingerprint(one) == fingerprint(two)
    assert route(one, two).layers == one.layers
    assert check(one, two, tokens=40).ok


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
    (Code.OUT_OF_RANGE, {"source_blocks": [3, 1, BLOCKS]}),
    (Code.OUT_OF_RANGE, {"destination_blocks": [-1, 0]}),
    (Code.TWICE, {"destination_blocks": [5, 5]}),
    (Code.MISSING_BLOCKS, {"source_blocks": [3, 1]}),
    (Code.BAD_TOKENS, {"tokens": (20, 10)}),
    (Code.BAD_TOKENS, {"tokens": SRC.max_len + 1}),
    (Code.NOT_AN_INTEGER, {"tokens": 1.5}),
    (Code.NOT_AN_INTEGER, {"source_blocks": [3.0, 1.0, 2.0]}),
]


@pytest.mark.parametrize("case", PREPARED, ids=named)
def test_select(case: tuple[Code, dict[str, Any]]) -> None:
    code, wrong = case
    prepared = WAY.prepare(source_rank=0, destination_rank=1)
    given = {key: GIVEN[key] for key in ("source_blocks", "destination_blocks", "tokens")}
    prepared.select(**given)
    with pytest.raises(AtlasError) as refusal:
        prepared.select(**{**given, **wrong})
    assert refusal.value.code is code


def test_prepare_wants_ranks_that_feed_each_other() -> None:
    for src, dst, code in (
        (1, 0, Code.NOT_A_SOURCE), (2, 0, Code.BAD_RANK), (0, 4, Code.BAD_RANK),
    ):  # fmt: skip
        with pytest.raises(AtlasError) as refusal:
            WAY.prepare(source_rank=src, destination_rank=dst)
        assert refusal.value.code is code


@pytest.mark.parametrize("wrong", [-1, 1.5, None, "0", True, HUGE], ids=repr)
def test_base_addresses_are_addresses(wrong: Any) -> None:
    (copy,) = WAY.bind(**GIVEN).copies
    for name in ("source_base", "destination_base"):
        with pytest.raises(AtlasError):
            copy.descriptors(**{name: wrong})
    with pytest.raises(AtlasError):
        copy.descriptors(source_base=2**63)
