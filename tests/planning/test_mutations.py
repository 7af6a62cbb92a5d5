"""Plans with one thing changed: refused with a code, or still right by an independent walk.

Plans of every family go to JSON, and every value of it is changed in several plausible
ways, one at a time. What `Plan.from_json` accepts must be a plan in which every element of
every layer is somewhere, nothing shares a byte that may not, and a request arrives whole.
`make test` tries a sample, the deep profile all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest

from kvatlas import AtlasError, Code
from kvatlas.geometry import Field
from kvatlas.planning import Plan, plan
from kvatlas.planning.sized_layers import FULL_KINDS
from kvatlas.routing import fingerprint
from tests.planning import test_soundness
from tests.planning.test_orders import FAMILIES
from tests.profiles import DEEP
from tests.routing.arrives import assert_arrives
from tests.routing.cases import tables
from tests.routing.fields_apart import apart
from tests.routing.oracle import Move

SAMPLE = 80
ASKED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FAMILIES),
    *((name, {"policy": "vllm"}) for name in ("sliding", "mamba hybrid", "compressed")),
    *((name, {"tp": 2}) for name in ("dense", "delta hybrid", "parallel", "sliding of 32")),
    *((name, {"pp": 2}) for name in ("sliding", "mamba hybrid", "latent")),
    ("dense", {"tp": 8, "dcp": 2}),
    ("latent", {"tp": 2, "dcp": 2}),
    ("sparse", {"tp": 4, "dcp": 4, "pp": 3}),
    ("dense of 32", {"kv_dtype": "nvfp4"}),
    ("dense of 32", {"kv_dtype": "int8_per_token_head", "layout": "BHLNC"}),
    ("sliding of 32", {"kv_dtype": "fp8", "layout": "BLHNC"}),
    ("dense of 32", {"block_size": 128, "backend": "FLASHINFER"}),
    ("delta hybrid", {"pack": 2, "layout": "LBNHC"}),
    ("mamba hybrid", {"prefix_caching": False, "states": "apart"}),
    *((name, {"apart": 3}) for name in ("dense", "mamba hybrid", "latent", "sliding")),
    ("compressed", {"apart": 4, "tp": 2}),
]
WHO_KEEPS_WHAT = ("tp", "dcp", "splits", "parts", "window", "source", "held")
"""Where most lies were: drawn twice."""
TOKENS = 45
LARGEST = 1 << 26

Where = tuple[str | int, ...]


@lru_cache
def original(number: int) -> Plan:
    name, ask = ASKED[number]
    if "apart" in ask:
        whole = {key: value for key, value in ask.items() if key != "apart"}
        return apart(_planned(name, whole), ask["apart"])
    return _planned(name, ask)


def _planned(name: str, ask: dict[str, Any]) -> Plan:
    for memory in (1 << n for n in range(17, 26)):
        try:
            return plan(FAMILIES[name], memory=memory, max_len=64, in_flight=0, **ask)
        except AtlasError as refusal:
            if refusal.code is not Code.NOT_ENOUGH_MEMORY:
                raise
    raise AssertionError(name)


WORDS: dict[str, list[str]] = {
    "layout": ["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC", "BNLHC", "NHD", "CNHBL"],
    "kind": [
        "full_attention", "sliding_window", "chunked_local_attention", "sink_full_attention",
        "cross_attention", "mla_attention", "sliding_window_mla", "recurrent", "mamba2",
    ],
    "cache": ["auto", "fp8", "nvfp4", "int8_per_token_head", "fp8_ds_mla"],
    "dtype": ["bf16", "fp32", "e4m3"],
    "ssm_dtype": ["bf16", "fp32"],
    "packing": ["cells", "head_groups", "planes", "tiled_planes", "transposed"],
    "conv_order": ["TR", "RT"],
    "policy": ["atlas", "vllm", "foreign"],
    "axes": ["B", "L", "H", "N", "k", "C", "c", "T", "R"],
}  # fmt: skip


def changes(key: str | int, value: Any) -> Iterator[Any]:
    """Other values that somebody might write there."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, value - 1, 2 * value, value // 2, 0, 1, -value)
            yield from (value + 16, 3 * value, 2**31, 2**62, 2**63, 1.5, None)
        case str():
            yield from ("", "x", value + "x", None, *WORDS.get(str(key), []))
        case None:
            yield from (1, 8, 40, 4096, "cells", "planes")
        case list():
            yield from ([], value[1:], value[:-1], [*value, *value[:1]], value[::-1])
            if len(value) > 2:
                yield [value[1], value[0], *value[2:]]
            if key == "parts":
                yield from ([0] * len(value), [1] * len(value), list(range(len(value))))
        case dict():
            yield from ({}, None)


def mutations(text: dict[str, Any]) -> Iterator[tuple[Where, Any]]:
    """Every (place, other value) of a plan."""
    names = [layer["name"] for region in text["regions"] for layer in region["layers"]]

    def walk(value: Any, at: Where) -> Iterator[tuple[Where, Any]]:
        if at:
            yield from ((at, other) for other in changes(at[-1], value) if other != value)
        if at and at[-1] == "name":
            yield from ((at, other) for other in dict.fromkeys(names[:1] + names[-1:]))
        if isinstance(value, dict):
            for key in value:
                yield (*at, key), _DROPPED
                yield from walk(value[key], (*at, key))
        # Alike layers behind the second tell nothing new.
        if isinstance(value, list):
            last = {len(value) - 1}
            for index in sorted(
                {*range(min(len(value), 2 if "layers" in at else 6)), *last} - {-1}
            ):
                yield from walk(value[index], (*at, index))

    yield from walk(text, ())


_DROPPED = object()


def changed(text: dict[str, Any], at: Where, value: Any) -> bytes:
    other = json.loads(json.dumps(text))
    place: Any = other
    for step in at[:-1]:
        place = place[step]
    if value is _DROPPED:
        del place[at[-1]]
    else:
        place[at[-1]] = value
    return json.dumps(other).encode()


# -- what is right ----------------------------------------------------------------------------


def assert_sound(made: Plan) -> None:
    """Every element of every layer is kept, where no other is, for every token that is seen."""
    assert sum(pool.nbytes for pool in made.pools) < LARGEST
    test_soundness.check(made)
    for layer in made.layers:
        assert_covered(made, layer)
        group = made.groups[made.region_of(layer)[0].group]
        for position in (0, 7, 39, 40, 41, 63, 500):
            seen = made.spec(layer).visibility
            assert group.visibility.first(position) <= seen.first(position), layer
        if group.kind in FULL_KINDS:
            assert group.blocks(63, dcp=made.dcp) * group.block * made.dcp >= 63
        assert group.blocks(63, dcp=made.dcp) >= 1


def assert_covered(made: Plan, layer: str) -> None:
    """All rows of every field, for every share of the tokens, are on some rank."""
    state = made.groups[made.region_of(layer)[0].group].kind == "recurrent"
    kept: dict[tuple[str, int], set[int]] = {}
    rows: dict[str, int] = {}
    for rank in range(made.tp):
        for part in range(made.parts(layer)):
            for field in made.page(layer, rank, part).fields:
                if not field.padding:
                    rows[field.name] = max(field.sharding.rows, 1)
                    for share in range(made.dcp) if state else [rank % made.dcp]:
                        kept.setdefault((field.name, share), set()).update(rows_of(field))
    for name, size in rows.items():
        for share in range(made.dcp):
            assert kept.get((name, share)) == set(range(size)), f"{name} of {layer} is not whole"


def rows_of(field: Field) -> Iterator[int]:
    if not field.sharding.sections:
        yield 0
    for held in field.ranges:
        yield from range(held.start, held.start + held.length)


def assert_moves(made: Plan, other: Plan) -> None:
    """A request arrives whole; both ways in the deep profile."""
    if len({(pool.index, pool.blocks) for pool in made.pools}) > len(made.rank_pools(0)):
        return  # stages of unlike sizes, as foreign memory may have them: small, and no lie
    for src, dst in ((other, made), (made, other))[: 1 + DEEP]:
        move = Move(src, dst, {}, {}, (0, min(TOKENS, src.max_len, dst.max_len)))
        try:
            blocks = tables(move, "source"), tables(move, "destination")
        except StopIteration:
            continue  # a pool of fewer blocks than a request needs is small, and no lie
        assert_arrives(Move(src, dst, *blocks, move.tokens), spell_out=DEEP)


def meaning(made: Plan) -> tuple[Any, ...]:
    """What of a plan says where bytes lie."""
    return (made.groups, made.pools, made.regions, made.tp, made.pp, made.dcp, made.max_len)


def assert_held(number: int, at: Where, value: Any, known: set[Any]) -> bool:
    """Whether a changed plan is accepted; then it must be right."""
    before = original(number)
    text = changed(json.loads(before.to_json()), at, value)
    try:
        made = Plan.from_json(text)
    except AtlasError as refusal:
        newer = at == ("version",) and refusal.code is Code.UNLIKE_VERSIONS
        assert newer or refusal.code is Code.BAD_PLAN
        return False
    if meaning(made) not in known:
        assert_sound(made)
        if fingerprint(made) == fingerprint(before) and made.max_len >= 16:
            assert_moves(made, before)
        known.add(meaning(made))
    return True


@pytest.mark.slow
def test_changed_plans_are_refused_or_right() -> None:
    cases = [
        (number, at, value)
        for number in range(len(ASKED))
        for at, value in mutations(json.loads(original(number).to_json()))
    ]
    if not DEEP:
        dice = random.Random(7)  # noqa: S311
        who = [case for case in cases if case[1][-1] in WHO_KEEPS_WHAT]
        cases = [*dice.sample(cases, SAMPLE), *dice.sample(who, SAMPLE)]
    known = {meaning(original(number)) for number in range(len(ASKED))}
    accepted = 0
    for number, at, value in cases:
        try:
            accepted += assert_held(number, at, value, known)
        except Exception as problem:
            what = "dropped" if value is _DROPPED else value
            pytest.fail(f"{ASKED[number]} with {at} {what}: {type(problem).__name__}: {problem}")
    assert 0.02 < accepted / len(cases) < 0.5


def test_the_walk_finds_what_is_missing() -> None:
    """The oracle is none if it never says no."""
    text = json.loads(original(0).to_json())
    with patch("kvatlas.planning.plans.check_plan"):
        lacking = Plan.from_json(json.dumps({**text, "tp": 2, "dcp": 2}))
    with pytest.raises(AssertionError, match="not whole"):
        assert_covered(lacking, lacking.layers[0])
