"""Attention over pages: decode by order, shape and cache dtype, MLA, and prefill."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu import exact
from benchmarks.gpu.ceilings import prefill_work
from benchmarks.gpu.cells import DEVICE, ORDERS, Cell, layers_of, shuffled, small
from benchmarks.gpu.replays import Case
from kvatlas import kernels
from kvatlas.cache import LayerCache
from kvatlas.kernels import read, read_latent, write_latent
from kvatlas.kernels.triton.attention.launch import attend, attend_latent
from kvatlas.kernels.triton.launch_write import write
from kvatlas.specs import FullAttention, LatentAttention

BF16 = torch.bfloat16


def _tables(sequences: int, length: int, block: int, blocks: int, seed: int) -> torch.Tensor:
    per = -(-length // block)
    return shuffled(sequences * per, blocks, seed).view(sequences, per)


def _fill(layer: LayerCache, spec: FullAttention) -> None:
    """Normal rows in every state, through the cache dtype."""
    states = layer.kernel_blocks.size("N")
    total = layer.kernel_blocks.size("B") * states
    if spec.cache == "auto":
        layer.k.normal_()
        layer.v.normal_()
        return
    for start in range(0, total, 1 << 17):
        slots = torch.arange(start, min(total, start + (1 << 17)), device=DEVICE)
        k, v = (
            torch.randn(len(slots), spec.heads, spec.head_dim, dtype=BF16, device=DEVICE)
            for _ in range(2)
        )
        write(layer, k, v, slots)


def _slots(tables: torch.Tensor, states: torch.Tensor, block: int) -> torch.Tensor:
    """Slots of states [..., states] of sequences, one table [..., blocks] for each."""
    return tables.long().gather(-1, states // block) * block + states % block


def _draw(
    layer: LayerCache, spec: FullAttention | LatentAttention, q: torch.Tensor,
    logits: torch.Tensor, slots: torch.Tensor,
) -> None:  # fmt: skip
    """Draw keys to queries, where they are cached: pair i is of q[i] and slots[i]."""
    once, to = torch.unique(slots, return_inverse=True)
    if isinstance(spec, LatentAttention):
        both = torch.cat(read_latent(layer, once), -1)[:, None]
        both = exact.drawn(both, q, logits, to)[:, 0]
        write_latent(layer, both[:, : spec.latent], both[:, spec.latent :], once)
        return
    k, v = read(layer, once)
    write(layer, exact.drawn(k, q, logits, to).to(BF16), v.to(BF16), once)


def _drawn_tables(
    layer: LayerCache, spec: FullAttention | LatentAttention, q: torch.Tensor, sets: int,
    length: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Tables for sets of sequences with one query each, their keys drawn to it."""
    block, blocks = (layer.kernel_blocks.size(axis) for axis in "NB")
    tables = _tables(sets * len(q), length, block, blocks, 5)
    pairs = exact.decoded(sets * len(q), length, block)
    whose, states = pairs.queries.to(DEVICE), pairs.states.to(DEVICE)
    slots = _slots(tables[whose], states[:, None], block)[:, 0]
    _draw(layer, spec, q[whose % len(q)], pairs.logits, slots)
    return tables.chunk(sets)


def _right(
    layer: LayerCache, spec: FullAttention | LatentAttention, q: torch.Tensor, out: torch.Tensor,
    table: torch.Tensor, length: int, queries: torch.Tensor | None = None,
) -> bool:  # fmt: skip
    """Rows of one sequence beside float64 over what is cached; its last query alone, or some."""
    slots = _slots(table, torch.arange(length, device=DEVICE), layer.kernel_blocks.size("N"))
    if isinstance(spec, LatentAttention):
        value, rope = read_latent(layer, slots)
        k, v = torch.cat((value, rope), -1)[:, None], value[:, None]
    else:
        k, v = read(layer, slots)
    if queries is None:
        queries = torch.tensor([length - 1], device=DEVICE)
    wanted = exact.attention(q, k, v, q.shape[-1] ** -0.5, queries)
    return exact.close(out, wanted, exact.tolerance(spec.cache, DEVICE))


def decode(
    spec: FullAttention, order: str, block: int, batch: tuple[int, int], group: int, sets: int,
    choice: dict[str, Any], *, public: bool = False,
) -> Case:  # fmt: skip
    """One query for each sequence; `sets` of sequences take turns.

    `public` is the function that users call, which knows nothing of the batch.
    """
    sequences, length = batch
    length = length // 4 if small() else length
    blocks = sets * sequences * -(-length // block) + 3
    layer = layers_of(spec, order, block=block, blocks=blocks)[1]
    _fill(layer, spec)
    q = torch.randn(sequences, spec.heads * group, spec.head_dim, dtype=BF16, device=DEVICE)
    tables = _drawn_tables(layer, spec, q, sets, length)
    out = torch.empty_like(q)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=DEVICE)
    ones = torch.ones_like(lengths)

    def call(table: torch.Tensor) -> torch.Tensor:
        if public:
            return kernels.attend(layer, q, tables=table, lengths=lengths, queries=ones)
        return attend(
            layer, q, tables=table, lengths=lengths, queries=ones, out=out, max_queries=1,
            **choice,
        )  # fmt: skip

    def right() -> bool:
        for table in tables:
            out.fill_(float("nan"))
            # What a call allocates is the memory that was given back last, most likely.
            torch.full_like(q, float("nan"))
            rows = call(table)
            rows = rows if public else out
            if not all(
                _right(layer, spec, q[i : i + 1], rows[i : i + 1], table[i], length)
                for i in range(sequences)
            ):
                return False
        return True

    row = sum(layer.page.field(f).nbytes for f in ("k", "v")) // layer.kernel_blocks.size("N")
    return Case([partial(call, table) for table in tables], sequences * length * row, right)


def latent(
    batch: tuple[int, int], cache: str, order: str, unit: str, choice: dict[str, Any], *,
    heads: int = 128,
) -> Case:  # fmt: skip
    """Absorbed MLA, so many heads over rows of 512 + 64."""
    sequences, length = batch
    spec, block = LatentAttention(cache=cache), 64
    blocks = sequences * -(-length // block) + 3
    layer = layers_of(spec, order, block=block, blocks=blocks)[1]
    for name in ("latent", "rope"):
        layer.field(name).copy_(torch.randn(layer.field(name).shape, device=DEVICE))
    q = torch.randn(sequences, heads, 576, dtype=BF16, device=DEVICE)
    (tables,) = _drawn_tables(layer, spec, q, 1, length)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=DEVICE)
    ones, out = torch.ones_like(lengths), q.new_empty(sequences, heads, 512)

    def call() -> torch.Tensor:
        return attend_latent(
            layer, q, tables=tables, lengths=lengths, queries=ones, scale=576**-0.5, out=out,
            max_queries=1, **choice,
        )  # fmt: skip

    def right() -> bool:
        out.fill_(float("nan"))
        call()
        return all(
            _right(layer, spec, q[i : i + 1], out[i : i + 1], tables[i], length)
            for i in range(sequences)
        )

    # Every state takes part in two products with each head.
    each = 2 * heads * (576 + 512) if unit == "TFLOP/s" else 576 * (1 if cache == "fp8" else 2)
    return Case([call], sequences * length * each, right)


def sparse(batch: tuple[int, int], order: str, choice: dict[str, Any]) -> Case:
    """DeepSeek-V3.2: 128 heads over 2,048 records that are selected anew in each of three sets."""
    (sequences, length), heads, most = batch, 128, 2048
    length = 2 * most if small() else length
    spec, block = LatentAttention(cache="fp8_ds_mla"), 64
    blocks = sequences * -(-length // block) + 3
    layer = layers_of(spec, order, block=block, blocks=blocks, slots=2)[1]
    for start in range(0, blocks, 1 << 12):
        for name in ("latent", "rope", "latent_scale"):
            part = layer.field(name)[start : start + (1 << 12)]
            rows = torch.randn(part.shape, device=DEVICE)
            part.copy_(0.5 + torch.rand_like(rows) if name == "latent_scale" else rows)
    q = torch.randn(sequences, heads, 576, dtype=BF16, device=DEVICE)
    tables = _tables(sequences, length, block, blocks, 5)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=DEVICE)
    ones, out = torch.ones_like(lengths), q.new_empty(sequences, heads, 512)
    sets = [
        torch.stack([torch.randperm(length, device=DEVICE)[:most] for _ in range(sequences)]).int()
        for _ in range(3)
    ]

    def call(indices: torch.Tensor) -> torch.Tensor:
        return attend_latent(
            layer, q, tables=tables, lengths=lengths, queries=ones, scale=576**-0.5, out=out,
            max_queries=1, indices=indices, **choice,
        )  # fmt: skip

    def right() -> bool:
        last = torch.tensor([most], device=DEVICE)
        for indices in sets:
            out.fill_(float("nan"))
            call(indices)
            for i in range(sequences):
                value, rope = read_latent(layer, _slots(tables[i], indices[i].long(), block))
                k, v = torch.cat((value, rope), -1)[:, None], value[:, None]
                wanted = exact.attention(q[i : i + 1], k, v, 576**-0.5, last)
                if not exact.close(out[i : i + 1], wanted, exact.tolerance(spec.cache, DEVICE)):
                    return False
        return True

    work = sequences * most * 2 * heads * (576 + 512)
    return Case([partial(call, indices) for indices in sets], work, right)


def prefill(
    spec: FullAttention, order: str, block: int, batch: tuple[int, int], choice: dict[str, Any]
) -> Case:
    """Whole sequences over themselves, 4 query heads to a kv head."""
    sequences, length = batch
    blocks = sequences * -(-length // block) + 3
    layer = layers_of(spec, order, block=block, blocks=blocks)[1]
    _fill(layer, spec)
    tables = _tables(sequences, length, block, blocks, 5)
    q = torch.randn(sequences * length, spec.heads * 4, spec.head_dim, dtype=BF16, device=DEVICE)
    rows, pairs = exact.prefilled(length, block)
    rows, whose, states = (some.to(DEVICE) for some in (rows, pairs.queries, pairs.states))
    for i, table in enumerate(tables):
        _draw(layer, spec, q[i * length + whose], pairs.logits, _slots(table, states, block))
    out = torch.empty_like(q)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=DEVICE)

    def call() -> torch.Tensor:
        return attend(
            layer, q, tables=tables, lengths=lengths, queries=lengths, out=out,
            max_queries=length, **choice,
        )  # fmt: skip

    def right() -> bool:
        out.fill_(float("nan"))
        call()
        return bool(torch.isfinite(out).all()) and all(
            _right(layer, spec, q[i * length + rows], out[i * length + rows], table, length, rows)
            for i, table in enumerate(tables)
        )

    work = sequences * prefill_work(length, spec.heads * 4, spec.head_dim)
    return Case([call], work, right)


BIG, MIDDLE, LONG = (64, 8192), (16, 4096), (1, 32768)
BASE = FullAttention(heads=8, head_dim=128)


def cells() -> list[Cell]:
    """The table's figures for attention."""
    table = []
    for batch, ceiling, bar in ((BIG, "dense", 0.92), (MIDDLE, "", 2500), (LONG, "", 3600)):
        table += [
            Cell(
                f"decode {batch[0]} x {batch[1]}, block {block}", order,
                partial(decode, BASE, order, block, batch, 4, 1 if batch == BIG else 2),
                ceiling=ceiling, bar=bar, apart=0.05 if batch == BIG else None,
            )
            for block in (16, 64)
            for order in ORDERS
        ]  # fmt: skip
    table.append(
        Cell(
            "decode 64 x 8192, kvatlas.kernels.attend without max_queries", "LBNHC, block 16",
            partial(decode, BASE, "LBNHC", 16, BIG, 4, 1, public=True), ceiling="dense",
        )
    )  # fmt: skip
    for cache in ("fp8", "int8_per_token_head", "fp8_per_token_head"):
        spec = FullAttention(heads=8, head_dim=128, cache=cache)
        table += [
            Cell(
                f"decode 64 x 8192, {cache}", f"{order}, block {block}",
                partial(decode, spec, order, block, BIG, 4, 1), ceiling="bf16 tokens", bar=1.6,
            )
            for order, block in (("LBNHC", 16), ("LBHNC", 64))
        ]  # fmt: skip
    for cache, bar in (("int4_per_token_head", 2.8), ("nvfp4", 1.8), ("turboquant_4bit_nc", 1.2)):
        spec = FullAttention(heads=8, head_dim=128, cache=cache)
        table.append(
            Cell(
                f"decode 64 x 8192, {cache}", "LBHNC, block 64",
                partial(decode, spec, "LBHNC", 64, BIG, 4, 1), ceiling="bf16 tokens", bar=bar,
            )
        )  # fmt: skip
    table += [
        Cell(
            f"decode 64 x 8192, {group} query heads to a kv head", f"{order}, block {block}",
            partial(decode, BASE, order, block, BIG, group, 1), ceiling="dense",
        )
        for group in (1, 8, 16)
        for order, block in (("LBNHC", 16), ("LBHNC", 64))
    ]  # fmt: skip
    for dim, heads in ((64, 8), (256, 8)):
        table.append(
            Cell(
                f"decode 64 x 4096, D {dim}", "LBNHC, block 16",
                partial(decode, FullAttention(heads=heads, head_dim=dim), "LBNHC", 16,
                        (64, 4096), 4, 1), ceiling="dense",
            )
        )  # fmt: skip
    for order in ORDERS:
        table.append(
            Cell(
                "decode MLA 64 x 4096, 128 heads, auto, operations", f"{order}, block 64",
                partial(latent, (64, 4096), "auto", order, "TFLOP/s"), unit="TFLOP/s",
                ceiling="", bar=500.0,
            )
        )  # fmt: skip
    table += [
        Cell(
            f"decode MLA 64 x 4096, {heads} heads, {cache}, {unit}", "LBNHC, block 64",
            partial(latent, (64, 4096), cache, "LBNHC", unit, heads=heads), unit=unit,
            ceiling=ceiling, bar=bar,
        )
        for heads, cache, unit, ceiling, bar in (
            (128, "auto", "TFLOP/s", "matrix product", None),
            (128, "auto", "GB/s", "dense", None),
            (128, "fp8", "TFLOP/s", "bf16 latents", 1.0),
            (128, "fp8", "GB/s", "dense", None),
            (16, "auto", "GB/s", "dense", 0.8),
        )
    ]  # fmt: skip
    table += [
        Cell(
            "sparse MLA 64 x 2048 of 65536, 128 heads, records", f"{order}, block 64",
            partial(sparse, (64, 65536), order), unit="TFLOP/s", ceiling="", bar=400.0,
        )
        for order in ORDERS
    ]  # fmt: skip
    table += [
        Cell(
            "prefill of 8192 tokens", f"{order}, block {block}",
            partial(prefill, BASE, order, block, (1, 8192)), unit="TFLOP/s", ceiling="flash",
            bar=0.6,
        )
        for order, block in (("LBNHC", 16), ("LBHNC", 64), ("BHLNC", 16))
    ]  # fmt: skip
    table += [
        Cell(
            f"prefill of 8192 tokens, {cache}", "LBNHC, block 16",
            partial(prefill, FullAttention(heads=8, head_dim=128, cache=cache), "LBNHC", 16,
                    (1, 8192)), unit="TFLOP/s", ceiling="", bar=350,
        )
        for cache in (
            "fp8", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4"
        )
    ]  # fmt: skip
    return table
