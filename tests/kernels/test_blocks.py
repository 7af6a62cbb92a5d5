"""Rows and blocks in and out of pages, in every order, and nothing else touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code  # noqa: E402
from kvatlas.cache import allocate  # noqa: E402
from kvatlas.kernels import copy_blocks, decode, encode, gather_blocks, read, write, zero_blocks  # noqa: E402
from kvatlas.specs import ATTENTION_CACHES, FullAttention  # noqa: E402
from tests.guards import ORDERS, Guarded, cache_of, small_plan  # noqa: E402
from tests.planning.models import SMALL  # noqa: E402


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_what_is_written_is_read(order: str, cache: str) -> None:
    scales: Any = "inline" if cache == "nvfp4" else None
    spec = FullAttention(heads=4, head_dim=32, cache=cache, scales=scales)
    backend = "TURBOQUANT" if cache.startswith("turboquant") else None
    if backend and order != "LBNHC":
        return
    guarded, layer = cache_of(spec, order)
    generator = torch.Generator().manual_seed(11)
    k, v = (torch.randn(40, 4, 32, generator=generator) for _ in range(2))
    slots = torch.randperm(layer.k.shape[0] * 16, generator=generator)[:40]
    slots[5] = -1
    write(layer, k, v, slots)
    kept = slots >= 0
    found = read(layer, slots[kept])
    for side, rows, got in (("k", k, found[0]), ("v", v, found[1])):
        expected = decode(spec, side, encode(spec, side, rows[kept]))  # type: ignore[arg-type]
        assert torch.equal(got, expected)
    used = int((layer.tensor != 0).sum())
    others = sum(
        int((guarded.cache[name].tensor != 0).sum()) for name in ("layers.0.attn", "layers.2.attn")
    )
    assert used > 0
    assert others == 0
    guarded.check()


@pytest.mark.parametrize("source", ORDERS)
@pytest.mark.parametrize("target", ORDERS)
def test_blocks_are_copied_across_orders(source: str, target: str) -> None:
    spec = FullAttention(heads=4, head_dim=8)
    a, first = cache_of(spec, source)
    b, second = cache_of(spec, target)
    first.k.copy_(torch.randn(first.k.shape))
    first.v.copy_(torch.randn(first.v.shape))
    ids, places = torch.tensor([5, 0, 7]), torch.tensor([2, 9, 3])
    copy_blocks(first, ids, second, places)
    assert torch.equal(second.k[places], first.k[ids])
    assert torch.equal(second.v[places], first.v[ids])
    rest = torch.ones(second.k.shape[0], dtype=torch.bool)
    rest[places] = False
    assert not second.tensor[rest].any()
    a.check()
    b.check()


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


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("kind", list(SPECS))
@pytest.mark.parametrize("source", ORDERS)
@pytest.mark.parametrize("target", ["LBHNC", "LBNHC", "BHLNC"])
def test_every_way_of_moving_blocks(source: str, target: str, kind: str, way: str) -> None:
    """Every field of every block arrives, and no other byte of the target changes."""
    spec = SPECS[kind]
    if kind == "nvfp4" and ("BHLNC" in (source, target) or source == "LHBNC"):
        return  # pages in pieces are refused: see the adapters
    (_, first), (_, second) = cache_of(spec, source), cache_of(spec, target)
    first.buffer.random_(0, 255, generator=torch.Generator().manual_seed(1))
    second.buffer.random_(0, 255, generator=torch.Generator().manual_seed(2))
    ids, places = (torch.tensor(side) for side in WAYS[way])
    expected = second.buffer.clone()
    for name in first.fields:
        a, b, item = first.place(name), second.place(name), first.place(name).item
        every = np.indices(a.sizes[1:]).reshape(len(a.axes) - 1, -1)
        inside = dict(zip(a.axes[1:], every, strict=True))
        for i, j in zip(ids.tolist(), places.tolist(), strict=True):
            for n in range(item):
                block = first.buffer[a(B=i, **inside) + n]
                expected[b(B=j, **inside) + n] = block
    copy_blocks(first, ids, second, places)
    assert torch.equal(second.buffer, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_are_gathered_in_the_order_of_their_pages(order: str) -> None:
    _, layer = cache_of(FullAttention(heads=4, head_dim=8), order)
    layer.buffer.random_(0, 255)
    for ids in ([5, 0, 7, 19], [4], [3, 4, 5, 6], []):
        found = gather_blocks(layer, torch.tensor(ids, dtype=torch.long))
        assert torch.equal(found, layer.tensor[ids])
        if ids:
            assert gather_blocks(layer, torch.tensor(ids), out=found.zero_()) is found
            assert torch.equal(found, layer.tensor[ids])
    with pytest.raises(AtlasError) as refusal:
        gather_blocks(layer, torch.tensor([1, 2]), out=torch.empty(3, 4, 16, 32, dtype=torch.uint8))
    assert refusal.value.code is Code.BAD_TENSOR


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_that_changes_hands_shows_nothing_old(order: str) -> None:
    """Groups overlay one pool: what one leaves in a block the next one must not read."""
    made = small_plan(SMALL["sliding"], layout=order)
    guarded = Guarded(made)
    old, new = guarded.cache["layers.0.attn"], guarded.cache["layers.1.attn"]
    old.k.fill_(3.0)
    assert (new.k[4] == 3).all()
    zero_blocks(new, torch.tensor([4]))
    assert not new.tensor[4].any()
    assert (new.tensor[3] != 0).any()
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
