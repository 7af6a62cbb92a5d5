"""Paged attention against dense attention written out, one query and one head at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code
from kvatlas.kernels import (
    attend,
    attend_latent,
    decode,
    encode,
    read_latent,
    write,
    write_latent,
)
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
from tests.guards import ORDERS, cache_of

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


Sequences = list[tuple[Any, Any]]
"""K and V of each sequence."""


def rows_of(spec: Any) -> tuple[Any, Sequences]:
    """Queries, and K and V of three sequences."""
    generator = torch.Generator().manual_seed(1)
    dims = spec.head_dim, spec.v_dim or spec.head_dim
    rows = [
        tuple(torch.randn(length, spec.heads, dim, generator=generator) for dim in dims)
        for length in LENGTHS
    ]
    return torch.randn(sum(QUERIES), 4, spec.head_dim, generator=generator), rows


def cached(spec: Any, order: str, rows: Sequences, poison: bool = True, **more: Any) -> Any:
    """A guarded layer full of garbage with the sequences in scattered blocks, and their tables."""
    guarded, layer = cache_of(spec, order, **more)
    generator = torch.Generator().manual_seed(1)
    if poison:
        layer.buffer.random_(0, 100)
    tables = torch.randperm(layer.k.shape[0], generator=generator)[:9].view(3, 3)
    for table, (k, v) in zip(tables, rows, strict=True):
        at = torch.arange(len(k))
        write(layer, k, v, table[at // 16] * 16 + at % 16)
    return guarded, layer, tables


def exactly(
    q: Any, rows: Sequences, sees: Any, scale: float, more: Any = None, counts: Any = QUERIES
) -> Any:
    """What a batch gives by the definition of attention."""
    more = more or {}
    return torch.cat([
        slowly(mine, k, v, sees, scale, more.get("sink_logits"), more.get("softcap"))
        for mine, (k, v) in zip(q.split(counts), rows, strict=True)
    ])  # fmt: skip


BATCH = {"lengths": torch.tensor(LENGTHS), "queries": torch.tensor(QUERIES)}


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
def test_attention_is_what_its_definition_says(kind: str) -> None:
    spec, sees, more = KINDS[kind]
    q, rows = rows_of(spec)
    expected = exactly(q, rows, sees, 8**-0.5, more)
    for order in ORDERS:
        guarded, layer, tables = cached(spec, order, rows)
        out = attend(layer, q, tables=tables, **BATCH, **more)
        assert torch.allclose(out, expected, atol=1e-5), order
        guarded.check()


def test_blocks_out_of_reach_are_never_read() -> None:
    """A window's old blocks arrive as whatever: here as an id that does not exist."""
    spec = SlidingAttention(**BASE, window=5)
    q, rows = rows_of(spec)
    _, layer, tables = cached(spec, "LBNHC", rows)
    batch: dict[str, Any] = {"lengths": BATCH["lengths"], "queries": torch.tensor([4, 1, 1])}
    q = torch.cat((q[:5], q[-1:]))
    out = attend(layer, q, tables=tables, **batch)
    gone = tables.clone()
    gone[0, 0] = 10**6
    assert torch.equal(attend(layer, q, tables=gone, **batch), out)


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_quantised_caches_attend_to_what_they_hold(cache: str) -> None:
    spec = FullAttention(heads=2, head_dim=32, cache=cache)
    q, rows = rows_of(spec)
    order = "LBNHC" if cache.startswith("turbo") else "LBHNC"
    _, layer, tables = cached(spec, order, rows, poison=False)
    held: Any = [
        tuple(decode(spec, s, encode(spec, s, x)) for s, x in (("k", k), ("v", v)))  # type: ignore[arg-type]
        for k, v in rows
    ]
    expected = exactly(q, held, lambda t, s: s <= t, 32**-0.5)
    assert torch.allclose(attend(layer, q, tables=tables, **BATCH), expected, atol=1e-4)


PACKED = {
    "transposed": ("LBHNC", "BLHNC", "BHLNC", "LHBNC"),
    "tiled_planes": ("LBHNC", "LHBNC"),
    "planes": ORDERS,
    "head_groups": ORDERS,
}


def test_other_packings_are_attended_to_where_they_lie() -> None:
    q, rows = rows_of(FullAttention(**BASE))
    expected = exactly(q, rows, lambda t, s: s <= t, 8**-0.5)
    for packing, orders in PACKED.items():
        for order in orders:
            _, layer, tables = cached(FullAttention(**BASE, packing=packing), order, rows)  # type: ignore[arg-type]
            out = attend(layer, q, tables=tables, **BATCH)
            assert torch.allclose(out, expected, atol=1e-5), (packing, order)


def test_cross_attention_sees_all_of_the_encoder() -> None:
    """More queries than tokens, and no order between them."""
    spec = CrossAttention(**BASE, source=37)
    _, rows = rows_of(spec)
    _, layer, tables = cached(spec, "LBNHC", rows, max_len=64)
    counts = [2, 9, 1]
    q = torch.randn(sum(counts), 4, 8, generator=torch.Generator().manual_seed(3))
    out = attend(layer, q, tables=tables, lengths=BATCH["lengths"], queries=torch.tensor(counts))
    expected = exactly(q, rows, lambda t, s: True, 8**-0.5, counts=counts)  # noqa: ARG005
    assert torch.allclose(out, expected, atol=1e-5)


def test_absorbed_latents() -> None:
    """Scores over latent and rotary part, values from the latent alone, one row for all heads."""
    spec = LatentAttention(latent=16, rope=8, dtype="fp32")
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(n, 24, generator=generator) for n in LENGTHS]
    q = torch.randn(sum(QUERIES), 4, 24, generator=generator)
    held = [(row.unsqueeze(1), row[:, :16].unsqueeze(1)) for row in rows]
    expected = exactly(q, held, lambda t, s: s <= t, 0.2)
    for order in ORDERS:
        guarded, layer = cache_of(spec, order)
        tables = torch.randperm(layer.latent.shape[0], generator=generator)[:9].view(3, 3)
        for table, row in zip(tables, rows, strict=True):
            at = torch.arange(len(row))
            write_latent(layer, row[:, :16], row[:, 16:], table[at // 16] * 16 + at % 16)
        out = attend_latent(layer, q, tables=tables, scale=0.2, **BATCH)
        assert torch.allclose(out, expected, atol=1e-5), order
        guarded.check()


SPARSE_CACHES: list[dict[str, Any]] = [
    {"latent": 16, "rope": 8, "dtype": "fp32"}, {"latent": 16, "rope": 8, "cache": "fp8"},
    {"latent": 128, "rope": 16, "cache": "fp8_ds_mla"},
    {"latent": 64, "rope": 16, "cache": "nvfp4_ds_mla"},
    {"latent": 64, "rope": 16, "cache": "fp8_ds_mla", "version": "v4"},
]  # fmt: skip


@pytest.mark.parametrize("form", SPARSE_CACHES)
@pytest.mark.parametrize("order", ORDERS)
def test_queries_attend_to_selected_tokens(form: dict[str, Any], order: str) -> None:
    """Against float64 over the stored rows; positions that a query does not see are ignored."""
    spec = LatentAttention(**form)
    generator = torch.Generator().manual_seed(2)
    width = spec.latent + spec.rope
    guarded, layer = cache_of(spec, order)
    blocks, states = (layer.kernel_blocks.size(axis) for axis in "BN")
    tables = torch.randperm(blocks, generator=generator)
    tables = tables[: blocks // 3 * 3].view(3, -1)
    held = []
    for table, length in zip(tables, LENGTHS, strict=True):
        at, row = torch.arange(length), torch.randn(length, width, generator=generator)
        slots = table[at // states] * states + at % states
        write_latent(layer, row[:, : spec.latent], row[:, spec.latent :], slots)
        held.append([part.double() for part in read_latent(layer, slots)])
    q = torch.randn(sum(QUERIES), 4, width, generator=generator)
    indices = torch.stack([torch.randperm(44, generator=generator)[:7] for _ in q]) - 4
    indices[3] = torch.tensor([-1, 40, 41, 42, -3, 43, 37])
    out = attend_latent(layer, q, tables=tables, scale=0.2, indices=indices, **BATCH)
    row = seen = 0
    for (value, rope), length, count in zip(held, LENGTHS, QUERIES, strict=True):
        for position in range(length - count, length):
            own = [int(at) for at in indices[row] if 0 <= at <= position]
            logits = q[row].double() @ torch.cat((value, rope), -1)[own].T * 0.2
            error = (out[row].double() - logits.softmax(-1) @ value[own]).abs().max()
            assert float(error) < 1e-5, (row, own)
            row, seen = row + 1, seen + len(own)
    assert not out[3].any()
    assert 0 < seen < indices.numel()
    guarded.check()


def test_indices_that_do_not_fit_are_refused() -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(sum(QUERIES), 4, 24, generator=generator)
    for spec, indices in (
        (LatentAttention(latent=16, rope=8), torch.zeros(len(q) + 1, 3, dtype=torch.int64)),
        (LatentAttention(latent=16, rope=8), torch.zeros(len(q), dtype=torch.int64)),
        (LatentAttention(latent=16, rope=8), torch.zeros(len(q), 3)),
        (
            SlidingLatentAttention(latent=16, rope=8, window=9),
            torch.zeros(len(q), 3, dtype=torch.int64),
        ),
    ):
        _, layer = cache_of(spec, "LBNHC")
        tables = torch.arange(9).view(3, 3)
        with pytest.raises(AtlasError) as refusal:
            attend_latent(layer, q, tables=tables, scale=0.2, indices=indices, **BATCH)
        assert refusal.value.code in (Code.BAD_TENSOR, Code.NOT_AN_INTEGER)


# Sequences and tables, rows and queries, queries and tokens, tokens and blocks.
MISFITS = [([37, 5], [4, 1]), ([37, 5, 20], [4, 1, 19])]
MISFITS += [([3, 5, 20], [4, 1, 20]), ([49, 5, 20], [4, 1, 20])]


def test_batches_that_do_not_fit_are_refused() -> None:
    spec = FullAttention(**BASE)
    q, rows = rows_of(spec)
    _, layer, tables = cached(spec, "LBNHC", rows)
    for lengths, queries in MISFITS:
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
    assert attend(layer, q, starts=torch.tensor([1, 4, 5]), out=out, max_queries=3, **where) is out
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


def test_sequences_without_tokens_get_zeros() -> None:
    """So that batches can be padded, with or without learned sinks, in windows and chunks too."""
    specs: list[Any] = [FullAttention(**BASE), SlidingAttention(**BASE, window=4)]
    specs.append(ChunkedAttention(**BASE, chunk=4))
    for spec in specs:
        for sink_logits in (None, torch.zeros(4)):
            _, layer = cache_of(spec, "LBNHC")
            rows = torch.randn(3, 2, 8)
            write(layer, rows, rows, torch.tensor([16, 17, 18]))
            out = attend(
                layer, torch.randn(3, 4, 8), tables=torch.tensor([[1], [0], [1]]),
                lengths=torch.tensor([3, 0, 2]), queries=torch.tensor([1, 1, 1]),
                sink_logits=sink_logits,
            )  # fmt: skip
            assert out[0].any()
            assert not out[1].any()
            assert out[2].any()


def test_shapes_that_are_no_rows_of_the_layer_are_refused() -> None:
    _, layer = cache_of(FullAttention(**BASE), "LBNHC")
    where: dict[str, Any] = {"tables": torch.tensor([[1]]), "lengths": torch.tensor([1])}
    where["queries"] = torch.tensor([1])
    rows, slot = torch.zeros(1, 2, 8), torch.tensor([16])
    bad: list[tuple[Code, Any]] = [
        (Code.BAD_TENSOR, lambda: write(layer, rows[:, :1], rows, slot)),
        (Code.BAD_TENSOR, lambda: write(layer, rows, rows[:, :1], slot)),
        (Code.BAD_TENSOR, lambda: write(layer, rows.repeat(1, 2, 1), rows, slot)),
        (Code.BAD_TENSOR, lambda: write(layer, rows, rows.repeat(1, 2, 1), slot)),
        (Code.BAD_TENSOR, lambda: write(layer, rows[..., :4], rows, slot)),
        (Code.BAD_TENSOR, lambda: attend(layer, torch.zeros(1, 3, 8), **where)),
        (Code.BAD_TENSOR, lambda: attend(layer, torch.zeros(1, 2, 4), **where)),
        (Code.BAD_TENSOR, lambda: attend(layer, torch.zeros(1, 8), **where)),
        (Code.NOT_AN_INTEGER, lambda: write(layer, rows, rows, torch.tensor([3.7]))),
    ]
    for code, act in bad:
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is code
