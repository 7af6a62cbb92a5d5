"""Every adapter in every order: one storage, the backend's shape, and the right element.

Pools are filled with random bytes, and every element of every view is compared with the bytes
at the address that its field's placement names.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code
from kvatlas.cache import adapters, allocate
from kvatlas.kernels import attend, write
from kvatlas.specs import FullAttention, GatedDeltaNet, LatentAttention, ShortConv, Spec
from tests.guards import ORDERS, Guarded, cache_of, one_storage, small_plan, spec_plan
from tests.planning.models import SMALL

Views = dict[str, tuple[Any, str]]
"""By field: a view, and its axes in order."""


def both(kv: Any, k_axes: str, v_axes: str = "") -> Views:
    return {"k": (kv[0], k_axes), "v": (kv[1], v_axes or k_axes)}


def packed(tensor: Any, axes: str, first: str = "k", second: str = "v") -> Views:
    """K and V on the second axis."""
    assert tensor.shape[1] == 2
    return {first: (tensor[:, 0], axes), second: (tensor[:, 1], axes)}


def nvfp4(layer: Any, order: Any, axes: str) -> Views:
    data, scales = adapters.flashinfer_nvfp4(layer, order)
    return packed(data, axes) | packed(scales, axes, "k_scale", "v_scale")


def of_triton(layer: Any) -> Views:
    """What a kernel makes of a pointer and strides."""
    base, sizes, strides = adapters.triton(layer, "v")
    item = layer.v.element_size()
    steps = [strides[axis] // item for axis in "BHNC"]
    whole = base[: base.numel() // item * item].view(layer.v.dtype)
    start = whole.storage_offset()
    view = torch.as_strided(whole, [sizes[axis] for axis in "BHNC"], steps, start)
    return {"v": (view, "BHNC")}


def of_latent(layer: Any) -> Views:
    row = adapters.latent(layer)
    return {"latent": (row[..., :24], "BNC"), "rope": (row[..., 24:], "BNC")}


def of_flex(layer: Any) -> Views:
    flat = adapters.flex_attention(layer)
    blocks = layer.kernel_blocks.size("B")
    return {
        n: (torch.unflatten(t, 0, (blocks, -1)), "BNHC") for n, t in zip("kv", flat, strict=True)
    }


def of_sdpa(layer: Any) -> Views:
    blocks = layer.kernel_blocks.size("B")
    flat = adapters.sdpa(layer, 0, blocks)
    return {
        n: (torch.unflatten(t[0], 1, (blocks, -1)), "HBNC") for n, t in zip("kv", flat, strict=True)
    }


def scales(layer: Any) -> Views:
    return {
        f"{n}_scale": (t.unsqueeze(-1), "BNHC")
        for n, t in zip("kv", adapters.scales(layer), strict=True)
    }


DENSE = FullAttention(heads=2, head_dim=8)
GROUPED = FullAttention(heads=2, head_dim=8, cache="fp8", packing="head_groups")
PLANES = FullAttention(heads=2, head_dim=8, packing="planes")
FP4 = FullAttention(heads=2, head_dim=32, cache="nvfp4")
FP4_STATES = FullAttention(heads=2, head_dim=32, cache="nvfp4", scales="state_planes")
FP4_INLINE = FullAttention(heads=2, head_dim=32, cache="nvfp4", scales="inline")
INT8 = FullAttention(heads=2, head_dim=8, cache="int8_per_token_head")
TILED = FullAttention(heads=2, head_dim=16, packing="tiled_planes")
TURNED = FullAttention(heads=2, head_dim=8, packing="transposed")
DELTA = GatedDeltaNet(key_heads=2, value_heads=2, key_dim=4, value_dim=4, ssm_dtype="fp32")
Adapter = Callable[[Any], Views]

CASES: dict[str, tuple[Spec, Adapter]] = {
    "flash attention": (DENSE, lambda x: both(adapters.flash_attention(x), "BNHC")),
    "flash attention, planes": (PLANES, lambda x: both(adapters.flash_attention(x), "BNHC")),
    "flashinfer NHD": (DENSE, lambda x: both(adapters.flashinfer(x, "NHD"), "BNHC")),
    "flashinfer HND": (DENSE, lambda x: both(adapters.flashinfer(x, "HND"), "BHNC")),
    "packed NHD": (DENSE, lambda x: packed(adapters.flashinfer_packed(x, "NHD"), "BNHC")),
    "packed HND": (DENSE, lambda x: packed(adapters.flashinfer_packed(x, "HND"), "BHNC")),
    "fp8 head groups": (GROUPED, lambda x: packed(adapters.flashinfer_packed(x, "HND"), "BHNC")),
    "nvfp4 HND": (FP4, lambda x: nvfp4(x, "HND", "BHNC")),
    "nvfp4 NHD": (FP4_STATES, lambda x: nvfp4(x, "NHD", "BNHC")),
    "nvfp4 inline": (FP4_INLINE, lambda x: nvfp4(x, "HND", "BHNC")),
    "flex attention": (DENSE, of_flex),
    "sdpa": (DENSE, of_sdpa),
    "triton": (DENSE, of_triton),
    "scales": (INT8, scales),
    "rocm planes": (TILED, lambda x: both(adapters.rocm_planes(x), "BHCNc", "BHCN")),
    "cpu attention": (TURNED, lambda x: both(adapters.cpu_attention(x), "BHCN", "BHNC")),
    "latent": (LatentAttention(latent=24, rope=8), of_latent),
    "conv SD": (ShortConv(width=8), lambda x: {"conv": (adapters.mamba(x, "SD")[0], "BTR")}),
    "conv DS": (ShortConv(width=8), lambda x: {"conv": (adapters.mamba(x, "DS")[0], "BRT")}),
    "conv DS of RT": (
        ShortConv(width=8, conv_order="RT"),
        lambda x: {"conv": (adapters.mamba(x, "DS")[0], "BRT")},
    ),
    "conv and ssm": (
        DELTA,
        lambda x: {
            "conv": (adapters.mamba(x, "SD")[0], "BTR"),
            "ssm": (adapters.mamba(x, "SD")[1], "BHVK"),
        },
    ),
}

STATE_MAJOR = ("LBNHC", "BLNHC")
SPLIT_PAGES = ("LHBNC", "BHLNC")
REFUSED: dict[tuple[str, str], Code] = {
    # States of all blocks on one axis: only where blocks follow each other state by state.
    **{(name, order): Code.NOT_FOLDABLE
       for name in ("flex attention", "sdpa") for order in ("LBHNC", "BLHNC", "BLNHC", "BHLNC")},
    # A head's keys lie flat over its states, which must not have other heads between them.
    **{(name, order): Code.LAYOUT_REFUSED
       for name in ("rocm planes", "cpu attention") for order in STATE_MAJOR},
    # Scales after all data of a page need the page in one piece, if the caller insists on them.
    **{("nvfp4 NHD", order): Code.LAYOUT_REFUSED for order in SPLIT_PAGES},
}  # fmt: skip
WHOLE_WITH_ONE_BLOCK = {(name, order) for name in ("flex attention", "sdpa") for order in ORDERS}


@pytest.mark.parametrize("case", list(CASES))
def test_every_element_is_where_the_backend_looks(case: str) -> None:
    for order, blocks in product(ORDERS, (1, 2, 3)):
        check_elements(case, order, blocks)


def check_elements(case: str, order: str, blocks: int) -> None:
    spec, adapter = CASES[case]
    try:
        made = spec_plan(spec, order, 16, blocks)
        guarded = Guarded(made)
        layer = guarded.cache["layers.1.attn"]
        views = adapter(layer)
    except AtlasError as refusal:
        assert refusal.code is REFUSED.get((case, order)), (refusal, case, order)
        assert blocks > 1 or (case, order) not in WHOLE_WITH_ONE_BLOCK
        return
    assert (case, order) not in REFUSED or (blocks == 1 and (case, order) in WHOLE_WITH_ONE_BLOCK)
    assert made.num_blocks == blocks
    layer.buffer.random_(0, 255, generator=torch.Generator().manual_seed(1))
    memory = layer.buffer.numpy()
    for field, (view, axes) in views.items():
        one_storage(guarded.cache, view)
        placed = layer.place(field)
        sizes = [placed.size(axis) for axis in axes]
        assert list(view.shape) == sizes
        for axis, stride in zip(axes, view.stride(), strict=True):
            assert placed.size(axis) == 1 or stride * placed.item == placed.stride(axis)
        every = np.indices(sizes).reshape(len(sizes), -1)
        starts = placed(**dict(zip(axes, every, strict=True)))
        expected = memory[starts[:, None] + np.arange(placed.item)]
        elements = view.contiguous().view(torch.uint8).numpy()
        assert np.array_equal(elements.reshape(expected.shape), expected), (order, blocks, field)


def test_kernels_that_want_contiguous_pages_get_them() -> None:
    """Where a backend ignores strides inside a block, its own packing has none to ignore."""
    tiled = Guarded(spec_plan(TILED, "LHBNC")).cache["layers.0.attn"]
    assert all(t[0].is_contiguous() for t in adapters.rocm_planes(tiled))
    grouped = Guarded(spec_plan(GROUPED, "LBHNC")).cache["layers.0.attn"]
    assert adapters.flashinfer_packed(grouped, "HND")[0].is_contiguous()
    fp4 = adapters.flashinfer_nvfp4(Guarded(spec_plan(FP4)).cache["layers.0.attn"])
    assert fp4.data[0, 0].is_contiguous()
    assert fp4.scales[0, 1].is_contiguous()
    assert fp4.scales.dtype is torch.float8_e4m3fn
    turned = adapters.cpu_attention(Guarded(spec_plan(TURNED)).cache["layers.0.attn"])
    assert turned.k[0, 0].is_contiguous()
    assert turned.v[0, 0].is_contiguous()


def filled(order: str) -> tuple[Any, Any, Any, Any]:
    """Two neighbouring blocks with 27 tokens of one sequence, in fp32."""
    spec = FullAttention(heads=2, head_dim=16, dtype="fp32")
    _, layer = cache_of(spec, order)
    generator = torch.Generator().manual_seed(4)
    k, v = (torch.randn(27, 2, 16, generator=generator) for _ in range(2))
    write(layer, k, v, 5 * 16 + torch.arange(27))
    q = torch.randn(3, 4, 16, generator=generator)
    out = attend(
        layer, q, tables=torch.tensor([[5, 6]]), lengths=torch.tensor([27]),
        queries=torch.tensor([3]),
    )  # fmt: skip
    return layer, q, out, torch.arange(27) <= torch.arange(24, 27).unsqueeze(1)


@pytest.mark.parametrize("order", ["LBNHC", "LHBNC"])
def test_torch_attends_to_the_views(order: str) -> None:
    """torch's own attention on views of the pool gives what the paged kernel gives."""
    layer, q, expected, mask = filled(order)
    k, v = (t[:, :, :27] for t in adapters.sdpa(layer, 5, 2))
    one_storage_of(layer, k, v)
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=mask, enable_gqa=True)
    assert torch.allclose(out[0].transpose(0, 1), expected, atol=1e-5)


@pytest.mark.parametrize("order", ["LBNHC", "LHBNC"])
def test_flex_attention_reads_the_views(order: str) -> None:
    """FlexAttention over the states of all blocks; a mask says which of them are the sequence's."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    layer, q, expected, _ = filled(order)
    k, v = (t.transpose(0, 1).unsqueeze(0) for t in adapters.flex_attention(layer))
    one_storage_of(layer, k, v)

    def sees(_b: Any, _h: Any, row: Any, slot: Any) -> Any:
        at = slot - 5 * 16
        return (at >= 0) & (at <= row + 24)

    mask = flex.create_block_mask(sees, None, None, 3, k.shape[2], device="cpu")
    out = flex.flex_attention(
        q.transpose(0, 1).unsqueeze(0), k, v, block_mask=mask, enable_gqa=True
    )
    assert torch.allclose(out[0].transpose(0, 1), expected, atol=1e-5)


def one_storage_of(layer: Any, *tensors: Any) -> None:
    home = layer.buffer.untyped_storage().data_ptr()
    assert all(tensor.untyped_storage().data_ptr() == home for tensor in tensors)


def test_an_adapter_of_another_packing_is_refused() -> None:
    dense = allocate(small_plan(SMALL["dense"]))["layers.0.attn"]
    sparse = allocate(spec_plan(LatentAttention(cache="fp8_ds_mla"), block=64))["layers.0.attn"]
    fp4 = allocate(spec_plan(FP4))["layers.0.attn"]
    for act, code in (
        (lambda: adapters.rocm_planes(dense), Code.BAD_AXES),
        (lambda: adapters.cpu_attention(dense), Code.NOT_CONTIGUOUS),
        (lambda: adapters.latent(dense), Code.UNKNOWN_FIELD),
        (lambda: adapters.scales(dense), Code.UNKNOWN_FIELD),
        (lambda: adapters.scales(fp4), Code.BAD_AXES),
        (lambda: adapters.latent(sparse), Code.NOT_CONTIGUOUS),
    ):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is code
    assert tuple(sparse.tensor.shape[1:]) == (1, 64, 656)
    with pytest.raises(AttributeError):
        _ = dense.latent
