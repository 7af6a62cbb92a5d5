"""Attention and writing in Triton's interpreter, against float64 and the torch kernels."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvatlas.geometry import Layout
from kvatlas.kernels.triton import schedule, split_of
from kvatlas.kernels.triton.attention import launch
from kvatlas.specs import (
    ATTENTION_CACHES,
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    LatentAttention,
    SinkAttention,
    SlidingAttention,
    SlidingLatentAttention,
)
from kvatlas.specs.scale_location import in_layout
from tests.kernels.triton.cases import (
    ORDERS,
    Pool,
    check_attend,
    check_latent,
    check_selected,
    check_write,
)
from tests.profiles import DEEP

BASE: dict[str, Any] = {"heads": 2, "head_dim": 16, "dtype": "fp32"}
MIXED: dict[str, Any] = {"lengths": [37, 20, 9], "queries": [4, 20, 0]}
"""A sequence that is decoded, one that is prefilled, and one without queries."""
PAIR: dict[str, Any] = {"lengths": [37, 20], "queries": [1, 20]}
SMALL: dict[str, Any] = {"tile": 16, "rows": 16, "per_sm": 1}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "causal": (FullAttention(**BASE), {}),
    "window": (SlidingAttention(**BASE, window=7), {}),
    "chunks": (ChunkedAttention(**BASE, chunk=8), {}),
    "unlike V": (FullAttention(**BASE, v_dim=4), {}),
    "odd heads": (FullAttention(heads=3, head_dim=24, dtype="fp32"), {}),
    "softcap": (FullAttention(**BASE), {"softcap": 2.0}),
    "sinks": (FullAttention(**BASE), {"sink_logits": True}),
    "sinks in a window": (SlidingAttention(**BASE, window=5), {"sink_logits": True}),
    "tokens that stay": (SinkAttention(**BASE, sink_tokens=5, window=6), {}),
    "many tokens that stay": (SinkAttention(**BASE, sink_tokens=21, window=9), {"sinks": True}),
    "cross": (CrossAttention(**BASE, source=64), {"queries": [4, 23, 1]}),
    "starts": (FullAttention(**BASE), {"starts": True}),
    "K transposed": (FullAttention(**BASE, packing="transposed"), {}),
    "K in tiles": (FullAttention(**BASE, packing="tiled_planes"), {}),
}
HALVES: dict[str, Any] = {"heads": 2, "head_dim": 64, "dtype": "fp16"}
ROUNDED_CODES = 5e-5
"""int4's codes go through dots as 1 + code / 16, up to 2, and the 1 is taken off afterwards:
rounding is up to 32 times that of an element of its own, whose error here is at most 5e-7."""
WORDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "halves": (FullAttention(**HALVES), {"sink_logits": True}),
    "halves, softcap": (FullAttention(**HALVES), {"softcap": 2.0}),
    "halves in a window": (SlidingAttention(**HALVES, window=7), {}),
    "halves in chunks": (ChunkedAttention(**HALVES, chunk=8), {}),
    "halves that stay": (SinkAttention(**HALVES, sink_tokens=21, window=9), {}),
    "halves of an encoder": (CrossAttention(**HALVES, source=64), {"queries": [4, 23, 1]}),
    "unlike V": (FullAttention(**HALVES, v_dim=32), {}),
    "fp8": (FullAttention(**HALVES, cache="fp8"), {"softcap": 2.0}),
    "fp8 by row": (FullAttention(**HALVES, cache="fp8_per_token_head"), {"sink_logits": True}),
    "int8": (FullAttention(**HALVES, cache="int8_per_token_head"), {"sink_logits": True}),
    "int8 in a window": (SlidingAttention(**HALVES, window=7, cache="int8_per_token_head"), {}),
    "int8 that stay": (
        SinkAttention(**HALVES, sink_tokens=21, window=9, cache="int8_per_token_head"), {}
    ),
    "int4": (
        FullAttention(**HALVES, cache="int4_per_token_head"),
        {
            "softcap": 2.0, "lengths": [37, 5, 20, 9], "queries": [4, 1, 20, 0], "per_sm": 2,
            "tolerance": ROUNDED_CODES,
        },
    ),
    "int4 in a window": (
        SlidingAttention(**HALVES, window=7, cache="int4_per_token_head"),
        {"tolerance": ROUNDED_CODES, "spread": True},
    ),
    "nvfp4 that stay": (
        SinkAttention(**{**HALVES, "head_dim": 128}, sink_tokens=21, window=9, cache="nvfp4"),
        {"softcap": 2.0, "lengths": [37], "queries": [4]},
    ),
    "levels and a range": (
        SlidingAttention(**{**HALVES, "head_dim": 128}, window=7, cache="turboquant_4bit_nc"),
        {"lengths": [37], "queries": [4], "tolerance": ROUNDED_CODES},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(KINDS))
def test_attention_is_what_float64_says(kind: str) -> None:
    spec, more = KINDS[kind]
    check_attend(spec, "LBHNC", "cpu", **{**MIXED, **SMALL, **more})


TILES = [("LBHNC", 16), ("BLNHC", 32)]


@pytest.mark.parametrize(
    ("kind", "order", "tile"),
    [
        (kind, *tiles)
        for i, kind in enumerate(WORDS)
        for tiles in (TILES if DEEP else TILES[i % 2 :][:1])
    ],
)
def test_words_are_taken_apart(kind: str, order: str, tile: int) -> None:
    """Elements of 16, 8 and 4 bits; tiles of one page and of two."""
    spec, more = WORDS[kind]
    check_attend(spec, order, "cpu", **{**MIXED, **SMALL, **more, "tile": tile})


@pytest.mark.parametrize("cache", ["auto", "int8_per_token_head", "int4_per_token_head"])
def test_words_of_one_long_sequence(cache: str) -> None:
    """Partial sums, whose columns may be turned, put together again; and one query alone."""
    spec = FullAttention(**HALVES, cache=cache)
    lengths, queries = [150, 1, 37, 16], [1, 1, 1, 1]
    tolerance = ROUNDED_CODES if cache.startswith("int4") else 1e-5
    check_attend(
        spec, "LBNHC", "cpu", lengths=lengths, queries=queries, tile=16, rows=16, per_sm=3,
        sinks=True, max_queries=1, tolerance=tolerance,
    )  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_orders_make_no_difference(order: str) -> None:
    check_attend(FullAttention(**BASE), order, "cpu", **PAIR, **SMALL)


@pytest.mark.parametrize("block", [4, 16, 24, 64])
def test_blocks_of_any_size(block: int) -> None:
    spec = SlidingAttention(**BASE, window=30)
    check_attend(spec, "BLNHC", "cpu", **PAIR, **{**SMALL, "tile": 32}, block=block)


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_every_cache_dtype_is_read(cache: str) -> None:
    spec = FullAttention(heads=2, head_dim=32, cache=cache, dtype="fp32")
    check_attend(spec, "LBHNC", "cpu", **PAIR, **SMALL)


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_every_cache_dtype_is_written(cache: str) -> None:
    spec = FullAttention(heads=2, head_dim=32, cache=cache)
    exact = not any(part in cache for part in ("fp8", "nvfp4", "k8"))
    # The interpreter cuts bfloat16 off where a GPU rounds: what int4 rounds on its way are halves.
    dtype = torch.float16 if "int4" in cache else torch.bfloat16
    check_write(spec, "LBHNC", "cpu", exact=exact, dtype=dtype)


def test_unlike_rows_are_turned_by_themselves() -> None:
    spec = FullAttention(heads=2, head_dim=48, v_dim=32, cache="int4_per_token_head")
    check_write(spec, "LBHNC", "cpu", exact=True, dtype=torch.float16)
    check_attend(spec, "LBHNC", "cpu", **PAIR, **SMALL)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_written_in_every_order(order: str) -> None:
    check_write(FullAttention(heads=2, head_dim=24, v_dim=8), order, "cpu", exact=True)


NVFP4 = FullAttention(heads=2, head_dim=128, cache="nvfp4")


@pytest.mark.parametrize("order", ORDERS)
def test_nvfp4_is_written_and_attended_in_every_order(order: str) -> None:
    spec = in_layout(NVFP4, Layout(order))
    check_write(spec, order, "cpu", exact=False)
    check_attend(spec, order, "cpu", lengths=[37], queries=[4], **SMALL)


def test_tiled_and_transposed_keys_are_written() -> None:
    for packing in ("tiled_planes", "transposed"):
        spec = FullAttention(heads=2, head_dim=32, packing=packing)
        check_write(spec, "LBHNC", "cpu", exact=True)


def test_one_long_sequence_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than workers, so that a sequence is put together from several sums.

    Then more rows than programs to put them together.
    """
    spec = FullAttention(**BASE)
    more: dict[str, Any] = {"tile": 16, "rows": 16, "sinks": True}
    monkeypatch.setattr(launch, "MERGED_AT_ONCE", 2048)
    check_attend(spec, "LBNHC", "cpu", lengths=[150], queries=[1], **more, per_sm=3)
    monkeypatch.setattr(launch, "MERGED_AT_ONCE", 15)
    check_attend(
        spec, "LBNHC", "cpu", lengths=[3, 90, 1, 61], queries=[1, 2, 1, 3], **more, per_sm=2,
        max_queries=3,
    )  # fmt: skip


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_absorbed_latents(cache: str) -> None:
    more: dict[str, Any] = {"dtype": torch.float32, "tolerance": 1e-5, "heads": 4, **SMALL}
    spec = LatentAttention(latent=32, rope=16, dtype="fp32", cache=cache)
    check_latent(spec, "LBNHC", "cpu", sink_logits=True, **more)
    spec = SlidingLatentAttention(latent=32, rope=16, dtype="fp32", cache=cache, window=9)
    check_latent(spec, "LBNHC", "cpu", **more)


SPARSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "latents": ({"latent": 32, "dtype": "fp32"}, {"sink_logits": True}),
    "fp8": ({"latent": 32, "cache": "fp8"}, {"starts": True}),
    "records": ({"latent": 128, "cache": "fp8_ds_mla"}, {"starts": True}),
    "records of several scales": ({"latent": 256, "cache": "fp8_ds_mla"}, {"block": 64}),
    "many of them, few workers": (
        {"latent": 128, "cache": "fp8_ds_mla"},
        {"lengths": (300, 1), "queries": (1, 1), "most": 150, "per_sm": 1, "max_queries": 1},
    ),
}


@pytest.mark.parametrize("kind", list(SPARSE))
def test_queries_attend_to_selected_tokens(kind: str) -> None:
    form, more = SPARSE[kind]
    given: dict[str, Any] = {"dtype": torch.float32, "tolerance": 2e-5, "heads": 4, **SMALL}
    check_selected(LatentAttention(rope=16, **form), "LBNHC", "cpu", **{**given, **more})


@pytest.mark.parametrize("order", ORDERS)
def test_selected_records_are_found_in_every_order(order: str) -> None:
    check_selected(
        LatentAttention(latent=128, rope=16, cache="fp8_ds_mla"), order, "cpu", heads=4,
        dtype=torch.float32, tolerance=2e-5, lengths=(37, 5), queries=(2, 1), **SMALL,
    )  # fmt: skip


def test_absorbed_records() -> None:
    """All tokens of records are attended to without indices."""
    check_selected(
        LatentAttention(latent=128, rope=16, cache="fp8_ds_mla"), "BLNHC", "cpu", heads=4,
        dtype=torch.float32, tolerance=2e-5, lengths=(37, 5), queries=(2, 1), most=0, **SMALL,
    )  # fmt: skip


def test_a_schedule_counts_what_there_is() -> None:
    layer = Pool(FullAttention(**BASE), "LBNHC", "cpu").layer
    split = split_of(layer, 4, tile=16, rows=16)
    made = schedule(split, torch.tensor([37, 5, 20, 9]), torch.tensor([4, 1, 20, 0]))
    assert made.ends.tolist() == [[0, 4, 5, 25, 25], [0, 3, 4, 4, 4], [0, 0, 0, 3, 3]]
