"""Every plan that is handed out can be allocated, viewed and moved, whatever was asked for.

All orders with C innermost, policies, packings and cache dtypes over small models of every
family: a plan either is refused with a code, the refusal naming orders that do work, or its
memory can be bound, each field seen, and a request moved to a plan in another order.
`make test` tries a sample of them, the deep profile all.
"""

from __future__ import annotations

import random
from itertools import permutations, product
from typing import Any

import pytest
from msgspec.structs import replace

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.routing import check
from kvatlas.specs import (
    Attention,
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    LatentAttention,
    SinkAttention,
    SlidingAttention,
    Spec,
)
from tests.planning.models import SMALL, model_of

pytest.importorskip("torch")

from kvatlas.cache import allocate
from tests.profiles import DEEP

ORDERS = ["".join(axes) + "C" for axes in permutations("LBHN")]
POLICIES: tuple[Any, ...] = ("atlas", "vllm", "uniform")
REFUSED = {
    Code.LAYOUT_REFUSED,
    Code.BACKEND_REFUSES,
    Code.PAGES_NOT_UNIFIED,
    Code.BAD_SPEC,
    Code.BAD_TOPOLOGY,
}
CACHES = (
    "auto", "fp8", "int8_per_token_head", "int4_per_token_head", "nvfp4", "turboquant_3bit_nc",
)  # fmt: skip
PACKINGS = ("cells", "head_groups", "planes", "tiled_planes", "transposed")

ROW: Any = {"heads": 4, "head_dim": 32}
FULL: dict[str, Spec] = {"attn": FullAttention(**ROW)}
WINDOW: dict[str, Spec] = {"attn": SlidingAttention(**ROW, window=40)}
CHUNK: dict[str, Spec] = {"attn": ChunkedAttention(**ROW, chunk=40)}
SINKS: dict[str, Spec] = {"attn": SinkAttention(**ROW, sink_tokens=4)}
CROSS: dict[str, Spec] = {"cross": CrossAttention(**ROW, source=24)}
RECORDS: dict[str, Spec] = {"attn": LatentAttention(latent=128, rope=64, cache="fp8_ds_mla")}
MORE = {
    "dense of 32": model_of("dense of 32", FULL, FULL),
    "sliding of 32": model_of("sliding of 32", *[WINDOW, FULL] * 2),
    "chunked": model_of("chunked", CHUNK, FULL),
    "sinks and windows": model_of("sinks and windows", SINKS, WINDOW),
    "encoder": model_of("encoder", *[{**FULL, **CROSS}] * 2),
    "sparse records": model_of("sparse records", RECORDS, RECORDS),
}
FAMILIES = {**SMALL, **MORE}


def some_orders(seed: Any, least: int = 2) -> list[str]:
    """All orders in the deep profile, otherwise a few that differ from case to case."""
    return ORDERS if DEEP else random.Random(str(seed)).sample(ORDERS, least)  # noqa: S311


def small(model: Model, **asked: Any) -> Plan:
    return plan(model, memory="20MiB", max_len=64, in_flight=16, **asked)


def use(made: Plan, other: Plan) -> None:
    """Bind its memory, see every field on every rank, and move a request to the other plan."""
    for rank in range(made.ranks):
        cache = allocate(made, rank=rank)
        for layer in cache:
            for part in cache.parts(layer):
                assert part.fields
                assert part.tensor.ndim == 4
    answer = check(made, other, tokens=40)
    assert answer.ok, answer.reasons
    assert answer.nbytes


def asked(model: Model, **ask: Any) -> Plan | None:
    """The plan, or None where it is refused as it should be."""
    try:
        return small(model, **ask)
    except AtlasError as refusal:
        assert refusal.code in REFUSED, (model.name, ask, refusal)
        named = [word for word in refusal.hint.replace(",", "").split() if word in ORDERS]
        if refusal.code is Code.LAYOUT_REFUSED:
            assert named or ask["policy"] != "atlas", refusal
            for order in named[:2]:
                small(model, **{**ask, "layout": order})
        return None


def test_every_order_of_every_family() -> None:
    planned = 0
    for name, policy in product(FAMILIES, POLICIES):
        first = asked(FAMILIES[name], policy=policy)
        for order in some_orders((name, policy), 3 if policy == "atlas" else 1):
            made = asked(FAMILIES[name], policy=policy, layout=order)
            if made is not None and first is not None:
                use(made, first)
                planned += 1
            elif policy == "atlas":
                assert first is not None
    assert planned > (500 if DEEP else 40)


def test_every_packing_and_cache_dtype_in_every_order() -> None:
    for packing, cache in product(PACKINGS, CACHES):
        model = FAMILIES["sliding of 32"]
        try:
            layers = tuple(
                replace(layer, spec=replace(layer.spec, packing=packing, cache=cache))
                for layer in model.layers
                if isinstance(layer.spec, Attention)
            )
        except AtlasError:
            continue  # no such page
        model = replace(model, layers=layers)
        first = asked(model, policy="atlas")
        assert first is not None, (packing, cache)
        once_refused = {"BHLNC", "LHBNC"} if cache == "nvfp4" else set()
        for order in sorted(once_refused.union(some_orders((packing, cache)))):
            made = asked(model, policy="atlas", layout=order)
            if made is not None:
                use(made, first)


def test_topologies_and_blocks_in_every_order() -> None:
    topologies: tuple[dict[str, Any], ...] = ({"tp": 2}, {"pp": 2}, {"block_size": 192})
    for name, more in product(("sliding", "mamba hybrid", "cut hybrid", "sparse"), topologies):
        first = asked(FAMILIES[name], policy="atlas")
        assert first is not None
        for order in some_orders((name, more)):
            made = asked(FAMILIES[name], policy="atlas", layout=order, **more)
            if made is not None:
                use(made, first)
