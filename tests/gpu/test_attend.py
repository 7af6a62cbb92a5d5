"""Attention and writing on a GPU: kinds, orders, cache dtypes, latents, captured graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.gpu.attention import latent

from kvatlas import AtlasError, Code, kernels
from kvatlas.geometry import Layout
from kvatlas.kernels import triton as gpu
from kvatlas.kernels.triton import attend, write
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
    check_not_finite,
    check_selected,
    check_write,
    check_write_latent,
    exact_attention,
)

BASE: dict[str, Any] = {"heads": 2, "head_dim": 128}
MIXED: dict[str, Any] = {
    "lengths": [1037, 5, 200, 9, 700], "queries": [4, 1, 200, 0, 33], "group": 4,
    "dtype": torch.bfloat16, "tolerance": 0.02,
}  # fmt: skip
WHOLE: dict[str, Any] = {"dtype": torch.float32, "tolerance": 1e-4}
"""Queries of float32, whose products are not rounded."""
LARGE: dict[str, tuple[Any, dict[str, Any]]] = {
    "float32": (FullAttention(**BASE, dtype="fp32"), WHOLE),
    "float32 over bf16": (FullAttention(heads=2, head_dim=256), WHOLE),
    "float32 over int8": (FullAttention(**BASE, cache="int8_per_token_head"), WHOLE),
    "longer V": (FullAttention(heads=2, head_dim=128, v_dim=256), {}),
    "longer V of fp8": (FullAttention(heads=2, head_dim=64, v_dim=256, cache="fp8"), {}),
    "widest heads": (FullAttention(heads=2, head_dim=512), {}),
    "widest heads of int4": (FullAttention(heads=2, head_dim=512, cache="int4_per_token_head"), {}),
    "widest heads, float32": (FullAttention(heads=2, head_dim=512, dtype="fp32"), WHOLE),
}
"""What takes more shared memory than heads of 128."""
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    **LARGE,
    "causal": (FullAttention(**BASE), {}),
    "window": (SlidingAttention(**BASE, window=70), {}),
    "chunks": (ChunkedAttention(**BASE, chunk=64), {}),
    "unlike V": (FullAttention(heads=2, head_dim=192, v_dim=128), {}),
    "small heads": (FullAttention(heads=2, head_dim=64), {}),
    "large heads": (FullAttention(heads=2, head_dim=256), {}),
    "odd heads": (FullAttention(heads=3, head_dim=80), {}),
    "softcap": (FullAttention(**BASE), {"softcap": 2.0}),
    "sinks": (FullAttention(**BASE), {"sink_logits": True}),
    "sinks in a window": (SlidingAttention(**BASE, window=50), {"sink_logits": True}),
    "tokens that stay": (SinkAttention(**BASE, sink_tokens=90, window=100), {}),
    "cross": (CrossAttention(**BASE, source=2048), {"queries": [4, 7, 200, 1, 33]}),
    "starts": (FullAttention(**BASE), {"starts": True}),
    "halves": (FullAttention(**BASE, dtype="fp16"), {"dtype": torch.float16}),
    "K transposed": (FullAttention(**BASE, packing="transposed"), {}),
    "K in tiles": (FullAttention(**BASE, packing="tiled_planes"), {}),
    "int8 in a window": (SlidingAttention(**BASE, window=70, cache="int8_per_token_head"), {}),
    "int4 in a window": (SlidingAttention(**BASE, window=70, cache="int4_per_token_head"), {}),
    "fp8 that stay": (
        SinkAttention(**BASE, sink_tokens=90, window=100, cache="fp8_per_token_head"), {}
    ),
    "int4, softcap": (FullAttention(**BASE, cache="int4_per_token_head"), {"softcap": 2.0}),
    "int8, sinks": (FullAttention(**BASE, cache="int8_per_token_head"), {"sink_logits": True}),
    "nvfp4 that stay": (SinkAttention(**BASE, sink_tokens=90, window=100, cache="nvfp4"), {}),
    "levels in a window": (SlidingAttention(**BASE, window=70, cache="turboquant_4bit_nc"), {}),
    "small heads of nvfp4": (FullAttention(heads=2, head_dim=64, cache="nvfp4"), {}),
    "large heads of nvfp4": (FullAttention(heads=2, head_dim=256, cache="nvfp4"), {}),
    "small heads of fp8 by row": (
        FullAttention(heads=2, head_dim=64, cache="fp8_per_token_head"), {}
    ),
    "fp8 by row in planes": (
        FullAttention(**BASE, cache="fp8_per_token_head", packing="planes"), {}
    ),
    "int8 by row in planes": (
        FullAttention(**BASE, cache="int8_per_token_head", packing="planes"), {}
    ),
    "small heads of levels": (FullAttention(heads=2, head_dim=64, cache="turboquant_4bit_nc"), {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(KINDS))
def test_attention_is_what_float64_says(kind: str) -> None:
    spec, more = KINDS[kind]
    check_attend(spec, "LBHNC", "cuda", **{**MIXED, **more})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block", [16, 64])
def test_nvfp4_is_written_and_attended_in_every_order(order: str, block: int) -> None:
    for head_dim in (64, 128):
        spec = FullAttention(heads=2, head_dim=head_dim, cache="nvfp4")
        placed = in_layout(spec, Layout(order))
        check_write(placed, order, "cuda", exact=True)
        check_attend(placed, order, "cuda", **MIXED, block=block)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block", [16, 24, 64, 256])
def test_orders_and_blocks_make_no_difference(order: str, block: int) -> None:
    check_attend(FullAttention(**BASE), order, "cuda", **MIXED, block=block)


@pytest.mark.parametrize("cache", ["fp8_per_token_head", "int8_per_token_head"])
def test_prefill_of_rows_with_their_own_scales(cache: str) -> None:
    """Hopper's prefill reads neighbouring rows by one page if they lie in one, and V early."""
    more = {**MIXED, "queries": [200, 1, 200, 0, 133]}
    # Kernels take seconds to compile: all orders share those of blocks of 10, and those of
    # 16 whose strides 16 divides have the ones that other tests need.
    for block, orders in ((10, ORDERS), (16, ["LBHNC", "LHBNC", "BLHNC", "BHLNC"])):
        for order in orders:
            check_attend(FullAttention(**BASE, cache=cache), order, "cuda", **more, block=block)


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_every_cache_dtype_is_read(cache: str) -> None:
    check_attend(FullAttention(**BASE, cache=cache), "LBHNC", "cuda", **MIXED)


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
def test_one_query_alone(cache: str, order: str) -> None:
    """Decode with the tiles that are shipped, sums of several workers put together."""
    check_attend(
        FullAttention(heads=8, head_dim=128, cache=cache), order, "cuda", lengths=[5000, 1, 16, 33],
        queries=[1, 1, 1, 1], group=4, dtype=torch.bfloat16, tolerance=0.02, max_queries=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cache", "block"),
    [
        ("int4_per_token_head", 24),
        ("int4_per_token_head", 64),
        ("int8_per_token_head", 64),
        ("turboquant_4bit_nc", 24),
    ],
)
def test_scales_of_any_size(cache: str, block: int) -> None:
    """Scales are logarithms on their way; blocks are shorter than a tile, and longer."""
    check_attend(
        FullAttention(**BASE, cache=cache), "LBHNC", "cuda", lengths=[777, 1, 31, 64],
        queries=[1, 1, 1, 1], group=4, dtype=torch.bfloat16, tolerance=0.02, max_queries=1,
        block=block, spread=True,
    )  # fmt: skip


@pytest.mark.parametrize("kind", list(LARGE))
def test_one_query_alone_over_large_rows(kind: str) -> None:
    spec, more = LARGE[kind]
    alone: dict[str, Any] = {"lengths": [1037, 1, 16, 33], "queries": [1, 1, 1, 1]}
    check_attend(spec, "LBNHC", "cuda", **{**MIXED, **alone, **more}, max_queries=1)


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_every_cache_dtype_is_written(cache: str) -> None:
    spec = FullAttention(heads=4, head_dim=128, cache=cache)
    check_write(spec, "LBHNC", "cuda", exact="turbo" not in cache, tokens=150)


@pytest.mark.parametrize("dims", [(128, 128), (96, 16)])
def test_int4_is_written_by_programs_that_lack_rows(dims: tuple[int, int]) -> None:
    """Of the last program's eight rows three are there; rows that fill a tile, and others."""
    k_dim, v_dim = dims
    spec = FullAttention(heads=3, head_dim=k_dim, v_dim=v_dim, cache="int4_per_token_head")
    check_write(spec, "LBNHC", "cuda", exact=True, tokens=41)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_written_in_every_order(order: str) -> None:
    check_write(FullAttention(heads=4, head_dim=96, v_dim=64), order, "cuda", exact=True)


@pytest.mark.parametrize("packing", ["tiled_planes", "transposed"])
def test_tiled_and_transposed_keys_are_written(packing: Any) -> None:
    spec = FullAttention(heads=4, head_dim=128, packing=packing)
    check_write(spec, "LBHNC", "cuda", exact=True)


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_what_is_not_finite_stays_so(cache: str) -> None:
    check_not_finite(FullAttention(heads=2, head_dim=128, cache=cache), "cuda")


@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_latents_are_written(cache: str, dtype: torch.dtype, order: str) -> None:
    spec = LatentAttention(cache=cache)
    check_write_latent(spec, order, "cuda", dtype=dtype, whole=False)


@pytest.mark.parametrize("order", ORDERS)
def test_latents_of_many_heads(order: str) -> None:
    """Up to 64 rows a program; a tile, a tile and one, odd tiles, more than one worker."""
    for heads, batch in ((128, (3, 700)), (64, (5, 65)), (128, (2, 6000)), (16, (70, 64))):
        for cache in ("auto", "fp8"):
            assert latent(batch, cache, order, "TFLOP/s", {}, heads=heads).right()


def test_latents_of_many_sequences() -> None:
    """More than a worker looks at together to find its first one."""
    for heads in (16, 128):
        assert latent((600, 70), "auto", "LBNHC", "TFLOP/s", {}, heads=heads).right()


@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_absorbed_latents(order: str, cache: str) -> None:
    more: dict[str, Any] = {"dtype": torch.bfloat16, "tolerance": 0.05, "heads": 128}
    check_latent(LatentAttention(cache=cache), order, "cuda", **more)
    check_latent(LatentAttention(cache=cache), order, "cuda", sink_logits=True, **more)
    check_latent(SlidingLatentAttention(cache=cache, window=9), order, "cuda", **more)


@pytest.mark.parametrize(
    "form",
    [
        {"cache": "nvfp4_ds_mla"},
        {"cache": "fp8_ds_mla", "version": "v4", "latent": 448},
    ],
)
def test_latents_without_a_kernel_are_left_to_torch(form: dict[str, Any]) -> None:
    spec = LatentAttention(**form)
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(70, spec.latent + 64, generator=generator)
    q = torch.randn(2, 3, spec.latent + 64, generator=generator)
    outputs = []
    for device in ("cpu", "cuda"):
        layer = Pool(spec, "LBNHC", device, block=64, blocks=4).layer
        slots = torch.cat((3 * 64 + torch.arange(64), 64 + torch.arange(6))).to(device)
        latent, rope = rows[:, : spec.latent].to(device), rows[:, spec.latent :].to(device)
        kernels.write_latent(layer, latent, rope, slots)
        out = kernels.attend_latent(
            layer, q.to(device), tables=torch.tensor([[3, 1]], device=device), scale=0.05,
            lengths=torch.tensor([70], device=device), queries=torch.tensor([2], device=device),
        )  # fmt: skip
        outputs.append(out.cpu())
    assert torch.allclose(outputs[0], outputs[1], atol=0.01)


SPARSE: dict[str, dict[str, Any]] = {
    "records": {"cache": "fp8_ds_mla"},
    "fp8": {"cache": "fp8"},
    "latents": {},
    "small records": {"cache": "fp8_ds_mla", "latent": 128},
}
SELECTED: dict[str, dict[str, Any]] = {
    "some of each kind": {"most": 130, "lengths": (700, 5, 0, 200), "queries": (4, 1, 2, 200)},
    "decode": {"most": 2048, "lengths": (9000, 3000, 1), "queries": (1, 1, 1), "max_queries": 1},
    "all of them": {"most": 0, "lengths": (700, 5, 200), "queries": (1, 1, 1), "max_queries": 1},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch", list(SELECTED))
@pytest.mark.parametrize("kind", list(SPARSE))
@pytest.mark.parametrize("heads", [16, 128])
def test_queries_attend_to_selected_tokens(kind: str, batch: str, order: str, heads: int) -> None:
    spec = LatentAttention(**SPARSE[kind])
    # Keys of records are rounded to bfloat16, which changes logits of 5 by 0.01, often by more.
    tolerance = 0.1 if spec.cache == "fp8_ds_mla" else 0.03
    check_selected(
        spec, order, "cuda", dtype=torch.bfloat16, tolerance=tolerance, heads=heads, block=64,
        **SELECTED[batch],
    )  # fmt: skip


def test_absorbed_latents_of_float32() -> None:
    more: dict[str, Any] = {"dtype": torch.float32, "tolerance": 1e-3, "heads": 16}
    check_latent(LatentAttention(), "LBNHC", "cuda", **more)
    check_latent(LatentAttention(dtype="fp32"), "LBNHC", "cuda", **more)


def test_a_captured_graph_replays_with_other_lengths() -> None:
    spec = FullAttention(**BASE)
    pool = Pool(spec, "BHLNC", "cuda", blocks=64)
    layer = pool.layer
    layer.k.normal_()
    layer.v.normal_()
    tables = torch.randperm(64, device="cuda").view(2, 32).int()
    lengths = torch.tensor([64, 500], device="cuda").int()
    queries = torch.ones_like(lengths)
    q = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)

    def act() -> None:
        attend(layer, q, tables=tables, lengths=lengths, queries=queries, out=out, max_queries=1)

    act()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    for new in ([64, 500], [511, 1], [17, 300]):
        lengths.copy_(torch.tensor(new))
        q.normal_()
        out.fill_(float("nan"))
        graph.replay()
        for i, length in enumerate(new):
            at = torch.arange(length, device="cuda")
            where = tables[i, at // 16].long(), slice(None), at % 16
            k, v = layer.k[where[0], :, where[2]], layer.v[where[0], :, where[2]]
            expected = exact_attention(spec, q[i : i + 1], k, v, 128**-0.5, None, None)
            assert float((out[i].double() - expected[0]).abs().max()) < 0.02


def test_memory_that_a_kernel_cannot_reach_is_refused() -> None:
    spec = FullAttention(**BASE)
    layer = Pool(spec, "LBNHC", "cuda").layer
    rows, slots = torch.zeros(2, 2, 128), torch.tensor([1, 2])
    with pytest.raises(AtlasError) as refusal:
        write(layer, rows, rows, slots.cuda())
    assert refusal.value.code is Code.WRONG_DEVICE


def test_tensors_on_a_gpu_find_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of `kvatlas.kernels` are the same ones, wherever a cache lives."""
    called = []
    names = ["attend", "attend_latent", "write", "write_latent", "copy_blocks", "zero_blocks"]
    for name in names:
        monkeypatch.setattr(gpu, name, lambda *_, name=name, **__: called.append(name))
    layer = Pool(FullAttention(**BASE), "LBNHC", "cuda").layer
    latent = Pool(LatentAttention(), "LBNHC", "cuda").layer
    some = torch.zeros(1, dtype=torch.int64, device="cuda")
    q = torch.zeros(1, 2, 128, device="cuda")
    more: dict[str, Any] = {"tables": some, "lengths": some, "queries": some}
    kernels.attend(layer, q, **more)
    kernels.attend_latent(latent, q, scale=1.0, **more)
    kernels.write(layer, q, q, some)
    kernels.write_latent(latent, q, q, some)
    kernels.copy_blocks(layer, some, layer, some)
    kernels.zero_blocks(layer, some)
    assert called == names


@pytest.mark.parametrize("cache", ["auto", "int8_per_token_head"])
def test_many_queries_of_a_sequence_without_states_get_zeros(cache: str) -> None:
    """So that batches can be padded, between sequences that have states and behind them."""
    layer = Pool(FullAttention(**BASE, cache=cache), "LBNHC", "cuda", blocks=40).layer
    layer.buffer.zero_()
    k, v = (torch.ones(600, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    write(layer, k, v, torch.arange(600, device="cuda"))
    counts, lengths = [200, 100, 40, 130], [600, 0, 40, 0]
    q = torch.randn(sum(counts), 8, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.full_like(q, float("nan"))
    tables = torch.arange(38, device="cuda", dtype=torch.int32).expand(4, 38).contiguous()
    sizes = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in (lengths, counts))
    attend(layer, q, tables=tables, lengths=next(sizes), queries=next(sizes), out=out)
    parts = torch.split(out.float(), counts)
    for part, length in zip(parts, lengths, strict=True):
        torch.testing.assert_close(
            part, torch.full_like(part, float(length > 0)), atol=0.01, rtol=0
        )
