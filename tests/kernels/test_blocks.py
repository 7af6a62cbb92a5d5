"""Rows and blocks in and out of pages, in every order, and nothing else touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code
from kvatlas.cache import allocate
from kvatlas.kernels import copy_blocks, decode, encode, gather_blocks, read, write, zero_blocks
from kvatlas.specs import ATTENTION_CACHES, FullAttention
from tests.guards import ORDERS, Guarded, cache_of, small_plan
from tests.planning.models import SMALL


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_what_is_written_is_read(cache: str) -> None:
    spec = FullAttention(heads=4, head_dim=32, cache=cache)
    for order in ["LBNHC"] if cache.startswith("turboquant") else ORDERS:
        guarded, layer = cache_of(spec, order)
        generator = torch.Generator().manual_seed(11)
        k, v = (torch.randn(40, 4, 32, generator=generator) for _ in range(2))
        slots = torch.randperm(layer.k.shape[0] * 16, generator=generator)[:40]
        slots[5] = -1
        write(layer, k, v, slots)
        kept = slots >= 0
        for side, rows, got in zip("kv", (k, v), read(layer, slots[kept]), strict=True):
            expected = decode(spec, side, encode(spec, side, rows[kept]))  # type: ignore[arg-type]
            assert torch.equal(got, expected), order
        assert layer.tensor.any()
        assert not any(guarded.cache[f"layers.{i}.attn"].tensor.any() for i in (0, 2)), order
        guarded.check()


@pytest.mark.parametrize("source", ORDERS)
def test_blocks_are_copied_across_orders(source: str) -> None:
    spec = FullAttention(heads=4, head_dim=8)
    a, first = cache_of(spec, source)
    first.k.copy_(torch.randn(first.k.shape))
    first.v.copy_(torch.randn(first.v.shape))
    ids, places = torch.tensor([5, 0, 7]), torch.tensor([2, 9, 3])
    for target in ORDERS:
        b, second = cache_of(spec, target)
        copy_blocks(first, ids, second, places)
        assert torch.equal(second.k[places], first.k[ids]), target
        assert torch.equal(second.v[places], first.v[ids]), target
        rest = torch.ones(second.k.shape[0], dtype=torch.bool)
        rest[places] = False
        assert not second.tensor[rest].any(), target
        b.check()
    a.check()


WAYS = {
    "scattered": ([5, 0, 7, 19], [2, 9, 3, 14]),
    "one": ([4], [11]),
    "gathered": ([17, 3, 9, 1, 20, 2], [5, 6, 7, 8, 9, 10]),
    "dealt out": ([5, 6, 7, 8, 9, 10], [17, 3, 9, 1, 20, 2]),
    "neighbours": (list(range(3, 13)), list(range(9, 19))),
    "two stretches": ([3, 4, 5, 6, 7, 15, 16, 17, 18], [10, 11, 12, 13, 14, 1, 2, 3, 4]),
}
SPECS: dict[str, FullAttention] = {
    "small": FullAttention(heads=1, head_dim=8),
    "large": FullAttention(heads=2, head_dim=64, dtype="fp32"),
    "nvfp4": FullAttention(heads=2, head_dim=32, cache="nvfp4"),
    "unlike": FullAttention(heads=3, head_dim=6, v_dim=10),
}


@pytest.mark.parametrize("kind", list(SPECS))
@pytest.mark.parametrize("source", ORDERS)
def test_every_way_of_moving_blocks(source: str, kind: str) -> None:
    """Every field of every block arrives, and no other byte of the target changes."""
    _, first = cache_of(SPECS[kind], source)
    first.buffer.random_(0, 255, generator=torch.Generator().manual_seed(1))
    for target in ("LBHNC", "LBNHC", "BHLNC"):
        _, second = cache_of(SPECS[kind], target)
        second.buffer.random_(0, 255, generator=torch.Generator().manual_seed(2))
        garbage = second.buffer.clone()
        for way, ends in WAYS.items():
            ids, places = (torch.tensor(end) for end in ends)
            second.buffer.copy_(garbage)
            copy_blocks(first, ids, second, places)
            assert torch.equal(second.buffer, copied(first, ids, second, places, garbage)), (
                target,
                way,
            )


def copied(first: Any, ids: Any, second: Any, places: Any, garbage: Any) -> Any:
    """The target's bytes after a copy, by the address of every element."""
    expected = garbage.clone()
    for name in first.fields:
        a, b, item = first.place(name), second.place(name), first.place(name).item
        every = np.indices((len(ids), *a.sizes[1:], item)).reshape(len(a.axes) + 1, -1)
        inside = dict(zip(a.axes[1:], every[1:-1], strict=True))
        blocks = [end.numpy()[every[0]] for end in (ids, places)]
        bytes_of = first.buffer[a(B=blocks[0], **inside) + every[-1]]
        expected[b(B=blocks[1], **inside) + every[-1]] = bytes_of
    return expected


def test_blocks_are_copied_into_tiles_and_back() -> None:
    plain = FullAttention(heads=2, head_dim=32)
    tiled = FullAttention(heads=2, head_dim=32, packing="tiled_planes")
    ids, places = torch.tensor([5, 0, 7]), torch.tensor([2, 9, 3])
    for a, b in ((plain, tiled), (tiled, plain)):
        first, second = cache_of(a, "LBHNC")[1], cache_of(b, "LBHNC")[1]
        k, v = torch.randn(2, 16 * 24, 2, 32).bfloat16()
        write(first, k, v, torch.arange(16 * 24))
        copy_blocks(first, ids, second, places)
        at = torch.arange(16)
        for i, j in zip(ids, places, strict=True):
            for one, other in zip(read(first, i * 16 + at), read(second, j * 16 + at), strict=True):
                assert torch.equal(one, other)


def test_blocks_are_gathered_in_the_order_of_their_pages() -> None:
    for order in ORDERS:
        _, layer = cache_of(FullAttention(heads=4, head_dim=8), order)
        layer.buffer.random_(0, 255)
        for ids in ([5, 0, 7, 19], [4], [3, 4, 5, 6], []):
            rows = gather_blocks(layer, torch.tensor(ids, dtype=torch.long))
            assert torch.equal(rows, layer.tensor[ids]), order
            if ids:
                assert gather_blocks(layer, torch.tensor(ids), out=rows.zero_()) is rows
                assert torch.equal(rows, layer.tensor[ids]), order
        other = torch.empty(3, 4, 16, 32, dtype=torch.uint8)
        with pytest.raises(AtlasError) as refusal:
            gather_blocks(layer, torch.tensor([1, 2]), out=other)
        assert refusal.value.code is Code.BAD_TENSOR


def test_a_block_that_changes_hands_shows_nothing_old() -> None:
    """Groups overlay one pool: what one leaves in a block the next one must not read."""
    for order in ORDERS:
        guarded = Guarded(small_plan(SMALL["sliding"], layout=order))
        old, new = guarded.cache["layers.0.attn"], guarded.cache["layers.1.attn"]
        old.k.fill_(3.0)
        assert (new.k[4] == 3).all(), order
        zero_blocks(new, torch.tensor([4]))
        assert not new.tensor[4].any(), order
        assert (new.tensor[3] != 0).any(), order
        guarded.check()


def test_what_cannot_be_is_refused() -> None:
    layer = allocate(small_plan(SMALL["dense"]))["layers.0.attn"]
    rows = torch.zeros(1, 4, 8)
    count = layer.k.shape[0]
    for act in (
        lambda: write(layer, rows, rows, torch.tensor([count * 16])),
        lambda: read(layer, torch.tensor([-1])),
        lambda: zero_blocks(layer, torch.tensor([count])),
        lambda: copy_blocks(layer, torch.tensor([0]), layer, torch.tensor([count])),
    ):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is Code.OUT_OF_RANGE
    for ids, places in (([0, 1], [1, 2]), ([0, 1], [5, 5])):
        with pytest.raises(AtlasError) as refusal:
            copy_blocks(layer, torch.tensor(ids), layer, torch.tensor(places))
        assert refusal.value.code is Code.OVERLAP
    with pytest.raises(AtlasError) as refusal:
        copy_blocks(layer, torch.tensor([0, 1]), layer, torch.tensor([2]))
    assert refusal.value.code is Code.UNLIKE_PLACEMENTS
