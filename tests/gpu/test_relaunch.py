"""Kernels that are launched again are those that Triton would find, with the call's own tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.runtime import jit

from kvatlas.kernels.triton import attend, attend_latent, schedule, split_of, write
from kvatlas.specs import FullAttention, LatentAttention
from tests.kernels.triton.cases import Pool

BLOCK, BLOCKS, HEADS = 16, 64, 8
SPECS: dict[str, Any] = {
    "bf16": FullAttention(heads=2, head_dim=128),
    "int8": FullAttention(heads=2, head_dim=128, cache="int8_per_token_head"),
    "int4": FullAttention(heads=2, head_dim=128, cache="int4_per_token_head"),
    "latents": LatentAttention(),
}


def batch_of(count: int, shift: int, prefill: bool, seed: int) -> dict[str, Any]:
    """Sequences of 2 blocks each; tensors that start `shift` elements behind an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(BLOCKS, (count * 3 + shift,), generator=generator, dtype=torch.int32)
    queries = torch.ones(count, dtype=torch.int32)
    if prefill:
        queries[0] = 30
    lengths = torch.randint(30, 33, (count + shift,), generator=generator, dtype=torch.int32)
    return {
        "tables": memory.cuda()[shift:].view(count, 3)[:, :2],
        "lengths": lengths.cuda()[shift:],
        "queries": queries.cuda(),
    }


@pytest.mark.parametrize("name", list(SPECS))
def test_calls_that_launch_again_agree_with_those_that_ask_triton(name: str) -> None:
    spec = SPECS[name]
    layer = Pool(spec, "LBNHC", "cuda", block=BLOCK, blocks=BLOCKS).layer
    layer.buffer.copy_(torch.randint(60, layer.buffer.shape, dtype=torch.uint8))
    dim, more = 128, {}
    act: Any = attend
    if name == "latents":
        dim, more, act = 576, {"scale": 0.1}, attend_latent
    cases = [(3, 1, False), (16, 0, False)]
    if name == "bf16":
        cases += [(1, 0, False), (17, 0, False), (3, 0, True)]
    for seed in range(3):
        for count, shift, prefill in cases:
            batch = batch_of(count, shift, prefill, seed)
            batch["max_queries"] = None if prefill else 1
            q = torch.randn(int(batch["queries"].sum()), HEADS, dim, dtype=torch.bfloat16).cuda()
            if seed:
                # Rotations are launched by Triton's own way; all else must be known by now.
                run = jit.JITFunction.run if name == "int4" else None
                with patch.object(jit.JITFunction, "run", run):
                    mine = act(layer, q, **batch, **more)
            else:
                mine = act(layer, q, **batch, **more)
            assert mine.equal(act(replace(layer), q, **batch, **more)), (count, shift, prefill)


def test_rows_that_are_written_again_are_those_of_the_call() -> None:
    pool, other = (
        Pool(SPECS["int8"], "LBNHC", "cuda", block=BLOCK, blocks=BLOCKS) for _ in range(2)
    )
    for seed in range(3):
        for count, shift in ((1, 0), (5, 1), (32, 0), (33, 0)):
            generator = torch.Generator().manual_seed(seed)
            slots = torch.randperm(BLOCK * BLOCKS, generator=generator)[: count + shift].cuda()[
                shift:
            ]
            k, v = torch.randn(2, count, 2, 128, generator=generator).bfloat16().cuda()
            run = None if seed else jit.JITFunction.run
            with patch.object(jit.JITFunction, "run", run):
                write(pool.layer, k, v, slots)
            write(replace(other.layer), k, v, slots)
            assert pool.raw.equal(other.raw), (seed, count, shift)


def test_a_prepared_call_launches_again_and_allocates_nothing() -> None:
    layer = Pool(SPECS["bf16"], "LBNHC", "cuda", block=BLOCK, blocks=BLOCKS).layer
    layer.buffer.copy_(torch.randint(60, layer.buffer.shape, dtype=torch.uint8))
    batch = batch_of(16, 0, prefill=False, seed=1)
    q = torch.randn(16, HEADS, 128, dtype=torch.bfloat16).cuda()
    want = attend(layer, q, max_queries=1, **batch)
    plan = schedule(split_of(layer, HEADS, max_queries=1), batch["lengths"], batch.pop("queries"))
    out = torch.empty_like(q)
    attend(layer, q, max_queries=1, prepared=plan, out=out, **batch)
    out.zero_()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with patch.object(jit.JITFunction, "run", None):
        attend(layer, q, max_queries=1, prepared=plan, out=out, **batch)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert out.equal(want)
