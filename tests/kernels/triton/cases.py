"""Cases that hold on any device: the interpreter runs them on a CPU, `tests/gpu` on a GPU.

Pools have guard bytes around them and are full of garbage; outputs are poisoned. What is
right is said by float64, or by the torch kernels where bytes are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvatlas.cache import LayerCache, torch_dtype
from kvatlas.copying.address_runs import (
    BlockSpans,
    RepeatedCopy,
    convert_address_runs,
    copy_address_runs,
    place_starts,
)
from kvatlas.geometry import ENGINE_LAYOUTS, DType, Layout
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.kernels import append_step, read, read_latent
from kvatlas.kernels import write as write_by_torch
from kvatlas.kernels import write_latent as write_latent_by_torch
from kvatlas.kernels.cast_scales import place_scales
from kvatlas.kernels.triton import (
    BlockConversion,
    TableAppend,
    attend,
    attend_latent,
    between,
    write,
    write_latent,
    zero_blocks,
)
from kvatlas.specs import (
    ChunkedAttention,
    CrossAttention,
    LatentAttention,
    SinkAttention,
    SlidingAttention,
    SlidingLatentAttention,
    Spec,
    TensorScales,
)
from kvatlas.specs.cell_formats import ElementCast, needs_scales

ORDERS = [layout.order for layout in ENGINE_LAYOUTS]
GUARD = 512
NAN, INF = float("nan"), float("inf")
NOT_FINITE = [(NAN,), (INF,), (-INF,), (INF, -INF), (INF, NAN), (NAN,) * 16]
"""What a row has from its first element on."""


class Pool:
    """Three layers in one pool, with guards."""

    def __init__(
        self, spec: Spec, order: str, device: str, *, block: int = 16, blocks: int = 12,
        seed: int = 0, pinned: bool = False,
    ) -> None:  # fmt: skip
        page = spec.page(block)
        placed = page.place(Layout(order), pages=3, blocks=blocks)
        self.raw = torch.empty(
            placed.stop + 2 * GUARD, dtype=torch.uint8, device=device, pin_memory=pinned
        )
        generator = torch.Generator(device=device).manual_seed(seed)
        self.raw.random_(0, 256, generator=generator)
        self.raw[:GUARD] = 0xA5
        self.raw[-GUARD:] = 0xA5
        buffer = self.raw[GUARD : GUARD + placed.stop]
        self.layers = [
            LayerCache(f"layers.{i}", spec, page, placed.select("L", i), buffer) for i in range(3)
        ]
        self.layer = self.layers[1]

    def untouched(self) -> None:
        assert (self.raw[:GUARD] == 0xA5).all()
        assert (self.raw[-GUARD:] == 0xA5).all()


def check_copy(
    spec: Spec, other: Spec, orders: tuple[str, str], device: str, *, layers: int = 1,
    hosts: tuple[bool, bool] = (False, False), **sizes: int,
) -> None:  # fmt: skip
    """Blocks arrive, and nothing else changes."""
    places_of = ["cpu" if host else device for host in hosts]
    source, target = (
        Pool(one, order, where, seed=i, pinned=host, **sizes)
        for i, (one, order, where, host) in enumerate(
            zip((spec, other), orders, places_of, hosts, strict=True)
        )
    )
    ids = torch.tensor([5, 0, 7, 11], device=device)
    places = torch.tensor([2, 9, 3, 0], device=device)
    before = target.raw.clone()
    between(source.layers[:layers], target.layers[:layers])(ids, places)
    if device == "cuda":
        torch.cuda.synchronize()
    written = target.raw.clone()
    target.raw.copy_(before)
    for a, b in zip(source.layers[:layers], target.layers[:layers], strict=True):
        for name, view in b.fields.items():
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()]
            rows = a.field(name).view(bits)[ids.to(a.buffer.device)].to(view.device)
            view.view(bits)[places.to(view.device)] = rows.reshape(-1, *view.shape[1:])
    assert torch.equal(written, target.raw)


def check_zero(spec: Spec, order: str, device: str) -> None:
    pool = Pool(spec, order, device)
    before = pool.raw.clone()
    ids = torch.tensor([3, 8], device=device)
    zero_blocks(pool.layer, ids)
    written = pool.raw.clone()
    pool.raw.copy_(before)
    pool.layer.tensor[ids] = 0
    assert torch.equal(written, pool.raw)


def check_write(
    spec: Any, order: str, device: str, *, exact: bool, dtype: torch.dtype = torch.bfloat16,
    tokens: int = 40,
) -> None:  # fmt: skip
    """The bytes that the torch kernels write, from slices of a fused projection."""
    pool = Pool(spec, order, device)
    layer, v_dim = pool.layer, spec.v_dim or spec.head_dim
    generator = torch.Generator().manual_seed(11)
    fused = torch.randn(tokens, spec.heads, spec.head_dim + v_dim, generator=generator)
    fused = fused.to(dtype).to(device)
    k, v = fused[..., : spec.head_dim], fused[..., spec.head_dim :]
    total = layer.kernel_blocks.size("B") * layer.kernel_blocks.size("N")
    slots = torch.randperm(total, generator=generator)[:tokens].to(device)
    slots[5] = -1
    before = pool.raw.clone()
    write(layer, k, v, slots, k_scale=0.5, v_scale=0.25)
    written = pool.raw.clone()
    pool.raw.copy_(before)
    # Torch divides by a number as a CPU does only on a CPU.
    plain = replace(layer, buffer=layer.buffer.cpu())
    write_by_torch(plain, k.cpu(), v.cpu(), slots.cpu(), k_scale=0.5, v_scale=0.25)
    layer.buffer.copy_(plain.buffer)
    unlike = (written != pool.raw).nonzero().flatten()
    if exact:
        assert not unlike.numel()
        return
    # The interpreter rounds to 8-bit floats its own way: at most the next code.
    assert unlike.numel() < 0.2 * tokens * spec.heads * (spec.head_dim + v_dim)
    mine = [rows.clone() for rows in read(layer, slots[slots >= 0])]
    pool.raw.copy_(written)
    for a, b in zip(mine, read(layer, slots[slots >= 0]), strict=True):
        assert float((a - b).norm() / a.norm()) < 0.15
    pool.untouched()


def check_append(spec: Any, order: str, device: str, *, block: int = 16) -> None:
    """Tokens are stored where tables say, nothing else changes, and what is in sight comes back.

    Sequences have a prompt, some tokens, none, one that is lost, since its block is gone, and one
    for which others are out of sight by then; one sequence has lost blocks. Torch does the same.
    """
    pool = Pool(spec, order, device, block=block)
    layer, generator = pool.layer, torch.Generator().manual_seed(13)
    dims = spec.head_dim, spec.v_dim or spec.head_dim
    tables = torch.randperm(12, generator=generator).view(2, 6).to(device)
    past = [torch.zeros(2, spec.heads, 0, dim, dtype=layer.k.dtype) for dim in dims]
    gone = [(), (), (), (3,), (0, 1)]
    steps = ((3 * block + 5, 0, 0), (3, 0, 0), (0, 0, 0), (1, 0, 0), (1, 7, block + 2))
    for (count, first, visible), entries in zip(steps, gone, strict=True):
        start = past[0].shape[2]
        # As models have them: by token, and heads and tokens changed places.
        new = [torch.randn(2, count, spec.heads, d, generator=generator) for d in dims]
        new = [rows.to(past[0].dtype).transpose(1, 2) for rows in new]
        given = tables.to(torch.int32 if count == 3 else torch.int64, copy=True)
        given[1, list(entries)] = -1
        plain, twin = (replace(layer, buffer=layer.buffer.cpu().clone()) for _ in range(2))
        tokens = torch.arange(start, start + count)
        ids = given.cpu().long()[:, tokens // block]
        slots = (ids * block + tokens % block).masked_fill(ids < 0, -1)
        by_token = [rows.transpose(1, 2).flatten(0, 1) for rows in new]
        write_by_torch(plain, by_token[0], by_token[1], slots.flatten())
        before, past = past, [torch.cat(rows, dim=2) for rows in zip(past, new, strict=True)]
        about = {"block": block, "start": start, "count": count, "first": first, "visible": visible}
        k, v = (rows.to(device) for rows in new)
        by_kernel = TableAppend(given, **about)(layer, k, v)
        by_torch = append_step(given.cpu(), **about)(twin, *new)
        assert torch.equal(layer.buffer.cpu(), plain.buffer)
        assert torch.equal(twin.buffer, plain.buffer)
        pool.untouched()
        for rows, expected in zip((*by_kernel, *by_torch), past * 2, strict=True):
            wanted = expected.clone()
            wanted[:, :, :visible] = 0
            for entry in entries:
                wanted[1, :, entry * block : (entry + 1) * block] = 0
            assert torch.equal(rows.cpu(), wanted[:, :, first:])
        for rows in by_kernel:
            assert rows.is_contiguous()
            assert rows.data_ptr() % 16 == 0
        if (slots < 0).any():  # not stored: the next step has the same tokens again
            past = before


def check_not_finite(spec: Any, device: str) -> None:
    """Of rows that are no numbers, and of their neighbours, comes back what torch would store."""
    pool = Pool(spec, "LBHNC", device)
    layer = pool.layer
    twin = replace(layer, buffer=layer.buffer.cpu().clone())
    generator = torch.Generator().manual_seed(4)
    slots = torch.arange(len(NOT_FINITE) + 2)
    k, v = (
        torch.randint(-8, 9, (len(slots), 2, dim), generator=generator).half()
        for dim in (spec.head_dim, spec.v_dim or spec.head_dim)
    )
    for rows in (k, v):
        for row, bad in enumerate(NOT_FINITE):
            rows[row, 0, : len(bad)] = torch.tensor(bad)
        rows[-2, 0] *= 8000  # sums, norms and ranges of these are beyond the largest half
    write_by_torch(twin, k, v, slots)
    write(layer, *(part.to(device) for part in (k, v, slots)))
    for mine, theirs in zip(read(layer, slots.to(device)), read(twin, slots), strict=True):
        ours = mine.cpu()
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())
        ours, theirs = (rows.nan_to_num(0, 0, 0) for rows in (ours, theirs))
        # The interpreter rounds to 8-bit floats its own way.
        assert ((ours - theirs).norm(dim=-1) <= 0.2 * theirs.norm(dim=-1)).all()
    pool.untouched()


def check_write_latent(
    spec: LatentAttention, order: str, device: str, *, dtype: torch.dtype, whole: bool
) -> None:
    """The bytes that the torch kernels write; all types here hold small whole numbers exactly."""
    pool = Pool(spec, order, device)
    layer = pool.layer
    twin = replace(layer, buffer=layer.buffer.cpu().clone())
    generator = torch.Generator().manual_seed(12)
    fused = 4 * torch.randn(40, spec.latent + spec.rope, generator=generator)
    fused = (fused.round().clamp(-15, 15) if whole else fused).to(dtype)
    latent, rope = fused[:, : spec.latent], fused[:, spec.latent :]
    slots = torch.randperm(12 * 16, generator=generator)[:40]
    slots[5] = -1
    write_latent_by_torch(twin, latent, rope, slots, kv_scale=0.5)
    write_latent(layer, *(part.to(device) for part in (latent, rope, slots)), kv_scale=0.5)
    assert torch.equal(layer.buffer.cpu(), twin.buffer)
    pool.untouched()


def seen_by(spec: Any, position: int, count: int, device: str) -> torch.Tensor:
    """Which of `count` states a query at `position` sees."""
    at = torch.arange(count, device=device)
    if isinstance(spec, CrossAttention):
        return at >= 0
    seen = at <= position
    if isinstance(spec, SlidingAttention | SlidingLatentAttention):
        seen &= at > position - spec.window
    if isinstance(spec, SinkAttention) and spec.window is not None:
        seen &= (at > position - spec.window) | (at < spec.sink_tokens)
    if isinstance(spec, ChunkedAttention):
        seen &= at // spec.chunk == position // spec.chunk
    return seen


def exact_attention(
    spec: Any, q: Any, k: Any, v: Any, scale: float, sink_logits: Any, softcap: float | None
) -> torch.Tensor:
    """One sequence, in float64: the last queries over all rows."""
    group = q.shape[1] // k.shape[1]
    k, v = (rows.double().repeat_interleave(group, 1) for rows in (k, v))
    logits = torch.einsum("thd,shd->ths", q.double(), k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    first = k.shape[0] - q.shape[0]
    seen = torch.stack(
        [seen_by(spec, first + i, k.shape[0], str(q.device)) for i in range(q.shape[0])]
    )
    logits = logits.masked_fill(~seen[:, None], float("-inf"))
    if sink_logits is not None:
        column = sink_logits.double().view(1, -1, 1).expand(q.shape[0], -1, 1)
        logits = torch.cat((logits, column), -1)
    return torch.einsum("ths,shd->thd", logits.softmax(-1)[..., : k.shape[0]], v)


def check_attend(
    spec: Any, order: str, device: str, *, lengths: list[int], queries: list[int], group: int = 2,
    block: int = 16, dtype: torch.dtype = torch.float32, tolerance: float = 1e-5,
    sink_logits: bool = False, softcap: float | None = None, starts: bool = False,
    spread: bool = False, **choice: Any,
) -> None:  # fmt: skip
    """A batch over scattered blocks of a pool of garbage, against float64.

    With `spread` rows are of all sizes from a millionth to 1, and so are their scales.
    """
    per = -(-max(lengths) // block)
    pool = Pool(spec, order, device, block=block, blocks=len(lengths) * per + 2)
    layer = pool.layer
    generator = torch.Generator().manual_seed(3)
    tables = torch.randperm(len(lengths) * per + 2, generator=generator)[: len(lengths) * per]
    tables = tables.view(len(lengths), per).to(device)
    v_dim = spec.v_dim or spec.head_dim
    rows = []
    for table, length in zip(tables, lengths, strict=True):
        k = torch.randn(length, spec.heads, spec.head_dim, generator=generator).to(device)
        v = torch.randn(length, spec.heads, v_dim, generator=generator).to(device)
        if spread:
            sizes = 10.0 ** -torch.randint(7, (2, length, 1, 1), generator=generator).float()
            k, v = k * sizes[0].to(device), v * sizes[1].to(device)
        at = torch.arange(length, device=device)
        slots = table[at // block] * block + at % block
        write_by_torch(layer, k, v, slots, k_scale=0.5, v_scale=0.25)
        rows.append(read(layer, slots, k_scale=0.5, v_scale=0.25))
    heads = spec.heads * group
    q = torch.randn(sum(queries), heads, spec.head_dim, generator=generator).to(dtype).to(device)
    given: dict[str, Any] = {"queries": torch.tensor(queries, device=device)}
    if starts:
        ends = torch.tensor([0, *queries]).cumsum(0).to(device)
        given = {"starts": ends, "max_queries": max(queries)}
    logits = torch.randn(heads, generator=generator).to(device) if sink_logits else None
    out = torch.full((sum(queries), heads, v_dim), float("nan"), dtype=dtype, device=device)
    attend(
        layer, q, tables=tables.int(), lengths=torch.tensor(lengths, device=device).int(),
        out=out, sink_logits=logits, softcap=softcap, k_scale=0.5, v_scale=0.25, **given, **choice,
    )  # fmt: skip
    start = 0
    for (k, v), count in zip(rows, queries, strict=True):
        mine = slice(start, start + count)
        if count:
            expected = exact_attention(spec, q[mine], k, v, spec.head_dim**-0.5, logits, softcap)
            error = (out[mine].double() - expected).abs().max() / expected.abs().max()
            assert float(error) < tolerance, (count, float(error))
        start += count
    pool.untouched()


def check_latent(
    spec: LatentAttention, order: str, device: str, *, dtype: torch.dtype, tolerance: float,
    heads: int, sink_logits: bool = False, **choice: Any,
) -> None:  # fmt: skip
    lengths, queries = [37, 5, 20], [4, 1, 20]
    pool = Pool(spec, order, device)
    layer = pool.layer
    generator = torch.Generator().manual_seed(3)
    tables = torch.randperm(12, generator=generator)[:9].view(3, 3).to(device)
    width = spec.latent + spec.rope
    rows = [torch.randn(n, width, generator=generator).to(device) for n in lengths]
    for table, row in zip(tables, rows, strict=True):
        at = torch.arange(len(row), device=device)
        layer.latent[table[at // 16], at % 16] = row[:, : spec.latent].to(layer.latent.dtype)
        layer.rope[table[at // 16], at % 16] = row[:, spec.latent :].to(layer.rope.dtype)
    q = torch.randn(sum(queries), heads, width, generator=generator).to(dtype).to(device)
    logits = torch.randn(heads, generator=generator).to(device) if sink_logits else None
    shape = (sum(queries), heads, spec.latent)
    out = torch.full(shape, float("nan"), dtype=dtype, device=device)
    attend_latent(
        layer, q, sink_logits=logits, tables=tables, lengths=torch.tensor(lengths, device=device),
        queries=torch.tensor(queries, device=device), scale=0.2, kv_scale=1.0, out=out, **choice,
    )  # fmt: skip
    start = 0
    for table, length, count in zip(tables, lengths, queries, strict=True):
        at = torch.arange(length, device=device)
        value = layer.latent[table[at // 16], at % 16].double().unsqueeze(1)
        rope = layer.rope[table[at // 16], at % 16].double().unsqueeze(1)
        mine = slice(start, start + count)
        expected = exact_attention(
            spec, q[mine], torch.cat((value, rope), -1), value, 0.2, logits, None
        )
        assert float((out[mine].double() - expected).abs().max()) < tolerance
        start += count
    pool.untouched()


def check_selected(
    spec: LatentAttention, order: str, device: str, *, dtype: torch.dtype, tolerance: float,
    heads: int, lengths: Sequence[int] = (37, 5, 0, 20), queries: Sequence[int] = (4, 1, 2, 20),
    most: int = 7, block: int = 16, starts: bool = False, sink_logits: bool = False, **choice: Any,
) -> None:  # fmt: skip
    """Attention to some tokens of each query, against float64 over the rows that are stored.

    Some positions are negative, some are those of tokens after the query; one query has none.
    If `most` is 0, queries attend to all tokens, without indices.
    """
    per = -(-max(lengths) // block)
    pool = Pool(spec, order, device, block=block, blocks=per * len(lengths) + 1)
    layer, generator = pool.layer, torch.Generator().manual_seed(3)
    tables = torch.randperm(per * len(lengths) + 1, generator=generator)[: per * len(lengths)]
    tables = tables.view(len(lengths), per).to(device)
    width, held = spec.latent + spec.rope, []
    for table, length in zip(tables, lengths, strict=True):
        at = torch.arange(length, device=device)
        slots = table[at // block] * block + at % block
        rows = torch.randn(length, width, generator=generator).to(device)
        write_latent_by_torch(layer, rows[:, : spec.latent], rows[:, spec.latent :], slots)
        held.append([part.double() for part in read_latent(layer, slots)])
    count, spare = sum(queries), 2 if starts else 0
    q = torch.randn(count + 2 * spare, heads, width, generator=generator).to(dtype).to(device)
    longest = max(lengths) + 8
    each = [torch.randperm(longest, generator=generator)[: most or longest] for _ in q]
    indices = torch.stack(each) - 4
    if most:
        indices[spare] = -1 - indices[spare].abs()
    logits = torch.randn(heads, generator=generator).to(device) if sink_logits else None
    ends = torch.tensor([0, *queries]).cumsum(0) + spare
    counts = torch.tensor(queries, device=device)
    given: dict[str, Any] = {"starts": ends.to(device)} if starts else {"queries": counts}
    out = torch.full((len(q), heads, spec.latent), NAN, dtype=dtype, device=device)
    attend_latent(
        layer, q, sink_logits=logits, tables=tables.int(), scale=0.2, out=out,
        lengths=torch.tensor(lengths, device=device), **choice,
        indices=indices.int().to(device) if most else None,
        **given,
    )  # fmt: skip
    row = spare
    for (value, rope), length, many in zip(held, lengths, queries, strict=True):
        for position in range(length - many, length):
            own = [int(at) for at in indices[row] if 0 <= at <= position]
            k, v = torch.cat((value, rope), -1)[own, None], value[own, None]
            # One query that sees all of its tokens, whatever their order.
            expected = exact_attention(spec, q[row : row + 1], k, v, 0.2, logits, None)
            if not own:
                expected = torch.zeros_like(expected)
            error = (out[row].double() - expected[0]).abs().max()
            assert float(error) < tolerance, (row, own, float(error))
            row += 1
    if spare:
        assert out[:spare].isnan().all()
        assert out[row:].isnan().all()
    assert row == count + spare
    pool.untouched()


def run_tables(
    rng: np.random.Generator, item: int, *, alike: bool
) -> tuple[tuple[Int64s, Int64s], tuple[Int64s, Int64s, Int64s]]:
    """Starts at either end, and spans with their lengths: `item`, or half of it for some."""
    starts, spans = 5, 7
    before, after = rng.permutation(starts) * item * 11, np.arange(starts) * item * 13
    source, target = rng.permutation(spans) * item, rng.permutation(spans) * item
    length = np.full(spans, item)
    if not alike:
        length[::2] = max(1, item // 2)
    return (before, after), (source, target, length)


def check_runs(item: int, device: str, *, alike: bool, programs: int, seed: int) -> None:
    """Runs of `item` bytes, or some of them shorter, where the sums of two tables say."""
    rng = np.random.default_rng(seed)
    starts, spans = run_tables(rng, item, alike=alike)
    memory = torch.from_numpy(rng.integers(0, 256, 60 * item, np.uint8)).to(device)
    out = torch.full((2 * GUARD + 70 * item,), 0xA5, dtype=torch.uint8, device=device)
    right = out.cpu().numpy().copy()
    for a, b in zip(*starts, strict=True):
        for x, y, n in zip(*spans, strict=True):
            right[GUARD + b + y :][:n] = memory.cpu().numpy()[a + x :][:n]
    copy_address_runs(
        memory.data_ptr(), out[GUARD:].data_ptr(), place_starts(*starts, device), spans,
        programs=programs,
    )  # fmt: skip
    assert np.array_equal(out.cpu().numpy(), right), (item, alike, programs)


def check_repeated_runs(item: int, device: str, *, alike: bool, seed: int) -> None:
    """The same copy again and again, between other blocks each time; some ids are made up."""
    rng = np.random.default_rng(seed)
    starts, spans, blocks = 5, 8, 9
    strides = 6 * item, 4 * item
    before, after = rng.permutation(starts) * item * 60, np.arange(starts) * item * 50
    length = np.full(spans, item)
    if not alike:
        length[::2] = max(1, item // 2)
    # Two spans in a block of the target, one in a block of the source.
    entries = rng.permutation(spans), np.arange(spans) // 2
    offsets = rng.integers(0, 2, spans) * item, np.arange(spans) % 2 * 2 * item
    memory = torch.from_numpy(rng.integers(0, 256, 320 * item, np.uint8)).to(device)
    out = torch.empty(2 * GUARD + 260 * item, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream() if device == "cuda" else None
    ids = torch.zeros(32, dtype=torch.int64, device=device)
    ends = memory.data_ptr(), out[GUARD:].data_ptr()
    # Both orders of the tables, whichever would be faster.
    placed = place_starts(before, after, device)
    about = BlockSpans(entries, offsets, length, strides, blocks)
    copies = [
        RepeatedCopy(ends, placed._replace(step=step), about, (ids[:spans], ids[16:]))
        for step in (0, 1 << 40)
    ]
    for turn in range(6):
        src, dst = rng.permutation(blocks)[:spans], rng.permutation(blocks)[: spans // 2]
        told = src.copy()
        if turn > 3:
            told[1:3] = (1 << 32) - 1, -3
            src[1:3] = 0
        ids[:spans] = torch.from_numpy(told).to(device)
        ids[16 : 16 + len(dst)] = torch.from_numpy(dst).to(device)
        at = src[entries[0]] * strides[0] + offsets[0]
        to = dst[entries[1]] * strides[1] + offsets[1]
        right = out.fill_(0xA5).cpu().numpy().copy()
        for a, b in zip(before, after, strict=True):
            for x, y, n in zip(at, to, length, strict=True):
                right[GUARD + b + y :][:n] = memory.cpu().numpy()[a + x :][:n]
        copies[turn % 2].launch(stream)
        assert np.array_equal(out.cpu().numpy(), right), (item, alike, turn)


def check_cast_runs(
    names: tuple[str, str], item: int, device: str, *, alike: bool, programs: int,
    scales: tuple[float, float] = (0.5, 0.25),
) -> None:  # fmt: skip
    """Runs of `item` elements, or some of them shorter, arrive in another type, and nothing else.

    Numbers are those that codecs make on a CPU: divided, and not multiplied by an inverse.
    """
    rng = np.random.default_rng(item)
    factors = scales, (2 * scales[0], scales[1])
    cast = ElementCast(DType.of(names[0]), DType.of(names[1]), factors)
    one, two = torch_dtype(cast.source), torch_dtype(cast.target)
    starts, spans = run_tables(rng, item, alike=alike)
    numbers = 4 * torch.randn(60 * item, generator=torch.Generator().manual_seed(item))
    if device == "cpu":  # the interpreter rounds its own way; all types hold these
        numbers = numbers.round().clamp(-4, 4)
    memory = numbers.to(one)
    guard, width = GUARD // cast.target.item, {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    out = torch.full((2 * guard + 70 * item,), 33, dtype=width[cast.target.item])
    right = out.clone()
    made = []
    for factor, divisor in factors:
        exact = memory.float() * factor / divisor
        if cast.target.item == 1:
            exact = exact.clamp(-torch.finfo(two).max, torch.finfo(two).max)
        made.append(exact.to(two).view(right.dtype))
    which = rng.integers(0, 2, len(starts[0]))
    for a, b, scale in zip(*starts, which, strict=True):
        for x, y, n in zip(*spans, strict=True):
            right[guard + b + y :][:n] = made[scale][a + x :][:n]
    memory, out = memory.to(device), out.to(device)
    convert_address_runs(
        memory.data_ptr(), out[guard:].data_ptr(), place_starts(*starts, device), spans, cast,
        place_scales(cast, which, len(which), device), programs=programs,
    )  # fmt: skip
    assert torch.equal(out.cpu(), right), (names, item, alike, programs, scales)


def check_convert(
    spec: Any, other: Any, orders: tuple[str, str], device: str, *, layers: int = 1,
    scales: tuple[float, float] = (1.0, 1.0), blocks: int = 12,
) -> None:  # fmt: skip
    """Blocks arrive in the other format, as torch's codecs write them, and nothing else changes.

    `scales` are those of K, at the source and at the destination; V's are twice as large.
    """
    source, target = (
        Pool(one, order, device, seed=i, blocks=blocks)
        for i, (one, order) in enumerate(zip((spec, other), orders, strict=True))
    )
    ids = torch.tensor([5, 0, 7, 11], device=device)
    places = torch.tensor([2, 9, 3, 0], device=device)
    for layer in source.layers:
        for view in layer.fields.values():
            values = 4 * torch.randn(view.shape, generator=torch.Generator().manual_seed(3))
            if device == "cpu":  # the interpreter rounds its own way; all types hold these
                values = values.round().clamp(-4, 4)
            view.copy_(values.to(device).to(view.dtype))
    ends = [TensorScales(scale, 2 * scale) for scale in scales]
    before = target.raw.clone()
    convert = BlockConversion(
        source.layers[:layers], target.layers[:layers],
        source_scales=[ends[0]] * layers, destination_scales=[ends[1]] * layers,
    )  # fmt: skip
    convert(ids, places)
    written = target.raw.clone()
    target.raw.copy_(before)
    for a, b in zip(source.layers[:layers], target.layers[:layers], strict=True):
        for name, view in b.fields.items():
            from_scale, to_scale = (
                getattr(own, "v" if name == "v" else "k") if needs_scales(layer.spec) else 1.0
                for own, layer in zip(ends, (a, b), strict=True)
            )
            axes = [a.place(name).axes.index(axis) for axis in b.place(name).axes]
            exact = a.field(name).permute(axes)[ids].float() * (from_scale / to_scale)
            if view.element_size() == 1:
                most = torch.finfo(view.dtype).max
                exact = exact.clamp(-most, most)
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()]
            view.view(bits)[places] = exact.to(view.dtype).view(bits)
    assert torch.equal(written, target.raw)
