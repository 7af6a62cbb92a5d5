"""Living caches: every view shares the pool's storage and shows the plan's own bytes."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code, Layout  # noqa: E402
from kvatlas.cache import ALIGNMENT, adapters, allocate, bind  # noqa: E402
from kvatlas.specs import FullAttention, LatentAttention, compressed_latent  # noqa: E402
from tests.guards import ORDERS, Guarded, one_storage, small_plan, spec_plan  # noqa: E402
from tests.plan.models import SMALL  # noqa: E402

@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("order", ORDERS)
def test_fields_lie_where_the_plan_says(name: str, order: str) -> None:
    """Writing one element through a view changes exactly the bytes that its placement names."""
    made = small_plan(SMALL[name], layout=order)
    guarded = Guarded(made)
    for layer in guarded.cache:
        for part, found in enumerate(guarded.cache.parts(layer)):
            one_storage(guarded.cache, found.tensor, *found.fields.values())
            for field, tensor in found.fields.items():
                placed = found.place(field)
                assert tuple(tensor.shape) == placed.sizes
                last = tuple(n - 1 for n in placed.sizes)
                at = placed(**dict(zip(placed.axes, last, strict=True)))
                found.buffer.zero_()
                tensor.view(torch.uint8)[last[:-1]][-placed.item :] = 0xFF
                touched = torch.nonzero(found.buffer).flatten().tolist()
                assert touched == list(range(at, at + placed.item)), (layer, part, field)
    guarded.check()


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_backends_get_their_shapes_in_every_order(order: str, blocks: int) -> None:
    """Two blocks are two blocks, never K and V."""
    made = small_plan(SMALL["dense"], blocks + 1, layout=order)
    assert made.num_blocks == blocks + 1
    guarded = Guarded(made)
    layer = guarded.cache["layers.2.attn"]
    b, h, n, d = blocks + 1, 4, 16, 8
    assert tuple(layer.tensor.shape) == (b, h, n, 2 * d * 2)
    fa = adapters.flash_attention(layer)
    hnd = adapters.flashinfer(layer, "HND")
    packed = adapters.flashinfer_packed(layer, "HND")
    assert tuple(fa.k.shape) == tuple(fa.v.shape) == (b, n, h, d)
    assert tuple(hnd.k.shape) == (b, h, n, d)
    assert tuple(packed.shape) == (b, 2, h, n, d)
    assert tuple(adapters.flashinfer_packed(layer, "NHD").shape) == (b, 2, n, h, d)
    one_storage(guarded.cache, *fa, *hnd, packed, adapters.triton(layer, "v").base)
    fa.k.fill_(1.0)
    fa.v.fill_(2.0)
    assert (packed[:, 0] == 1).all()
    assert (packed[:, 1] == 2).all()
    assert (hnd.v == 2).all()
    fa.v[b - 1, 3, 2, 5] = 7.0
    assert packed[b - 1, 1, 2, 3, 5] == 7
    kernel = adapters.triton(layer, "v")
    at = sum(kernel.strides[a] * i for a, i in {"B": b - 1, "H": 2, "N": 3, "C": 5}.items())
    assert kernel.base[at : at + 2].view(torch.bfloat16).item() == 7
    others = [x for x in guarded.cache if x != "layers.2.attn"]
    assert all((guarded.cache[x].tensor == 0xA5).all() for x in others)
    guarded.check()


@pytest.mark.parametrize("order", ORDERS)
def test_states_of_all_blocks_on_one_axis_or_a_refusal(order: str) -> None:
    made = small_plan(SMALL["dense"], layout=order)
    layer = allocate(made)["layers.1.attn"]
    k = layer.k
    foldable = k.stride(0) == 16 * k.stride(2)
    if foldable:
        flat = adapters.flex_attention(layer)
        assert tuple(flat.k.shape) == (made.num_blocks * 16, 4, 8)
        flat.v[37, 2, 3] = 5.0
        assert layer.v[37 // 16, 2, 37 % 16, 3] == 5
        q, kv = torch.randn(1, 4, 3, 8), adapters.sdpa(layer, 2, 3)
        assert tuple(kv.k.shape) == (1, 4, 48, 8)
        attend = torch.nn.functional.scaled_dot_product_attention
        assert tuple(attend(q, kv.k.float(), kv.v.float()).shape) == (1, 4, 3, 8)
    else:
        with pytest.raises(AtlasError) as refusal:
            adapters.flex_attention(layer)
        assert refusal.value.code is Code.NOT_FOLDABLE
        with pytest.raises(AtlasError):
            adapters.sdpa(layer, 0, 2)
    assert foldable == (order in ("LBNHC", "LHBNC"))


def test_nvfp4_data_and_scales() -> None:
    made = spec_plan(FullAttention(heads=4, head_dim=32, cache="nvfp4"))
    cache = allocate(made)
    layer = cache["layers.1.attn"]
    data, scales = adapters.flashinfer_nvfp4(layer)
    assert tuple(data.shape) == (made.num_blocks, 2, 4, 16, 16)
    assert tuple(scales.shape) == (made.num_blocks, 2, 4, 16, 2)
    assert scales.dtype == torch.float8_e4m3fn
    one_storage(cache, data, scales)
    layer.buffer.zero_()
    data.fill_(1)
    scales.view(torch.uint8).fill_(2)
    assert (layer.tensor.sum(dtype=torch.int64)) == data.numel() + 2 * scales.numel()


def test_head_grouped_fp8() -> None:
    made = spec_plan(FullAttention(heads=4, head_dim=32, cache="fp8", packing="head_groups"))
    layer = allocate(made)["layers.0.attn"]
    packed = adapters.flashinfer_packed(layer, "HND")
    assert tuple(packed.shape) == (made.num_blocks, 2, 4, 16, 32)
    assert packed[0].is_contiguous()
    assert packed.dtype == torch.float8_e4m3fn


def test_rocm_planes() -> None:
    made = spec_plan(FullAttention(heads=4, head_dim=32, packing="tiled_planes"), "LHBNC")
    cache = allocate(made)
    k, v = adapters.rocm_planes(cache["layers.0.attn"])
    assert tuple(k.shape) == (made.num_blocks, 4, 4, 16, 8)
    assert tuple(v.shape) == (made.num_blocks, 4, 32, 16)
    assert k[0].is_contiguous()
    assert v[0].is_contiguous()
    one_storage(cache, k, v)


def test_latents() -> None:
    made = spec_plan(LatentAttention(latent=64, rope=16))
    cache = allocate(made)
    row = adapters.latent(cache["layers.1.attn"])
    assert tuple(row.shape) == (made.num_blocks, 16, 80)
    assert row.is_contiguous()
    row[3, 2, 70] = 4.0
    assert cache["layers.1.attn"].rope[3, 2, 6] == 4
    sparse = allocate(spec_plan(LatentAttention(cache="fp8_ds_mla"), block=64))["layers.0.attn"]
    with pytest.raises(AtlasError) as refusal:
        adapters.latent(sparse)
    assert refusal.value.code in (Code.NOT_CONTIGUOUS, Code.UNLIKE_PLACEMENTS)
    assert tuple(sparse.tensor.shape[1:]) == (1, 64, 656)


def test_recurrent_states_in_both_orders() -> None:
    made = small_plan(SMALL["mamba hybrid"])
    cache = allocate(made)
    layer = cache["layers.0.mixer"]
    taps, ssm = adapters.mamba(layer, "SD")
    rows, _ = adapters.mamba(layer, "DS")
    assert tuple(taps.shape[1:]) == (3, 8 * 8 + 2 * 16)
    assert tuple(rows.shape[1:]) == (8 * 8 + 2 * 16, 3)
    one_storage(cache, taps, rows, ssm)
    taps[1, 2, 5] = 3.0
    assert rows[1, 5, 2] == 3


@pytest.mark.parametrize("order", ORDERS)
def test_cross_layer_rows(order: str) -> None:
    made = small_plan(SMALL["dense"], layout=order)
    cache = allocate(made)
    if Layout(order).block_outermost:
        rows = cache.block([2, 4, 6])
        assert tuple(rows.shape) == (3, made.bytes_per_block)
        one_storage(cache, rows)
        for layer in cache.values():
            layer.tensor.zero_()
            layer.tensor[4] = 9
        assert (cache.block(4) == 9).all()
        assert (rows[0] == 0).all()
        bad = {(1, 0): Code.NOT_CONTIGUOUS, (0, 1, 3): Code.NOT_CONTIGUOUS}
        bad |= {(made.num_blocks,): Code.OUT_OF_RANGE, (): Code.OUT_OF_RANGE}
        for ids, code in bad.items():
            with pytest.raises(AtlasError) as refusal:
                cache.block(ids)
            assert refusal.value.code is code
    else:
        with pytest.raises(AtlasError) as refusal:
            cache.block(0)
        assert refusal.value.code is Code.NOT_CONTIGUOUS


def test_kernel_blocks_are_blocks_to_a_kernel() -> None:
    for order in ORDERS:
        made = small_plan(
            SMALL["dense"], layout=order, backend="FLASHINFER", block_size=128, max_len=256
        )
        layer = allocate(made)["layers.3.attn"]
        assert tuple(layer.k.shape) == (made.num_blocks * 2, 4, 64, 8)


def test_pools_are_aligned_and_states_start_at_zero() -> None:
    made = small_plan(SMALL["delta hybrid"])
    cache = allocate(made)
    for pool in cache.pools.values():
        assert pool.data_ptr() % ALIGNMENT == 0
        assert not pool.any()


def test_every_rank_of_a_pipeline_has_its_layers() -> None:
    made = small_plan(SMALL["sliding"], tp=2, pp=2)
    found = [set(allocate(made, rank=rank)) for rank in range(4)]
    assert found[0] == found[1] != found[2] == found[3]
    assert found[0] | found[2] == set(made.layers)
    heads = [allocate(made, rank=r)["layers.0.attn"].page.field("k").pieces for r in (0, 1)]
    assert [pieces[0].start for pieces in heads] == [0, 2]
    with pytest.raises(AtlasError) as refusal:
        allocate(made, rank=0)["layers.5.attn"]
    assert refusal.value.code is Code.UNKNOWN_LAYER
    for rank in (-1, 4, True, 1.0):
        with pytest.raises(AtlasError) as refusal:
            allocate(made, rank=rank)  # type: ignore[arg-type]
        assert refusal.value.code is Code.BAD_RANK


def test_memory_of_others(tmp_path: Path) -> None:
    """A mapped file is a cache: what is written is in the file."""
    made = small_plan(SMALL["dense"])
    path = tmp_path / "pool"
    path.write_bytes(bytes(made.pools[0].nbytes))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        cache = bind(mapped, made)
        cache["layers.2.attn"].k[3, 1, 2, 4] = 1.0
        at = made.view("layers.2.attn", "k")(B=3, H=1, N=2, C=4)
        assert mapped[at : at + 2] == b"\x80\x3f"
        del cache


MEMORY: list[Any] = [bytearray(10), torch.zeros(10, dtype=torch.uint8), torch.zeros(1 << 26)]
MEMORY += ["text", None, {}, {1: bytearray(9)}]


@pytest.mark.parametrize("memory", MEMORY, ids=range(len(MEMORY)))
def test_memory_that_does_not_fit_is_refused(memory: Any) -> None:
    with pytest.raises(AtlasError) as refusal:
        bind(memory, small_plan(SMALL["dense"]))
    assert refusal.value.code in (Code.BAD_TENSOR, Code.OUT_OF_BOUNDS)


def test_an_adapter_of_another_packing_is_refused() -> None:
    layer = allocate(small_plan(SMALL["dense"]))["layers.0.attn"]
    with pytest.raises(AtlasError) as refusal:
        adapters.rocm_planes(layer)
    assert refusal.value.code is Code.BAD_AXES
    with pytest.raises(AttributeError):
        _ = layer.latent
    assert compressed_latent(4)  # the kinds that no adapter takes still have fields
