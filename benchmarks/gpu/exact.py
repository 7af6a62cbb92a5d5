"""Attention in float64, and data in which no state can be left out unseen.

A row of attention is a sum of values, each of which has a share of the row's norm, and the
squares of the shares make 1. Of 8,192 states that are alike each has 1%, too little where
one is at stake; a state that has all of it hides the others. So keys at places where kernels
err are drawn to queries, just so far that they have half of the squares between them: each
of 20 has 15% then, and a page of 16 of the others 3%, where 0.4% is allowed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_TILE = 128
"""States that are whole tiles of any size that is tuned."""
_STRETCH = 32
"""Queries of a prefill of which one is looked at: as many as a program has, of four heads."""
_HEADS = 4
"""Query heads, of those that share a kv head, that one state is drawn to at most."""
_ROWS_AT_ONCE = 64


class Pairs(NamedTuple):
    """Queries and the states that are drawn to them."""

    queries: torch.Tensor
    """Which of them: a number of a sequence, or of a token."""
    states: torch.Tensor
    """Places in the query's sequence."""
    logits: torch.Tensor
    """How far."""


def decoded(sequences: int, length: int, block: int) -> Pairs:
    """For each sequence its ends, both sides of edges of pages and tiles, and others."""
    pages, tiles, others = (
        torch.randint(1, max(2, length // step), (sequences, count)) * step
        for step, count in ((block, 3), (_TILE, 3), (1, 6))
    )
    ends = torch.tensor([0, (length - 1) // block * block, length - 1]).expand(sequences, -1)
    at = torch.cat((ends, pages - 1, pages, tiles - 1, tiles, others), 1).clamp(0, length - 1)
    return _pairs(torch.arange(sequences), at, torch.full((sequences,), length), length)


def prefilled(length: int, block: int) -> tuple[torch.Tensor, Pairs]:
    """Queries of every stretch, the first and the last; what they see last, and must not see."""
    stretches, tiles = (torch.arange(0, length, step) for step in (_STRETCH, _TILE))
    rows = torch.cat(
        (
            stretches + torch.randint(0, _STRETCH, stretches.shape), tiles - 1, tiles,
            torch.arange(8), length - 1 - torch.arange(8),
        )
    )  # fmt: skip
    rows = torch.unique(rows[(rows >= 0) & (rows < length)])
    # One state besides: at an edge of a tile or a page before the query, or anywhere.
    step = torch.tensor([_TILE, block, 1])[torch.randint(0, 3, rows.shape)]
    before = (torch.rand(rows.shape) * (rows // step + 1)).long() * step
    before -= torch.randint(0, 2, rows.shape)
    seen = torch.stack((rows, rows + 1, before), 1)
    return rows, _pairs(rows, seen.clamp(0, length - 1), rows + 1, length)


def _pairs(queries: torch.Tensor, at: torch.Tensor, seen: torch.Tensor, length: int) -> Pairs:
    """All of `at` [queries, states] once, drawn so that they have half of a row."""
    once = torch.unique(queries[:, None] * length + at)
    queries_of, states = once // length, once % length
    # Others' logits are normal, so that the squares of their weights are e**2 on average.
    pull = 1 + 0.5 * (seen / at.shape[1]).clamp(min=1).log()
    return Pairs(queries_of, states, pull[torch.searchsorted(queries, queries_of)].float())


def drawn(k: torch.Tensor, q: torch.Tensor, logits: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Keys k [keys, H, D], each drawn to queries q [pairs, Hq, D], where pair i is of key to[i]."""
    heads, dim = k.shape[1:]
    group = q.shape[1] // heads
    step = math.ceil(group / _HEADS)
    turns = torch.arange(group, device=q.device) % step
    chosen = turns == (torch.arange(len(q), device=q.device) % step)[:, None]
    # A key of `x` times a query has a logit of x * D * D**-0.5 with it.
    pull = q.float() * (logits.to(q.device) * dim**-0.5)[:, None, None]
    pull = (pull.unflatten(1, (heads, group)) * chosen[:, None, :, None]).sum(2)
    return k.float().index_add(0, to, pull)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, last: torch.Tensor
) -> torch.Tensor:
    """Attention of q [T, Hq, D] over k [S, H, D], where query i sees states 0..last[i]."""
    heads = k.shape[1]
    k, v = (rows.double().transpose(0, 1) for rows in (k, v))
    at = torch.arange(k.shape[1], device=q.device)
    attended = []
    for some, ends in zip(*(torch.split(rows, _ROWS_AT_ONCE) for rows in (q, last)), strict=True):
        rows = some.double().unflatten(1, (heads, -1)).permute(1, 0, 2, 3)  # [H, T, group, D]
        logits = (rows.flatten(1, 2) @ k.transpose(1, 2) * scale).view(*rows.shape[:3], -1)
        logits.masked_fill_((at > ends[:, None])[:, None], float("-inf"))
        row = logits.softmax(-1).flatten(1, 2) @ v
        attended.append(row.view(*rows.shape[:3], -1).transpose(0, 1).flatten(1, 2))
    return torch.cat(attended)


def tolerance(cache: str, device: str) -> float:
    """How far attention may be off: a share of the norm of some rows."""
    # What is rounded to bfloat16 is off by 1.7e-3: outputs are, and so are weights before the
    # second product of 16-bit caches, 2.4e-3 in all. int4 turns outputs that were rounded and
    # rounds them again; turboquant rounds queries, levels and values besides. The interpreter
    # cuts off where a chip rounds, which is off by twice as much. Records, elements times scales,
    # are rounded as keys and as values besides.
    more = "int4" in cache or cache == "fp8_ds_mla"
    rounded = 10e-3 if cache.startswith("turboquant") else 6e-3 if more else 4e-3
    return 2 * rounded if device == "cpu" else rounded


def close(rows: torch.Tensor, exact: torch.Tensor, allowed: float) -> bool:
    """Within a share of the norm on the whole, half as much again in a row, all of it written."""
    error = rows.double() - exact
    whole = error.norm() / exact.norm()
    # One state may have most of a row, whose weight is off by twice of what many are.
    row = (error.norm(dim=-1) / exact.norm(dim=-1)).max()
    return bool(torch.isfinite(rows).all()) and bool(whole < allowed) and bool(row < 1.5 * allowed)
