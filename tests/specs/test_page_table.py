"""The bytes of every kind of page: H, N, C and what lies where in a cell."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest

from kvatlas import AtlasError, Code, Layout
from kvatlas.specs import (
    ATTENTION_CACHES,
    AnySpec,
    ChunkedAttention,
    CompressorState,
    CrossAttention,
    EncoderOnlyAttention,
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
    compressed_latent,
    sparse_latent,
)
from tests.cases import each

GQA: dict[str, Any] = {"heads": 8, "head_dim": 128}

# kind, spec, tokens in a block, expected (H, N, C)
TABLE: list[tuple[str, Spec, int, tuple[int, int, int]]] = [
    ("dense bf16", FullAttention(**GQA), 16, (8, 16, 512)),
    ("dense fp32", FullAttention(**GQA, dtype="fp32"), 16, (8, 16, 1024)),
    ("unlike V", FullAttention(heads=4, head_dim=192, v_dim=128), 16, (4, 16, 640)),
    ("MLA", LatentAttention(), 64, (1, 64, 1152)),
    ("fp8 per tensor", FullAttention(**GQA, cache="fp8"), 16, (8, 16, 256)),
    (
        "int8 per token and head",
        FullAttention(**GQA, cache="int8_per_token_head"),
        16,
        (8, 16, 264),
    ),
    ("fp8 per token and head", FullAttention(**GQA, cache="fp8_per_token_head"), 16, (8, 16, 264)),
    (
        "int4 per token and head",
        FullAttention(**GQA, cache="int4_per_token_head"),
        16,
        (8, 16, 136),
    ),
    ("nvfp4", FullAttention(**GQA, cache="nvfp4"), 16, (16, 16, 72)),
    ("two planes", FullAttention(**GQA, packing="planes"), 16, (2, 16, 2048)),
    ("two tiled planes", FullAttention(**GQA, packing="tiled_planes"), 16, (2, 16, 2048)),
    (
        "fp8 head groups",
        FullAttention(**GQA, cache="fp8", packing="head_groups"),
        16,
        (16, 16, 128),
    ),
    ("K transposed", FullAttention(**GQA, dtype="fp16", packing="transposed"), 128, (8, 128, 512)),
    ("turboquant k8v4", FullAttention(**GQA, cache="turboquant_k8v4"), 16, (8, 16, 196)),
    ("turboquant 4bit", FullAttention(**GQA, cache="turboquant_4bit_nc"), 16, (8, 16, 134)),
    ("turboquant k3v4", FullAttention(**GQA, cache="turboquant_k3v4_nc"), 16, (8, 16, 118)),
    ("turboquant 3bit", FullAttention(**GQA, cache="turboquant_3bit_nc"), 16, (8, 16, 102)),
    ("fp8_ds_mla V3.2", LatentAttention(cache="fp8_ds_mla"), 64, (1, 64, 656)),
    (
        "fp8_ds_mla V4",
        LatentAttention(latent=448, cache="fp8_ds_mla", version="v4", compress=4),
        256,
        (1, 64, 584),
    ),
    (
        "fp8_ds_mla V4.1",
        LatentAttention(latent=448, cache="fp8_ds_mla", version="v4.1"),
        64,
        (1, 64, 528),
    ),
    ("nvfp4_ds_mla", LatentAttention(cache="nvfp4_ds_mla"), 64, (1, 64, 352)),
    (
        "nvfp4_ds_mla V4.1",
        LatentAttention(latent=448, cache="nvfp4_ds_mla", version="v4.1"),
        64,
        (1, 64, 288),
    ),
    ("indexer fp8", Indexer(), 64, (1, 64, 132)),
    ("indexer MXFP4", Indexer(cache="mxfp4", compress=4), 256, (1, 64, 68)),
    ("ring", Ring(group=4, rows=8, width=128), 256, (1, 8, 256)),
    ("ring of keys and scores", Ring(group=16, rows=16, width=128, parts=2), 16, (2, 16, 256)),
    ("ring with positions", Ring(group=4, rows=4, width=126, positions=3), 4, (1, 4, 280)),
    ("MLA without rotary elements", LatentAttention(rope=0), 64, (1, 64, 1024)),
    ("indexer e4m3", Indexer(head_dim=256, cache="e4m3", compress=8), 16, (1, 2, 256)),
    ("compressor state", CompressorState(width=1024, window=128), 8, (1, 8, 4096)),
    ("sliding", SlidingAttention(**GQA, window=128), 16, (8, 16, 512)),
    ("chunked", ChunkedAttention(**GQA, chunk=8192), 16, (8, 16, 512)),
    ("sinks", SinkAttention(**GQA, sink_tokens=4, window=1024), 16, (8, 16, 512)),
    ("cross", CrossAttention(heads=20, head_dim=64, source=1500), 16, (20, 16, 256)),
    (
        "sliding latent",
        SlidingLatentAttention(latent=448, cache="fp8_ds_mla", version="v4", window=128),
        64,
        (1, 64, 584),
    ),
    ("Mamba1", Mamba1(inner=8192, state_size=16), 16, (1, 1, 8192 * 3 * 2 + 8192 * 16 * 2)),
    (
        "Mamba2",
        Mamba2(heads=128, head_dim=64, groups=8, state_size=128, ssm_dtype="fp32"),
        16,
        (1, 1, 4255744),
    ),
    (
        "gated delta net",
        GatedDeltaNet(key_heads=16, value_heads=64, key_dim=128, value_dim=128, ssm_dtype="fp32"),
        16,
        (1, 1, 4268032),
    ),
    ("KDA", KimiDelta(heads=32, head_dim=128), 16, (1, 1, 12288 * 3 * 2 + 32 * 128 * 128 * 4)),
    ("lightning", LightningAttention(heads=64, head_dim=128), 16, (1, 1, 64 * 128 * 128 * 2)),
    ("short conv", ShortConv(width=2048), 16, (1, 1, 2048 * 2 * 2)),
    ("RWKV7", Rwkv7(heads=40, head_dim=64, hidden=2560), 16, (1, 1, 675840)),
]

BY_NAME = {name: spec for name, spec, _, _ in TABLE}


@each(TABLE)
def test_page_table(name: str, spec: Spec, block: int, shape: tuple[int, int, int]) -> None:
    page = spec.page(block)
    assert (page.heads, page.states, page.content) == shape, name
    assert page.unpadded == shape[0] * shape[1] * shape[2]


@each(TABLE)
def test_every_kind_travels_as_json(
    name: str, spec: Spec, block: int, shape: tuple[int, int, int]
) -> None:
    text = msgspec.json.encode(spec)
    again = msgspec.json.decode(text, type=AnySpec)
    assert again == spec, (name, shape)
    assert hash(again) == hash(spec)
    assert again.page(block) == spec.page(block)


def test_the_table_has_every_kind() -> None:
    kinds = {type(spec) for _, spec, _, _ in TABLE} | {EncoderOnlyAttention}
    assert kinds == set(AnySpec.__args__)


def test_every_attention_cache_dtype_is_in_the_table() -> None:
    tried = {spec.cache for spec in BY_NAME.values() if isinstance(spec, FullAttention)}
    assert tried | {"fp8_e4m3", "fp8_e5m2"} == set(ATTENTION_CACHES)


def offsets(spec: Spec, block: int) -> dict[str, tuple[int, int]]:
    """Where each field starts, as (head, content byte)."""
    return {field.name: (field.head, field.offset) for field in spec.page(block).fields}


@each(
    [
        ("dense bf16", 16, {"k": (0, 0), "v": (0, 256)}),
        (
            "int8 per token and head",
            16,
            {"k": (0, 0), "k_scale": (0, 128), "v": (0, 132), "v_scale": (0, 260)},
        ),
        (
            "int4 per token and head",
            16,
            {"k": (0, 0), "k_scale": (0, 64), "v": (0, 68), "v_scale": (0, 132)},
        ),
        ("two planes", 16, {"k": (0, 0), "v": (1, 0)}),
        ("K transposed", 128, {"k": (0, 0), "v": (0, 128 * 256)}),
        (
            "turboquant k8v4",
            16,
            {"k": (0, 0), "v": (0, 128), "v_scale": (0, 192), "v_zero": (0, 194)},
        ),
        (
            "turboquant 3bit",
            16,
            {"k": (0, 0), "k_scale": (0, 48), "v": (0, 50), "v_scale": (0, 98), "v_zero": (0, 100)},
        ),
        ("fp8_ds_mla V3.2", 64, {"latent": (0, 0), "latent_scale": (0, 512), "rope": (0, 528)}),
        ("nvfp4_ds_mla", 64, {"latent": (0, 0), "rope": (0, 256), "latent_scale": (0, 320)}),
        (
            "fp8_ds_mla V4",
            256,
            {
                "latent": (0, 0),
                "rope": (0, 448),
                "latent_scale": (0, 64 * 576),
                "pad": (0, 64 * 576 + 7),
            },
        ),
        ("indexer fp8", 64, {"index": (0, 0), "index_scale": (0, 64 * 128)}),
        ("gated delta net", 16, {"conv": (0, 0), "ssm": (0, 73728)}),
    ],
)
def test_fields_lie_where_kernels_read_them(
    name: str, block: int, where: dict[str, tuple[int, int]]
) -> None:
    assert offsets(BY_NAME[name], block) == where


def test_tiled_keys_and_plain_values() -> None:
    """ROCm's K is [H, D/x, N, x] with 16-byte tiles; its V is [H, D, N]."""
    page = FullAttention(heads=2, head_dim=16, dtype="fp16", packing="tiled_planes").page(4)
    pool = page.place(Layout("LHBNC"), pages=1, blocks=3)
    k, v = page.view(pool, "k"), page.view(pool, "v")
    x, n, d = 8, 4, 16
    plane = 2 * n * d * 2
    for h in range(2):
        for state in range(n):
            for e in range(d):
                tile = ((h * (d // x) + e // x) * n + state) * x + e % x
                assert k(B=2, H=h, N=state, C=e // x, c=e % x) == 2 * plane + tile * 2
                flat = (h * d + e) * n + state
                assert v(B=2, H=h, N=state, C=e) == 3 * plane + 2 * plane + flat * 2


@each([("LBHNC", "planes"), ("LBNHC", "state_planes")])
def test_nvfp4_planes_as_flashinfer_reads_them(order: str, scales: Any) -> None:
    """Flat over the page: K's data, K's scales, V's data, V's scales, rows as the page's order."""
    heads, states, data_bytes, scale_bytes = 2, 4, 16, 2
    page = FullAttention(heads=heads, head_dim=32, cache="nvfp4", scales=scales).page(states)
    pool = page.place(Layout(order), pages=1, blocks=2)
    start = page.nbytes
    for name, width in (("k", data_bytes), ("k_scale", scale_bytes)) * 2:
        name = name if start < page.nbytes * 3 // 2 else name.replace("k", "v", 1)
        view = page.view(pool, name)
        rows = [(h, n) for h in range(heads) for n in range(states)]
        if scales == "state_planes":
            rows.sort(key=lambda row: row[::-1])
        for row, (h, n) in enumerate(rows):
            assert view(B=1, H=h, N=n, C=width - 1) == start + row * width + width - 1
        start += heads * states * width
    assert start == 2 * page.nbytes
    with pytest.raises(AtlasError) as refusal:
        page.view(page.place(Layout("LHBNC"), pages=1, blocks=2), "k_scale")
    assert refusal.value.code is Code.NOT_CONTIGUOUS


def test_every_element_of_a_transposed_page() -> None:
    """K is [D, N] in each head and V is [N, D] behind it, every element of it."""
    h, n, d = 2, 4, 3
    page = FullAttention(heads=h, head_dim=d, dtype="fp16", packing="transposed").page(n)
    pool = page.place(Layout("LBHNC"), pages=1, blocks=1)
    k, v = page.view(pool, "k"), page.view(pool, "v")
    for head, state, e in product(range(h), range(n), range(d)):
        base = head * n * 2 * d * 2
        assert k(H=head, N=state, C=e) == base + (e * n + state) * 2
        assert v(H=head, N=state, C=e) == base + n * d * 2 + (state * d + e) * 2


def test_every_element_of_recurrent_states() -> None:
    """Taps outside rows; matrices as [value heads, value, key] and [heads, head, state]."""
    gdn = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=3, value_dim=2, ssm_dtype="fp32")
    page = gdn.page(1)
    conv = page.view(page.place("BLHNC", pages=1, blocks=1), "conv")
    ssm = page.view(page.place("BLHNC", pages=1, blocks=1), "ssm")
    rows = 2 * 3 * 2 + 4 * 2
    assert all(conv(T=t, R=r) == (t * rows + r) * 2 for t in range(3) for r in range(rows))
    for head, value, key_ in product(range(4), range(2), range(3)):
        assert ssm(H=head, V=value, K=key_) == 3 * rows * 2 + ((head * 2 + value) * 3 + key_) * 4
    mamba = Mamba2(heads=2, head_dim=3, groups=1, state_size=5)
    page = mamba.page(1)
    ssm = page.view(page.place("BLHNC", pages=1, blocks=1), "ssm")
    start = 3 * (2 * 3 + 2 * 5) * 2
    for head, p, s in product(range(2), range(3), range(5)):
        assert ssm(H=head, P=p, S=s) == start + ((head * 3 + p) * 5 + s) * 2


@each(["LHBNC", "BHLNC", "LBHNC", "BLHNC"])
def test_nvfp4_planes_of_each_head(order: str) -> None:
    """Heads may be apart: each has its data, then its scales; K's heads, then V's."""
    heads, states, widths = 3, 4, {"": 16, "_scale": 2}
    spec = FullAttention(heads=heads, head_dim=32, cache="nvfp4", scales="head_planes")
    page = spec.page(states)
    pool = page.place(Layout(order), pages=2, blocks=2)
    seen = set()
    for side, (part, width), h, n, at, b in product(
        "kv", widths.items(), range(heads), range(states), range(2), range(2)
    ):
        view = page.view(pool, f"{side}{part}")
        head = pool(L=at, B=b, H=h + heads * (side == "v"), N=0, C=0)
        row = head + (0 if part == "" else states * widths[""]) + n * width
        found = [int(view(L=at, B=b, H=h, N=n, C=c)) for c in range(width)]
        assert found == list(range(row, row + width)), (side, part)
        seen |= set(found)
    assert seen == set(range(2 * 2 * page.nbytes))


def test_nvfp4_latent_scales_are_dealt_out_in_fours() -> None:
    page = LatentAttention(cache="nvfp4_ds_mla").page(2)
    scale = page.view(page.place("LBHNC", pages=1, blocks=1), "latent_scale")
    for n, s in product(range(2), range(32)):
        assert scale(N=n, C=s // 4, c=s % 4) == n * 352 + 320 + 8 * (s & 3) + (s >> 2)


def test_dtypes_of_fields() -> None:
    def dtypes(spec: Spec, block: int = 256) -> dict[str, str]:
        return {field.name: str(field.dtype) for field in spec.page(block).fields}

    assert dtypes(Indexer(cache="mxfp4")) == {"index": "mxfp4", "index_scale": "ue8m0"}
    assert dtypes(Indexer(cache="bf16")) == {"index": "bf16"}
    assert dtypes(BY_NAME["int4 per token and head"])["k"] == "uint4"
    assert dtypes(BY_NAME["fp8_ds_mla V4"])["latent_scale"] == "ue8m0"
    assert dtypes(BY_NAME["fp8_ds_mla V3.2"])["latent_scale"] == "fp32"
    assert dtypes(BY_NAME["turboquant k3v4"]) == {
        "k": "uint3", "k_scale": "fp16", "v": "uint4", "v_scale": "fp16", "v_zero": "fp16",
    }  # fmt: skip


def test_fields_know_their_shape_in_the_whole_model() -> None:
    page = FullAttention(heads=8, head_dim=64).page(16, tp=4, rank=1)
    assert page.field("k").shape == {"H": 8, "N": 16, "C": 64}
    conv = Mamba2(heads=8, head_dim=4, groups=1, state_size=6).page(1, tp=4).field("conv")
    assert conv.shape == {"T": 3, "R": 8 * 4 + 2 * 6}


def test_conv_states_in_both_orders() -> None:
    taps_outside = ShortConv(width=10, kernel=4, conv_order="TR")
    rows_outside = ShortConv(width=10, kernel=4, conv_order="RT")
    for spec, strides in ((taps_outside, {"T": 20, "R": 2}), (rows_outside, {"R": 6, "T": 2})):
        page = spec.page(1)
        view = page.view(page.place(Layout("BLHNC"), pages=1, blocks=2), "conv")
        assert {axis: view.stride(axis) for axis in "TR"} == strides


def test_deepseek_v4_layers_have_the_pages_of_their_parts() -> None:
    """Block sizes as the engine picks them; pages padded to whole 576-byte rows."""
    c4, c128, window = compressed_latent(4), compressed_latent(128), compressed_latent(0)
    assert {name: c4[name].page(block).nbytes for name, block in {
        "swa": 64, "attn": 256, "compressor": 4, "indexer": 256, "indexer_compressor": 4,
    }.items()} == {
        "swa": 37440, "attn": 37440, "compressor": 32832,
        "indexer": 8640, "indexer_compressor": 8640,
    }  # fmt: skip
    assert {name: c128[name].page(block).nbytes for name, block in {
        "swa": 64, "attn": 256, "compressor": 8,
    }.items()} == {"swa": 37440, "attn": 1728, "compressor": 32832}  # fmt: skip
    assert list(window) == ["swa"]
    assert {name: spec.tokens_per_state for name, spec in c4.items()} == {
        "swa": 1, "attn": 4, "compressor": 1, "indexer": 4, "indexer_compressor": 1,
    }  # fmt: skip
    assert [spec.window for spec in c4.values() if isinstance(spec, CompressorState)] == [8, 8]


def test_sparse_latent_has_two_caches() -> None:
    caches = sparse_latent(cache="fp8_ds_mla")
    assert {name: spec.page(64).nbytes for name, spec in caches.items()} == {
        "attn": 41984,
        "indexer": 8448,
    }


def test_encoder_only_attention_keeps_nothing() -> None:
    with pytest.raises(AtlasError) as refusal:
        EncoderOnlyAttention(heads=8, head_dim=64).page(16)
    assert refusal.value.code is Code.NO_CACHE
