"""The plans whose documents are in the corpus: one of every kind of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from kvatlas.models import CacheIdentity, Model
from kvatlas.planning import Plan, plan
from kvatlas.specs import (
    CrossAttention,
    FullAttention,
    LatentAttention,
    Ring,
    SlidingAttention,
    Spec,
    TensorScales,
)
from tests.planning.models import SMALL, model_of
from tests.planning.test_foreign_fields import LAYOUTS, Arena, allocations, described, in_segments


def dense(name: str = "dense", **spec: Any) -> Model:
    layer: dict[str, Spec] = {"attn": FullAttention(heads=4, **({"head_dim": 8} | spec))}
    return model_of(name, layer, layer)


DENSE = dense()
INT8 = dense("int8", cache="int8_per_token_head")
NVFP4 = dense("nvfp4", cache="nvfp4", head_dim=32)
FP8 = dense("fp8", cache="fp8")
CODES = dense("codes", cache="turboquant_4bit_nc", head_dim=16)
RING = model_of(
    "ring", {"attn": FullAttention(heads=2, head_dim=8), "ring": Ring(group=4, rows=8, width=16)}
)
UNLIKE = model_of(
    "unlike stages",
    {"attn": SlidingAttention(heads=2, head_dim=8, window=40)},
    {"attn": FullAttention(heads=2, head_dim=8)},
)
CROSS = model_of(
    "cross",
    {
        "attn": FullAttention(heads=2, head_dim=8),
        "cross": CrossAttention(heads=2, head_dim=8, source=24),
    },
)
SCALED = model_of("scaled latent", {"attn": LatentAttention(latent=512, cache="nvfp4_ds_mla")})
ROWS = model_of("latent rows", {"attn": LatentAttention(latent=128, cache="fp8_ds_mla")})

IDENTITY = CacheIdentity(weights="sha256:5f1a", config="a1b2")


def packed(packing: str) -> Model:
    return dense(packing=packing)


def small(name: str, layers: int) -> Model:
    """The first decoder layers of a small model."""
    model = SMALL[name]
    return msgspec.structs.replace(
        model, layers=tuple(one for one in model.layers if one.index < layers), depth=layers
    )


def made(model: Model, **given: Any) -> Callable[[], Plan]:
    settings: dict[str, Any] = {"memory": "256KiB", "max_len": 64} | given
    return partial(plan, model, **settings)


def engine(name: str) -> Callable[[], Plan]:
    model, make = LAYOUTS[name]
    return lambda: described(model, make(Arena()))


def hnd_in_segments() -> Plan:
    arena = Arena()
    model, make = LAYOUTS["sglang_hnd"]
    tensors = make(arena)
    return in_segments(described(model, tensors), *allocations(arena, tensors))


HYBRID = small("delta hybrid", 4)
MAMBA = small("mamba hybrid", 3)

PLANS: dict[str, Callable[[], Plan]] = {
    "dense-LBNHC": made(DENSE, layout="LBNHC"),
    "dense-LBHNC-tp2": made(DENSE, layout="LBHNC", tp=2),
    "dense-BHLNC-tp4": made(DENSE, layout="BHLNC", tp=4, block_size=32),
    "dense-BNLHC-tp8": made(DENSE, layout="BNLHC", tp=8),
    "dense-BLNHC-pp2": made(DENSE, layout="BLNHC", pp=2, tp=2),
    "dense-planes": made(packed("planes")),
    "dense-tiles": made(packed("tiled_planes")),
    "dense-transposed": made(packed("transposed")),
    "dense-head-groups": made(packed("head_groups"), layout="LBHNC"),
    "int8": made(INT8, layout="LBNHC"),
    "int8-tp2": made(INT8, layout="BHLNC", tp=2, block_size=32),
    "codes": made(CODES),
    "nvfp4": made(NVFP4, layout="LBHNC"),
    "nvfp4-tp2": made(NVFP4, layout="BLNHC", tp=2),
    "fp8": made(FP8),
    "sliding": made(small("sliding", 4), tp=2),
    "hybrid": made(HYBRID, memory="1MiB"),
    "hybrid-vllm-tp2": made(HYBRID, memory="2MiB", policy="vllm", tp=2, max_len=512),
    "cut-hybrid-tp2": made(SMALL["cut hybrid"], memory="1MiB", tp=2),
    "mamba": made(MAMBA, memory="1MiB"),
    "mamba-apart-tp4": made(MAMBA, memory="1MiB", tp=4, states="apart"),
    "latent": made(SMALL["latent"]),
    "latent-dcp2": made(SMALL["latent"], tp=2, dcp=2),
    "latent-rows": made(ROWS),
    "latent-scales": made(SCALED),
    "sparse": made(small("sparse", 1), memory="1MiB"),
    "compressed": made(small("compressed", 2), memory="32MiB", max_len=512),
    "ring": made(RING),
    "cross": made(CROSS),
    **{name.replace("_", "-"): engine(name) for name in LAYOUTS},
    "sglang-hnd-segments": hnd_in_segments,
    "stages": made(UNLIKE, pp=2),
    "one-stage": made(UNLIKE, layout="LBNHC"),
}

SCALES = {
    "fp8": {"layers.0.attn": TensorScales(0.5, 0.25), "layers.1.attn": TensorScales(2.0, 0.1875)}
}
