"""Models, topologies and requests to move between them, drawn by hypothesis.

A model is drawn twice over: once for what it caches, and for each side how that side packs
it, plans it and numbers its blocks. What no policy can plan is given up with `assume`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from hypothesis import assume
from hypothesis import strategies as st

from kvatlas import AtlasError
from kvatlas.models import Layer, Model
from kvatlas.planning import Plan
from kvatlas.specs import (
    ATTENTION_CACHES,
    ChunkedAttention,
    CompressorState,
    CrossAttention,
    FullAttention,
    GatedDeltaNet,
    Indexer,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Ring,
    Rwkv7,
    ShortConv,
    SinkAttention,
    SlidingAttention,
    SlidingLatentAttention,
    Spec,
)
from kvatlas.specs.attention import Attention
from tests.routing.cases import moving, small_plan
from tests.routing.oracle import Move

TPS = (1, 2, 3, 4, 6, 8)
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
PLAIN = ("bf16", "fp16", "fp32")

Caches = dict[str, Spec]


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


# -- what a layer caches ------------------------------------------------------------------------


@st.composite
def attention(draw: st.DrawFn, kind: type[Spec]) -> Caches:
    cache = draw(st.sampled_from(ATTENTION_CACHES) | st.just("auto"))
    # Codes fill whole bytes, and the scales behind them start where their dtype may.
    whole = cache in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
    common: dict[str, Any] = {
        "heads": draw(one_of(2, 4, 6, 8, 3, 1)),
        "head_dim": draw(one_of(2, 4, 8, 16) if whole else one_of(16, 32)),
        "dtype": draw(st.sampled_from(PLAIN)),
        "cache": cache,
    }
    if cache in ("auto", "fp8") and draw(one_of(False, False, False, True)):
        common["v_dim"] = common["head_dim"] * 2
    more: dict[type[Spec], dict[str, Any]] = {
        SlidingAttention: {"window": draw(st.integers(1, 60))},
        ChunkedAttention: {"chunk": draw(one_of(8, 16, 20, 64))},
        SinkAttention: {"sink_tokens": 4, "window": draw(one_of(None, 16))},
        CrossAttention: {"source": 37},
    }
    return {"attn": kind(**common, **more.get(kind, {}))}


@st.composite
def latent(draw: st.DrawFn, kind: type[Spec]) -> Caches:
    """One layer's caches: a latent, perhaps with an indexer, a window or a compressor."""
    cache, version = draw(
        one_of(
            ("auto", "v3"), ("fp8", "v3"), ("fp8_ds_mla", "v3"), ("nvfp4_ds_mla", "v3"),
            ("fp8_ds_mla", "v4"), ("fp8_ds_mla", "v4.1"), ("nvfp4_ds_mla", "v4.1"),
        )
    )  # fmt: skip
    size = {"latent": draw(one_of(16, 24)), "rope": draw(one_of(4, 8))}
    if cache.endswith("_ds_mla"):
        size = {"latent": {"v3": 128, "v4": 64, "v4.1": 48}[version], "rope": 16}
    more: dict[str, Any] = {"cache": cache, "version": version, **size}
    found: Caches = {}
    if kind is SlidingLatentAttention:
        found["swa"] = SlidingLatentAttention(window=draw(st.integers(1, 70)), **more)
        if draw(st.booleans()):
            return found
    compressed = kind is CompressorState or (kind is Indexer and draw(st.booleans()))
    compress = draw(one_of(4, 2, 16)) if compressed else 1
    found["attn"] = LatentAttention(compress=compress, **more)
    if kind in (Indexer, CompressorState):
        index = draw(one_of("fp8", "mxfp4"))
        found["indexer"] = Indexer(head_dim=32, cache=index, compress=compress)
    if kind is CompressorState:
        window = draw(one_of(3, 8, 12))
        found["compressor"] = CompressorState(width=draw(one_of(4, 6)), window=window)
    return found


@st.composite
def ring(draw: st.DrawFn) -> Caches:
    """One layer's caches: attention, an indexer that compresses groups, and the open group."""
    group = draw(one_of(4, 2, 8))
    size: dict[str, Any] = {"group": group, "rows": group, "width": draw(one_of(4, 6))}
    size |= {"dtype": draw(st.sampled_from(PLAIN)), "parts": draw(one_of(1, 2))}
    keys = Indexer(head_dim=32, cache=draw(one_of("bf16", "fp8", "e4m3")), compress=group)
    attends = FullAttention(heads=draw(one_of(1, 2, 4)), head_dim=draw(one_of(4, 8)))
    if draw(one_of(False, False, True)):  # as in Step5: as many rows as fit in a page of attention
        return {
            "attn": attends,
            "indexer": msgspec.structs.replace(keys, cache="e4m3"),
            "ring": Ring(fills_page=True, **size | {"parts": 1}),
        }
    return {
        "ring": Ring(positions=draw(one_of(0, 0, 3)), **size),
        "indexer": keys,
        "attn": draw(one_of(attends, LatentAttention(latent=16, rope=draw(one_of(0, 4))))),
    }


@st.composite
def recurrent(draw: st.DrawFn, kind: type[Spec]) -> Caches:
    conv: dict[str, Any] = {
        "kernel": draw(one_of(4, 2)),
        "conv_dtype": draw(st.sampled_from(PLAIN)),
        "speculative": draw(one_of(0, 0, 1)),
    }
    ssm: dict[str, Any] = {"ssm_dtype": draw(one_of("bf16", "fp32"))}
    heads, dim = draw(one_of(4, 8, 6, 12)), draw(one_of(4, 2, 8))
    groups = draw(one_of(1, 2, heads))
    sizes: dict[type[Spec], dict[str, Any]] = {
        Mamba1: {"inner": heads * 4, "state_size": dim, **conv, **ssm},
        Mamba2: {
            "heads": heads, "head_dim": dim, "groups": groups, "state_size": 3, **conv, **ssm
        },
        GatedDeltaNet: {
            "key_heads": heads, "value_heads": heads * 2, "key_dim": dim, "value_dim": 3,
            **conv, **ssm,
        },
        KimiDelta: {"heads": heads, "head_dim": dim, **conv, **ssm},
        LightningAttention: {"heads": heads, "head_dim": dim, **ssm},
        ShortConv: {"width": heads * 2, **conv},
        Rwkv7: {"heads": heads, "head_dim": dim, "hidden": heads * dim, **ssm},
    }  # fmt: skip
    return {"mixer": kind(**sizes[kind])}


ATTENTION: tuple[type[Spec], ...] = (
    FullAttention, SlidingAttention, ChunkedAttention, SinkAttention, CrossAttention,
)  # fmt: skip
LATENT: tuple[type[Spec], ...] = (
    LatentAttention, SlidingLatentAttention, Indexer, CompressorState, Ring,
)  # fmt: skip
RECURRENT: tuple[type[Spec], ...] = (
    Mamba1, Mamba2, GatedDeltaNet, KimiDelta, LightningAttention, ShortConv, Rwkv7,
)  # fmt: skip
KINDS = (*ATTENTION, *LATENT, *RECURRENT)

thin = st.builds(FullAttention, heads=one_of(1, 2), head_dim=one_of(2, 4))
"""Attention whose small blocks hold no whole state, so that plans cut states by heads."""


def caches_of(kind: type[Spec]) -> st.SearchStrategy[Caches]:
    if kind in RECURRENT:
        return recurrent(kind)
    if kind is Ring:
        return ring()
    return latent(kind) if kind in LATENT else attention(kind)


@st.composite
def models(draw: st.DrawFn, kind: type[Spec], *, shared: bool = False) -> Model:
    """A few layers of a kind, alone or beside others, and perhaps with recurrent ones.

    With `shared`, recurrent layers beside thin attention.
    """
    layers = [draw(caches_of(kind))]
    hybrid = (
        shared or draw(st.booleans()) if kind not in LATENT else draw(one_of(False, False, True))
    )
    if hybrid and kind in RECURRENT:
        if shared or draw(st.booleans()):
            layers.append({"attn": draw(thin)})
        else:
            layers.append(draw(caches_of(draw(one_of(*ATTENTION, LatentAttention)))))
    elif hybrid:
        layers.append(draw(caches_of(draw(st.sampled_from(RECURRENT)))))
    elif kind in ATTENTION and draw(st.booleans()):
        layers.append(draw(caches_of(draw(st.sampled_from(ATTENTION)))))
    if hybrid and draw(one_of(False, False, True)):
        layers = [{**layers[0], **layers[1]}]  # both in one decoder layer
    pattern = layers * draw(st.integers(1, 4 // len(layers)))
    found = [
        Layer(name=f"layers.{index}.{part}", index=index, spec=spec)  # type: ignore[arg-type]
        for index, caches in enumerate(pattern)
        for part, spec in caches.items()
    ]
    return Model(
        name="hybrid" if hybrid else "plain",
        architecture="Drawn",
        layers=tuple(found),
        depth=len(pattern),
        attention_heads=24,
        max_len=512,
    )


# -- what each side does with it ------------------------------------------------------------------


@st.composite
def packed(draw: st.DrawFn, model: Model) -> Model:
    """The same model as one side packs it: nothing that changes a value."""
    conv = draw(one_of("TR", "RT"))
    align = draw(one_of(None, None, 1, 48))
    packing = draw(
        one_of(None, None, "cells", "head_groups", "planes", "tiled_planes", "transposed")
    )
    scales = draw(one_of(None, None, "inline", "planes", "state_planes", "head_planes"))
    more = draw(one_of(0, 0, 1, 4, 5, 13))

    @cache
    def pack(spec: Spec) -> Spec:
        tries: list[dict[str, Any]] = []
        if isinstance(spec, Attention):
            tries = [{"packing": packing, "scales": scales}, {"packing": packing}]
        elif (
            isinstance(spec, Ring) and not spec.fills_page
        ):  # an engine that decodes several tokens at once
            tries = [{"rows": spec.group + more}]
        elif hasattr(spec, "align"):
            tries = [{"align": align or (None if isinstance(spec, LatentAttention) else 1)}]
        elif hasattr(spec, "conv_order"):
            tries = [{"conv_order": conv}]
        for changes in tries:
            try:
                changed = msgspec.structs.replace(spec, **changes)
                changed.page(16)
                return changed
            except AtlasError:
                continue
        return spec

    layers = tuple(msgspec.structs.replace(layer, spec=pack(layer.spec)) for layer in model.layers)
    return msgspec.structs.replace(model, layers=layers)


@cache
def allowed(spec: Spec) -> frozenset[int]:
    """Tensor-parallel sizes that a layer's heads and groups allow."""
    found = []
    for tp in TPS:
        try:
            spec.shard(tp, 0)
        except AtlasError:
            continue
        found.append(tp)
    return frozenset(found)


@st.composite
def planned(draw: st.DrawFn, model: Model, max_len: int, *, shared: bool = False) -> Plan:
    """One side's plan of a model; with `shared`, one whose states may be cut by heads."""
    mine = draw(packed(model))
    tps = frozenset.intersection(*(allowed(layer.spec) for layer in model.layers))
    tp = draw(st.sampled_from(sorted(tps, key=lambda tp: (tp == 1, tp))))
    ask: dict[str, Any] = {
        "tp": tp,
        "pp": draw(st.integers(1, min(3, model.depth)) | st.just(1)),
        "layout": draw(one_of(*ORDERS, None)),
        "block_size": draw(one_of(None, None, 16, 32, 48, 64, 128)),
        "policy": draw(one_of("atlas", "atlas", "vllm", "uniform")),
        "prefix_caching": draw(one_of(True, True, False)),
        "max_len": max_len,
    }
    if shared:
        ask |= {"policy": "atlas", "block_size": None, "states": "shared"}
        ask["layout"] = draw(one_of("BLHNC", "BLNHC", "BHLNC"))
    kinds = {type(layer.spec) for layer in model.layers}
    if kinds <= {
        *RECURRENT,
        FullAttention,
        SinkAttention,
        LatentAttention,
        Indexer,
        CrossAttention,
        Ring,
    }:
        ask["dcp"] = draw(st.sampled_from([d for d in (2, 4, 3, 1) if tp % d == 0]))
    caches = {getattr(layer.spec, "cache", None) for layer in model.layers}
    if any(isinstance(layer.spec, Attention) for layer in model.layers):
        plain = caches <= {"auto", "fp8", None}
        ask["backend"] = draw(one_of(None, None, "FLASHINFER")) if plain else None
    if model.name == "hybrid" and ask["policy"] == "atlas" and not shared:
        ask["pack"] = draw(one_of("auto", "auto", 1, 2))
        ask["states"] = draw(one_of("auto", "shared", "apart"))
    try:
        return seen(small_plan(mine, **ask))
    except AtlasError:
        # A side that cannot be had as drawn is often to be had without its wishes.
        ask = {**ask, "policy": "atlas", "block_size": None}
    for wish in ("backend", "dcp", "pack", "states", "layout"):
        ask.pop(wish, None)
        try:
            return seen(small_plan(mine, **ask))
        except AtlasError:
            continue
    assume(False)
    raise AssertionError


def seen(made: Plan) -> Plan:
    """A plan whose fields can all be viewed: flat packings need orders that keep them whole."""
    for region in made.regions:
        for layer in {layer.spec: layer for layer in region.layers}.values():
            for field in made.page(layer.name).fields:
                made.view(layer.name, field.name)
    return made


@st.composite
def requests(draw: st.DrawFn, kind: type[Spec] | None = None, *, from_start: bool = False) -> Move:
    """A model with a kind of layer, its plans on both sides, and what moves in which blocks."""
    kind = kind or draw(st.sampled_from(KINDS))
    # Recurrent layers beside thin attention, in blocks that both share.
    shared = kind in RECURRENT and draw(st.booleans())
    model = draw(models(kind, shared=shared))
    # Several blocks of every group: DeepSeek-V4's kernels read 256 tokens at once.
    most = {CompressorState: 600, Indexer: 600}.get(kind, 200)
    max_len = draw(one_of(96, most)) if kind not in ATTENTION else 96
    src = draw(planned(model, max_len, shared=shared))
    dst = draw(planned(model, max_len, shared=shared and draw(st.booleans())))
    stop = draw(st.integers(0, max_len) | one_of(16, 32, 64, max_len))
    start = 0 if from_start else draw(st.integers(0, stop) | st.just(0))
    names = draw(st.none() | st.sets(st.sampled_from(src.layers)))
    return moving(
        src,
        dst,
        (start, stop),
        layers=None if names is None else tuple(sorted(names)),
        seed=draw(st.integers(0, 99)),
        style=draw(one_of("shuffled", "neighbours", "reversed", "gaps")),
        complete=draw(st.booleans()),
        single=draw(st.booleans()),
    )
