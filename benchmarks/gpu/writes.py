"""Writing new tokens: K and V of a batch into scattered pages, quantised on the way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cells import DEVICE, ORDERS, Cell, layers_of, shuffled
from benchmarks.gpu.replays import Case
from kvatlas.kernels import write as by_torch
from kvatlas.kernels.triton.launch_write import write
from kvatlas.specs import FullAttention

SETS = 6
"""Batches that take turns, so that none is still in the cache when it comes again."""


def new_tokens(
    spec: FullAttention, order: str, block: int, tokens: int, choice: dict[str, Any]
) -> Case:
    """Tokens with slots in runs of a block, as a prefill has them."""
    blocks = SETS * tokens // block + 5
    layers = layers_of(spec, order, block=block, blocks=blocks)
    layer = layers[1]
    ids = shuffled(SETS * tokens // block, blocks, 3).long()
    slots = (ids[:, None] * block + torch.arange(block, device=DEVICE)).view(SETS, tokens)
    shape = (SETS, tokens, spec.heads, spec.head_dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))

    def call(i: int) -> None:
        write(layer, k[i], v[i], slots[i], k_scale=0.5, v_scale=0.5, **choice)

    def right() -> bool:
        """The bytes that torch's kernels write on a CPU, which divides as it should."""
        layer.buffer.fill_(0x3C)
        call(0)
        plain = replace(layer, buffer=torch.full_like(layer.buffer, 0x3C, device="cpu"))
        by_torch(plain, k[0].cpu(), v[0].cpu(), slots[0].cpu(), k_scale=0.5, v_scale=0.5)
        unlike = int((layer.buffer != plain.buffer.to(DEVICE)).sum())
        # A norm that is summed in another order may round to another half.
        return unlike <= (1e-3 * k[0].numel() if spec.cache.startswith("turbo") else 0)

    page = layer.page
    stored = sum(f.nbytes for f in page.fields if not f.padding) // page.states
    work = tokens * (stored + 2 * spec.heads * spec.head_dim * 2)
    return Case([partial(call, i) for i in range(SETS)], work, right)


def cells() -> list[Cell]:
    """8,192 tokens in every order, and every cache dtype in one."""
    table = [
        Cell(
            f"write 8192 tokens, block {block}", order,
            partial(new_tokens, FullAttention(heads=8, head_dim=128), order, block, 8192),
            ceiling="copy", bar=0.8,
        )
        for block in (16, 64)
        for order in ORDERS
    ]  # fmt: skip
    caches = (
        "fp8", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4",
        "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_3bit_nc",
    )  # fmt: skip
    table += [
        Cell(
            "write 8192 tokens, LBNHC, block 16", cache,
            partial(
                new_tokens, FullAttention(heads=8, head_dim=128, cache=cache), "LBNHC", 16, 8192
            ),
            ceiling="copy", bar=0.4 if cache.startswith("turboquant") else 0.6,
        )
        for cache in caches
    ]  # fmt: skip
    return table
