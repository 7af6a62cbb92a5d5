"""Rows and blocks in and out of pages, in every order, and nothing else touched."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code  # noqa: E402
from kvatlas.cache import allocate  # noqa: E402
from kvatlas.kernels import copy_blocks, decode, encode, read, write, zero_blocks  # noqa: E402
from kvatlas.specs import ATTENTION_CACHES, FullAttention  # noqa: E402
from tests.guards import ORDERS, Guarded, cache_of, small_plan  # noqa: E402
from tests.plan.models import SMALL  # noqa: E402


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
    write(layer, spec, k, v, slots)
    kept = slots >= 0
    found = read(layer, spec, slots[kept])
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


def test_nothing_like_the_whole_cache_is_allocated() -> None:
    """Moving 8 rows through a cache of megabytes takes kilobytes."""
    spec = FullAttention(heads=4, head_dim=32)
    _, layer = cache_of(spec, "BHLNC")
    whole = layer.buffer.numel()
    slots = torch.arange(8) * 3
    rows = torch.randn(8, 4, 32)
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        write(layer, spec, rows, rows, slots)
        read(layer, spec, slots)
        zero_blocks(layer, torch.tensor([1, 2]))
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in seen.key_averages())
    assert 0 < taken < whole / 20


def test_what_cannot_be_is_refused() -> None:
    spec = FullAttention(heads=4, head_dim=8)
    layer = allocate(small_plan(SMALL["dense"]))["layers.0.attn"]
    rows = torch.zeros(1, 4, 8)
    count = layer.k.shape[0]
    for act in (
        lambda: write(layer, spec, rows, rows, torch.tensor([count * 16])),
        lambda: read(layer, spec, torch.tensor([-1])),
        lambda: zero_blocks(layer, torch.tensor([count])),
        lambda: copy_blocks(layer, torch.tensor([0]), layer, torch.tensor([count])),
    ):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is Code.OUT_OF_RANGE
    with pytest.raises(AtlasError) as refusal:
        copy_blocks(layer, torch.tensor([0, 1]), layer, torch.tensor([2]))
    assert refusal.value.code is Code.UNLIKE_PLACEMENTS
