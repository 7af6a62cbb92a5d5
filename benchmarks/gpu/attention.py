"""Attention over pages: decode by order, shape and cache dtype, MLA, and prefill."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.ceilings import prefill_work
from benchmarks.gpu.cells import DEVICE, ORDERS, Case, Cell, close, layers_of, shuffled, small
from kvatlas.cache import LayerCache
from kvatlas.kernels import read
from kvatlas.kernels.triton.attend import attend, attend_latent
from kvatlas.kernels.triton.write import write
from kvatlas.specs import FullAttention, LatentAttention

BF16 = torch.bfloat16
CHECKED = 3
"""Sequences of a large batch that are compared with float64."""


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
        write(layer, spec, k, v, slots)


def _exact(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Dense causal attention of the last queries, in float64: q [T, Hq, D], k [S, H, D]."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    found = []
    for head in range(q.shape[1]):
        logits = q[:, head] @ k[:, head // group].T * scale
        seen = torch.arange(k.shape[0], device=DEVICE) <= torch.arange(
            k.shape[0] - q.shape[0], k.shape[0], device=DEVICE
        ).unsqueeze(1)
        found.append(logits.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, head // group])
    return torch.stack(found, 1)


def decode(
    spec: FullAttention, order: str, block: int, batch: tuple[int, int], group: int, sets: int,
    choice: dict[str, Any],
) -> Case:  # fmt: skip
    """One query for each sequence; `sets` of sequences take turns."""
    sequences, length = batch
    sequences = min(sequences, 16) if small() else sequences
    blocks = sets * sequences * -(-length // block) + 3
    layer = layers_of(spec, order, block=block, blocks=blocks)[1]
    _fill(layer, spec)
    tables = _tables(sets * sequences, length, block, blocks, 5).chunk(sets)
    q = torch.randn(sequences, spec.heads * group, spec.head_dim, dtype=BF16, device=DEVICE)
    out = torch.empty_like(q)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=DEVICE)
    ones = torch.ones_like(lengths)

    def call(table: torch.Tensor) -> torch.Tensor:
        return attend(
            layer, spec, q, tables=table, lengths=lengths, queries=ones, out=out, max_queries=1,
            **choice,
        )  # fmt: skip

    def right() -> bool:
        out.fill_(float("nan"))
        call(tables[0])
        for one in torch.linspace(0, sequences - 1, min(sequences, CHECKED)).int().tolist():
            at = torch.arange(length, device=DEVICE)
            k, v = read(layer, spec, tables[0][one, at // block].long() * block + at % block)
            exact = _exact(q[one : one + 1], k, v, spec.head_dim**-0.5)
            if not close(out[one : one + 1], exact, 2e-2 if spec.cache == "auto" else 3e-2):
                return False
        return bool(torch.isfinite(out).all())

    row = sum(layer.page.field(f).nbytes for f in ("k", "v")) // layer.kernel_blocks.size("N")
    return Case([partial(call, table) for table in tables], sequences * length * row, right)


def latent(
    batch: tuple[int, int], cache: str, order: str, unit: str, choice: dict[str, Any]
) -> Case:
    """Absorbed MLA, 128 heads over rows of 512 + 64."""
    sequences, length = batch
    spec, block = LatentAttention(cache=cache), 64
    blocks = sequences * -(-length // block) + 3
    layer = layers_of(spec, order, block=block, blocks=blocks)[1]
    for name in ("latent", "rope"):
        layer.field(name).copy_(torch.randn(layer.field(name).shape, device=DEVICE))
    tables = _tables(sequences, length, block, blocks, 5)
    q = torch.randn(sequences, 128, 576, dtype=BF16, device=DEVICE)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=DEVICE)
    ones, out = torch.ones_like(lengths), q.new_empty(sequences, 128, 512)

    def call() -> torch.Tensor:
        return attend_latent(
            layer, spec, q, tables=tables, lengths=lengths, queries=ones, scale=576**-0.5, out=out,
            max_queries=1, **choice,
        )  # fmt: skip

    def right() -> bool:
        out.fill_(float("nan"))
        call()
        at = torch.arange(length, device=DEVICE)
        for one in (0, sequences - 1):
            where = tables[one, at // block].long(), at % block
            value = layer.latent[where].double()
            key = torch.cat((value, layer.rope[where].double()), -1).unsqueeze(1)
            exact = _exact(q[one : one + 1], key, value.unsqueeze(1), 576**-0.5)
            if not close(out[one : one + 1], exact, 2e-2):
                return False
        return bool(torch.isfinite(out).all())

    # Every state takes part in two products with each of 128 heads.
    each = 2 * 128 * (576 + 512) if unit == "TFLOP/s" else 576 * (1 if cache == "fp8" else 2)
    return Case([call], sequences * length * each, right)


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
    out = torch.empty_like(q)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=DEVICE)

    def call() -> torch.Tensor:
        return attend(
            layer, spec, q, tables=tables, lengths=lengths, queries=lengths, out=out,
            max_queries=length, **choice,
        )  # fmt: skip

    def right() -> bool:
        out.fill_(float("nan"))
        call()
        at = torch.arange(length, device=DEVICE)
        k, v = read(layer, spec, tables[-1, at // block].long() * block + at % block)
        mine, theirs = q[-length:][-2000:, :2], out[-length:][-2000:, :2]
        exact = _exact(mine, k[:, :1], v[:, :1], spec.head_dim**-0.5)
        return close(theirs, exact, 2e-2) and bool(torch.isfinite(out).all())

    work = sequences * prefill_work(length, spec.heads * 4, spec.head_dim)
    return Case([call], work, right)


BIG, MIDDLE, LONG = (64, 8192), (16, 4096), (1, 32768)
BASE = FullAttention(heads=8, head_dim=128)


def cells() -> list[Cell]:
    """The table's figures for attention."""
    found = []
    for batch, ceiling, bar in ((BIG, "dense", 0.92), (MIDDLE, "", 2500), (LONG, "", 1500)):
        found += [
            Cell(
                f"decode {batch[0]} x {batch[1]}, block {block}", order,
                partial(decode, BASE, order, block, batch, 4, 1 if batch == BIG else 2),
                ceiling=ceiling, bar=bar,
            )
            for block in (16, 64)
            for order in ORDERS
        ]  # fmt: skip
    for cache in ("fp8", "int8_per_token_head", "fp8_per_token_head"):
        spec = FullAttention(heads=8, head_dim=128, cache=cache)
        found += [
            Cell(
                f"decode 64 x 8192, {cache}", f"{order}, block {block}",
                partial(decode, spec, order, block, BIG, 4, 1), ceiling="bf16 tokens", bar=1.6,
            )
            for order, block in (("LBNHC", 16), ("LBHNC", 64))
        ]  # fmt: skip
    for cache in ("int4_per_token_head", "nvfp4", "turboquant_4bit_nc"):
        spec = FullAttention(heads=8, head_dim=128, cache=cache)
        found.append(
            Cell(
                f"decode 64 x 8192, {cache}", "LBHNC, block 64",
                partial(decode, spec, "LBHNC", 64, BIG, 4, 1), ceiling="bf16 tokens",
            )
        )  # fmt: skip
    found += [
        Cell(
            f"decode 64 x 8192, {group} query heads to a kv head", f"{order}, block {block}",
            partial(decode, BASE, order, block, BIG, group, 1), ceiling="dense",
        )
        for group in (1, 8, 16)
        for order, block in (("LBNHC", 16), ("LBHNC", 64))
    ]  # fmt: skip
    for dim, heads in ((64, 8), (256, 8)):
        found.append(
            Cell(
                f"decode 64 x 4096, D {dim}", "LBNHC, block 16",
                partial(decode, FullAttention(heads=heads, head_dim=dim), "LBNHC", 16,
                        (64, 4096), 4, 1), ceiling="dense",
            )
        )  # fmt: skip
    for cache in ("auto", "fp8"):
        for unit, ceiling in (("GB/s", "dense"), ("TFLOP/s", "matrix product")):
            found.append(
                Cell(
                    f"decode MLA 64 x 4096, 128 heads, {cache}, {unit}", "LBNHC, block 64",
                    partial(latent, (64, 4096), cache, "LBNHC", unit), unit=unit, ceiling=ceiling,
                )
            )  # fmt: skip
    found += [
        Cell(
            "prefill of 8192 tokens", f"{order}, block {block}",
            partial(prefill, BASE, order, block, (1, 8192)), unit="TFLOP/s", ceiling="flash",
            bar=0.6,
        )
        for order, block in (("LBNHC", 16), ("LBHNC", 64), ("BHLNC", 16))
    ]  # fmt: skip
    found += [
        Cell(
            f"prefill of 8192 tokens, {cache}", "LBNHC, block 16",
            partial(prefill, FullAttention(heads=8, head_dim=128, cache=cache), "LBNHC", 16,
                    (1, 8192)), unit="TFLOP/s", ceiling="flash",
        )
        for cache in (
            "fp8", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4"
        )
    ]  # fmt: skip
    return found
