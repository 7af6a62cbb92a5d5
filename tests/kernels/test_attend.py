"""Paged attention against dense attention written out, one query and one head at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code  # noqa: E402
from kvatlas.kernels import attend, attend_latent, decode, encode, write, write_latent  # noqa: E402
from kvatlas.specs import (  # noqa: E402
    ATTENTION_CACHES,
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    LatentAttention,
    SinkAttention,
    SlidingAttention,
)
from tests.guards import ORDERS, cache_of  # noqa: E402

LENGTHS = [37, 5, 20]
QUERIES = [4, 1, 20]
BASE: dict[str, Any] = {"heads": 2, "head_dim": 8, "dtype": "fp32"}


def slowly(q: Any, k: Any, v: Any, sees: Any, scale: float, sink: Any, cap: Any) -> Any:
    """Attention by its definition, in Python's own floats."""
    count, heads, _ = q.shape
    out = torch.zeros(count, heads, v.shape[-1])
    first = k.shape[0] - count
    for t in range(count):
        for h in range(heads):
            kv = h * k.shape[1] // heads
            weights, total = {}, 0.0
            for s in range(k.shape[0]):
                if not sees(first + t, s):
                    continue
                logit = float((q[t, h].double() * k[s, kv].double()).sum()) * scale
                if cap:
                    logit = cap * math.tanh(logit / cap)
                weights[s] = math.exp(logit)
                total += weights[s]
            if sink is not None:
                total += math.exp(float(sink[h]))
            for s, weight in weights.items():
                out[t, h] += weight / total * v[s, kv]
    return out


def batch(layer: Any, spec: Any, poison: bool = True) -> tuple[Any, Any, list[Any]]:
    """Three sequences with scattered blocks in a cache full of garbage."""
    generator = torch.Generator().manual_seed(1)
    layer.buffer.random_(0, 100) if poison else None
    blocks = torch.randperm(layer.k.shape[0], generator=generator)[:9].view(3, 3)
    rows = []
    for table, length in zip(blocks, LENGTHS, strict=True):
        k = torch.randn(length, spec.heads, spec.head_dim, generator=generator)
        v = torch.randn(length, spec.heads, spec.v_dim or spec.head_dim, generator=generator)
        at = torch.arange(length)
        write(layer, k, v, table[at // 16] * 16 + at % 16)
        rows.append((k, v))
    q = torch.randn(sum(QUERIES), 4, spec.head_dim, generator=generator)
    return q, blocks, rows


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "causal": (FullAttention(**BASE), lambda t, s: s <= t, {}),
    "window": (SlidingAttention(**BASE, window=7), lambda t, s: t - 7 < s <= t, {}),
    "chunks": (ChunkedAttention(**BASE, chunk=8), lambda t, s: s <= t and s // 8 == t // 8, {}),
    "unlike V": (FullAttention(**BASE, v_dim=4), lambda t, s: s <= t, {}),
    "softcap": (FullAttention(**BASE), lambda t, s: s <= t, {"softcap": 2.0}),
    "sinks": (FullAttention(**BASE), lambda t, s: s <= t, {"sink_logits": torch.randn(4)}),
    "tokens that stay": (
        SinkAttention(**BASE, sink_tokens=3, window=5),
        lambda t, s: s <= t and (s < 3 or s > t - 5),
        {},
    ),
    "sinks in a window": (
        SlidingAttention(**BASE, window=5),
        lambda t, s: t - 5 < s <= t,
        {"sink_logits": torch.randn(4)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("order", ORDERS)
def test_attention_is_what_its_definition_says(kind: str, order: str) -> None:
    spec, sees, more = KINDS[kind]
    guarded, layer = cache_of(spec, order)
    q, tables, rows = batch(layer, spec)
    out = attend(
        layer, q, tables=tables, lengths=torch.tensor(LENGTHS),
        queries=torch.tensor(QUERIES), **more,
    )  # fmt: skip
    start = 0
    for (k, v), count in zip(rows, QUERIES, strict=True):
        mine = q[start : start + count]
        expected = slowly(mine, k, v, sees, 8**-0.5, more.get("sink_logits"), more.get("softcap"))
        assert torch.allclose(out[start : start + count], expected, atol=1e-5)
        start += count
    guarded.check()


def test_blocks_out_of_reach_are_never_read() -> None:
    """A window's old blocks arrive as whatever: here as an id that does not exist."""
    spec = SlidingAttention(**BASE, window=5)
    _, layer = cache_of(spec, "LBNHC")
    q, tables, _ = batch(layer, spec)
    ask: dict[str, Any] = {"lengths": torch.tensor(LENGTHS), "queries": torch.tensor([4, 1, 1])}
    q = torch.cat((q[:5], q[-1:]))
    out = attend(layer, q, tables=tables, **ask)
    gone = tables.clone()
    gone[0, 0] = 10**6
    assert torch.equal(attend(layer, q, tables=gone, **ask), out)


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_quantised_caches_attend_to_what_they_hold(cache: str) -> None:
    spec = FullAttention(heads=2, head_dim=32, cache=cache)
    _, layer = cache_of(spec, "LBNHC" if cache.startswith("turbo") else "LBHNC")
    q, tables, rows = batch(layer, spec, poison=False)
    ask: dict[str, Any] = {"lengths": torch.tensor(LENGTHS), "queries": torch.tensor(QUERIES)}
    out = attend(layer, q, tables=tables, **ask)
    start = 0
    for (k, v), count in zip(rows, QUERIES, strict=True):
        mine = q[start : start + count]
        k, v = (decode(spec, s, encode(spec, s, x)) for s, x in (("k", k), ("v", v)))  # type: ignore[arg-type]
        expected = slowly(mine, k, v, lambda t, s: s <= t, 32**-0.5, None, None)
        assert torch.allclose(out[start : start + count], expected, atol=1e-4)
        start += count


PACKED = {
    "transposed": ("LBHNC", "BLHNC", "BHLNC", "LHBNC"),
    "tiled_planes": ("LBHNC", "LHBNC"),
    "planes": ORDERS,
    "head_groups": ORDERS,
}


@pytest.mark.parametrize(("packing", "order"), [(p, o) for p, os in PACKED.items() for o in os])
def test_other_packings_are_attended_to_where_they_lie(packing: Any, order: str) -> None:
    spec = FullAttention(**BASE, packing=packing)
    _, layer = cache_of(spec, order)
    q, tables, rows = batch(layer, spec)
    out = attend(
        layer, q, tables=tables, lengths=torch.tensor(LENGTHS),
        queries=torch.tensor(QUERIES),
    )  # fmt: skip
    start = 0
    for (k, v), count in zip(rows, QUERIES, strict=True):
        mine = q[start : start + count]
        expected = slowly(mine, k, v, lambda t, s: s <= t, 8**-0.5, None, None)
        assert torch.allclose(out[start : start + count], expected, atol=1e-5)
        start += count


def test_cross_attention_sees_all_of_the_encoder() -> None:
    """More queries than tokens, and no order between them."""
    spec = CrossAttention(**BASE, source=37)
    _, layer = cache_of(spec, "LBNHC", max_len=64)
    _, tables, rows = batch(layer, spec)
    counts = [2, 9, 1]
    q = torch.randn(sum(counts), 4, 8, generator=torch.Generator().manual_seed(3))
    out = attend(
        layer, q, tables=tables, lengths=torch.tensor(LENGTHS), queries=torch.tensor(counts)
    )
    start = 0
    for (k, v), count in zip(rows, counts, strict=True):
        mine = q[start : start + count]
        expected = slowly(mine, k, v, lambda t, s: True, 8**-0.5, None, None)  # noqa: ARG005
        assert torch.allclose(out[start : start + count], expected, atol=1e-5)
        start += count


@pytest.mark.parametrize("order", ORDERS)
def test_absorbed_latents(order: str) -> None:
    """Scores over latent and rotary part, values from the latent alone, one row for all heads."""
    spec = LatentAttention(latent=16, rope=8, dtype="fp32")
    guarded, layer = cache_of(spec, order)
    generator = torch.Generator().manual_seed(2)
    tables = torch.randperm(layer.latent.shape[0], generator=generator)[:9].view(3, 3)
    rows = [torch.randn(n, 24, generator=generator) for n in LENGTHS]
    for table, row in zip(tables, rows, strict=True):
        at = torch.arange(len(row))
        write_latent(layer, row[:, :16], row[:, 16:], table[at // 16] * 16 + at % 16)
    q = torch.randn(sum(QUERIES), 4, 24, generator=generator)
    out = attend_latent(
        layer, q, tables=tables, lengths=torch.tensor(LENGTHS),
        queries=torch.tensor(QUERIES), scale=0.2,
    )  # fmt: skip
    start = 0
    for row, count in zip(rows, QUERIES, strict=True):
        k, v = row.unsqueeze(1), row[:, :16].unsqueeze(1)
        mine = q[start : start + count]
        expected = slowly(mine, k, v, lambda t, s: s <= t, 0.2, None, None)
        assert torch.allclose(out[start : start + count], expected, atol=1e-5)
        start += count
    guarded.check()


# Sequences and tables, rows and queries, queries and tokens, tokens and blocks.
MISFITS = [([37, 5], [4, 1]), ([37, 5, 20], [4, 1, 19])]
MISFITS += [([3, 5, 20], [4, 1, 20]), ([49, 5, 20], [4, 1, 20])]


@pytest.mark.parametrize(("lengths", "queries"), MISFITS)
def test_batches_that_do_not_fit_are_refused(lengths: list[int], queries: list[int]) -> None:
    spec = FullAttention(**BASE)
    _, layer = cache_of(spec, "LBNHC")
    q, tables, _ = batch(layer, spec)
    with pytest.raises(AtlasError) as refusal:
        attend(
            layer, q, tables=tables, lengths=torch.tensor(lengths),
            queries=torch.tensor(queries),
        )  # fmt: skip
    assert refusal.value.code is Code.BAD_TENSOR


def test_starts_say_what_counts_say() -> None:
    spec = FullAttention(heads=2, head_dim=8, dtype="fp32")
    _, layer = cache_of(spec, "LBNHC")
    rows = torch.randn(60, 2, 8, generator=torch.Generator().manual_seed(1))
    write(layer, rows, rows, torch.arange(60))
    where = {"tables": torch.tensor([[0, 1], [2, 3]]), "lengths": torch.tensor([20, 28])}
    q, out = rows[:6].repeat(1, 2, 1), torch.full((6, 4, 8), 7.0)
    wanted = attend(layer, q[1:5], queries=torch.tensor([3, 1]), **where)
    found = attend(layer, q, starts=torch.tensor([1, 4, 5]), out=out, max_queries=3, **where)
    assert found is out
    assert torch.equal(out[1:5], wanted)
    assert (out[[0, 5]] == 7.0).all()
    for wrong in (
        {},
        {"starts": torch.tensor([1, 4, 7])},
        {"starts": torch.tensor([], dtype=torch.int32)},
        {"starts": torch.tensor([0])},
        {"starts": torch.tensor([0, 5, 6]), "queries": torch.tensor([5, 1])},
        {"starts": torch.tensor([0, 5, 6]), "out": out[:5]},
    ):
        with pytest.raises(AtlasError) as refusal:
            attend(layer, q, **{**where, **wrong})
        assert refusal.value.code is Code.BAD_TENSOR
