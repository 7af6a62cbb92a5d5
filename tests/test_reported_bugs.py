"""Wrong bytes that reached users of other projects, each as a test of geometry.

A test is named after the public report that it would have caught.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvatlas import AtlasError, Code, Layout, Placement, validate
from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.specs import FullAttention, GatedDeltaNet, Mamba2, ShortConv, Spec
from tests.cases import each
from tests.oracle import byte_list, coordinates


def test_vllm_42374_two_blocks_are_not_k_and_v() -> None:
    """`shape[0] == 2` was read as K and V; axes have names, so two blocks stay two blocks."""
    page = FullAttention(heads=2, head_dim=4).page(2)
    for blocks in (1, 2, 3):
        pool = page.place(Layout("LBHNC"), pages=1, blocks=blocks)
        k, v = page.view(pool, "k"), page.view(pool, "v")
        assert k.size("B") == v.size("B") == blocks
        assert sorted(byte_list(k) + byte_list(v)) == list(range(pool.nbytes))
    legacy = np.zeros((2, 2, 16, 4, 8), np.float16)
    with pytest.raises(TypeError):
        Placement.from_tensor(legacy)  # type: ignore[call-arg]
    planes = Placement.from_tensor(legacy, axes=("kv", "B", "N", "H", "C"))
    blocks_first = Placement.from_tensor(legacy, axes=("B", "kv", "N", "H", "C"))
    assert planes(kv=1, B=0, N=0, H=0, C=0) == blocks_first(B=1, kv=0, N=0, H=0, C=0)
    assert planes != blocks_first


@each(ENGINE_LAYOUTS)
def test_vllm_42374_views_of_k_and_v_never_copy(layout: Layout) -> None:
    """`.contiguous()` and `reshape(-1, ...)` copied the cache in every order but NHD."""
    page = FullAttention(heads=2, head_dim=4, dtype="fp16").page(4)
    pool = page.place(layout, pages=2, blocks=3)
    buffer = np.zeros(pool.stop, np.uint8)
    for name in ("k", "v"):
        seen = page.view(pool, name).select("L", 1).reorder("B", "N", "H", "C").view(buffer)
        assert np.shares_memory(seen, buffer)
        seen[2, 3, 1, 2] = 7
        at = page.view(pool, name)(L=1, B=2, N=3, H=1, C=2)
        assert buffer[at : at + 2].tolist() == [7, 7]
        buffer[:] = 0


@each(ENGINE_LAYOUTS)
def test_vllm_42374_v_strides_by_name_not_by_position(layout: Layout) -> None:
    """V's strides were passed as (position, element) instead of (element, position)."""
    page = FullAttention(heads=3, head_dim=4, dtype="fp16").page(5)
    pool = page.place(layout, pages=2, blocks=3)
    v = page.view(pool, "v").select("L", 1)
    transposed = v.reorder("B", "H", "C", "N")
    assert transposed.stride("N") == v.stride("N") != transposed.stride("C") == 2
    for c in coordinates({"B": 3, "H": 3, "N": 5, "C": 4}):
        assert transposed(**c) == v(**c)


def test_vllm_42374_block_size_is_the_state_axis_not_the_third() -> None:
    """`shape[2]` was taken for the block size where it was the head size."""
    page = FullAttention(heads=3, head_dim=128).page(16)
    v = page.view(page.place(Layout("LBHNC"), pages=1, blocks=2), "v").reorder(*"LBHCN")
    assert v.sizes[3] == 128
    assert v.size("N") == 16
    with pytest.raises(AtlasError) as refusal:
        v(B=1, H=0, C=0, N=16)
    assert refusal.value.code is Code.OUT_OF_RANGE


def test_vllm_44456_a_sliced_and_transposed_cache_is_still_a_view() -> None:
    """`.view()` on a sliced and transposed cache crashed; here it is another placement."""
    page = FullAttention(heads=4, head_dim=8, dtype="fp16").page(4)
    pool = page.place(Layout("LBHNC"), pages=1, blocks=3)
    k = page.view(pool, "k").narrow("H", 1, 2).reorder("L", "B", "N", "H", "C")
    tiled = k.split("C", into=("x", "c"), inner=4)
    for c in coordinates({"L": 1, "B": 3, "N": 4, "H": 2, "C": 8}):
        at = {**c, "x": c["C"] // 4, "c": c["C"] % 4}
        del at["C"]
        assert tiled(**at) == page.view(pool, "k")(**{**c, "H": c["H"] + 1})
    with pytest.raises(AtlasError) as refusal:
        k.fold("N", "H")
    assert refusal.value.code is Code.NOT_FOLDABLE


def test_vllm_44456_a_recurrent_page_is_one_tensor_that_the_layer_unpacks() -> None:
    spec = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=3, value_dim=2, ssm_dtype="fp32")
    page = spec.page(16)
    pool = page.place(Layout("BLHNC"), pages=2, blocks=3)
    assert pool.sizes == (2, 3, 1, 1, page.content)
    conv, ssm = page.view(pool, "conv"), page.view(pool, "ssm")
    assert (conv.item, ssm.item) == (2, 4)
    assert sorted(byte_list(conv) + byte_list(ssm)) == list(range(pool.nbytes))


def test_vllm_35703_strides_belong_to_the_axes_they_were_computed_for() -> None:
    """Strides of (blocks, 2, ...) were applied to a (2, blocks, ...) shape."""
    sizes = {"kv": 2, "B": 5, "N": 4, "H": 2, "C": 8}
    blocks_first = Placement.packed([(a, sizes[a]) for a in ("B", "kv", "N", "H", "C")])
    named = blocks_first.reorder("kv", "B", "N", "H", "C")
    assert sorted(byte_list(named)) == list(range(2 * 5 * 4 * 2 * 8))
    with pytest.raises(AtlasError) as refusal:
        Placement(named.axes, tuple(sizes.values()), blocks_first.strides)
    assert refusal.value.code is Code.OVERLAP


@each(product([1, 2, 4], ["BLNHC", "BLHNC", "BHLNC"]))
def test_vllm_35703_layers_packed_into_one_page_stay_apart(pack: int, order: str) -> None:
    """A pack is extra pages: [page, H, N, C] or, head-major, [H, page, N, C] in each block."""
    page = FullAttention(heads=2, head_dim=4).page(8 // pack)
    pool = page.place(Layout(order), pages=pack, blocks=3)
    layers = {f"layer {i}": pool.select("L", i) for i in range(pack)}
    validate(layers, size=pool.nbytes)
    assert pool.nbytes == 3 * FullAttention(heads=2, head_dim=4).page_bytes(8)


@each(
    (spec, tp)
    for spec in (
        Mamba2(heads=4, head_dim=2, groups=4, state_size=3),
        Mamba2(heads=4, head_dim=2, groups=1, state_size=3),
        GatedDeltaNet(key_heads=4, value_heads=8, key_dim=3, value_dim=2),
    )
    for tp in (2, 4)
)
def test_vllm_55208_sglang_23746_conv_is_cut_section_by_section(spec: Spec, tp: int) -> None:
    """The conv state was cut as one slab, so ranks got rows of the wrong section."""
    if isinstance(spec, Mamba2):
        sections = [
            np.arange(8).reshape(4, 2),
            8 + np.arange(spec.groups * 3).reshape(spec.groups, 3),
            8 + spec.groups * 3 + np.arange(spec.groups * 3).reshape(spec.groups, 3),
        ]
    else:
        sections = [
            np.arange(12).reshape(4, 3),
            12 + np.arange(12).reshape(4, 3),
            24 + np.arange(16).reshape(8, 2),
        ]
    for rank in range(tp):
        expected: list[int] = []
        for section in sections:
            units = len(section)
            mine = np.array_split(section, tp)[rank] if units % tp == 0 else section[[0]]
            expected += mine.ravel().tolist()
        pieces = spec.shard(tp, rank)["conv"]
        assert [r for p in pieces for r in range(p.start, p.start + p.length)] == expected
        slab = sum(section.size for section in sections) // tp
        assert expected != list(range(rank * slab, (rank + 1) * slab))


def test_vllm_52516_replicated_heads_are_whole_on_every_rank() -> None:
    """With 2 kv heads at tp 8 three quarters of the bytes were never sent."""
    spec = FullAttention(heads=2, head_dim=128)
    held = [spec.shard(8, rank)["k"][0] for rank in range(8)]
    assert [piece.start for piece in held] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(piece.length == 1 for piece in held)
    assert spec.page(16, tp=8).nbytes * 2 == spec.page(16).nbytes
    assert spec.replicas(8) == 4


def test_lmcache_4358_unlike_head_dims_in_one_model() -> None:
    """Gemma-4 mixes head sizes; shape guessing broke. Each page knows its own."""
    sliding = FullAttention(heads=8, head_dim=4).page(4)
    full = FullAttention(heads=2, head_dim=8).page(4)
    assert sliding.nbytes != full.nbytes
    block = 2 * sliding.nbytes + full.nbytes
    small = sliding.place(Layout("BLHNC"), pages=2, blocks=3, block_stride=block)
    large = full.place(
        Layout("BLHNC"), pages=1, blocks=3, block_stride=block, offset=2 * sliding.nbytes
    )
    validate({"sliding": small, "full": large}, size=3 * block)
    assert (sliding.view(small, "v").size("C"), full.view(large, "v").size("C")) == (4, 8)


def test_vllm_ascend_15408_a_block_larger_than_the_state_is_refused() -> None:
    """A larger block made attention overwrite the recurrent state in the same page."""
    state = ShortConv(width=64, kernel=4).page(1)
    attention = FullAttention(heads=1, head_dim=16)
    fits = max(n for n in range(1, 64) if attention.page_bytes(n) <= state.nbytes)
    assert attention.page(fits).padded(state.nbytes).nbytes == state.nbytes
    with pytest.raises(AtlasError) as refusal:
        attention.page(fits + 1).padded(state.nbytes)
    assert refusal.value.code is Code.PAGE_TOO_SMALL
    unified = attention.page_bytes(fits + 1)
    assert state.padded(unified).nbytes == unified


def test_vllm_49011_nvfp4_is_head_groups_and_never_k_beside_v() -> None:
    """Packing K and V into the content turned nvfp4 caches into garbage."""
    with pytest.raises(AtlasError) as refusal:
        FullAttention(heads=4, head_dim=32, cache="nvfp4", packing="cells")
    assert refusal.value.code is Code.BAD_SPEC
    page = FullAttention(heads=4, head_dim=32, cache="nvfp4", scales="inline").page(2)
    assert [page.field(name).head for name in ("k", "k_scale", "v", "v_scale")] == [0, 0, 4, 4]
    page = FullAttention(heads=4, head_dim=32, cache="nvfp4").page(2)
    starts = [page.field(name).offset for name in ("k", "k_scale", "v", "v_scale")]
    assert starts == [0, 4 * 2 * 16, 4 * 2 * 18, 4 * 2 * (18 + 16)]


def test_vllm_cpu_block_64_to_128_two_pages_are_not_one_page() -> None:
    """K is transposed inside a head's page, so joining pages byte by byte is wrong."""
    spec = FullAttention(heads=1, head_dim=4, dtype="fp16", packing="transposed")
    half, whole = spec.page(4), spec.page(8)
    two = half.place(Layout("LBHNC"), pages=1, blocks=2)
    one = whole.place(Layout("LBHNC"), pages=1, blocks=1)
    assert two.nbytes == one.nbytes
    k2, k1 = half.view(two, "k"), whole.view(one, "k")
    moved = [
        k2(B=n // 4, H=0, N=n % 4, C=d) != k1(B=0, H=0, N=n, C=d)
        for n, d in product(range(8), range(4))
    ]
    assert any(moved)
    split = k1.split("N", into=("B2", "N"), inner=4)
    assert split.size("B2") == k2.size("B")
