"""New tokens of sequences into their pages, and all that attention sees out of them."""

from __future__ import annotations

import torch

from kvatlas.cache import LayerCache
from kvatlas.kernels.dispatch import gpu_kernels
from kvatlas.kernels.write_read_kv import read, write


def append_and_gather(
    layer: LayerCache,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    *,
    start: int,
    first: int = 0,
    visible: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store K and V of new tokens, and return those of all tokens from `first` on.

    `k` and `v` [sequences, heads, tokens, D] are of tokens from `start` on, in the dtype that
    the layer keeps, and what is returned is like them, in memory of its own. Token t of a
    sequence is state t % N of the block that its row of `tables` has at t // N. Tokens before
    `visible` are returned as zeros, and so are those whose block is gone: its id is negative.

    >>> from kvatlas.cache import allocate
    >>> from kvatlas.planning import plan
    >>> cache = allocate(plan("Qwen3-8B", memory="1GiB", max_len=512))
    >>> layer = cache["model.layers.0.self_attn.attn"]
    >>> tables = torch.tensor([[5, 3], [7, 1]])  # two sequences, in blocks of 16 tokens
    >>> prompt, token = (torch.randn(2, 8, count, 128).bfloat16() for count in (20, 1))
    >>> _ = append_and_gather(layer, prompt, prompt, tables, start=0)
    >>> k, v = append_and_gather(layer, token, token, tables, start=20)
    >>> k.shape, k[:, :, :20].equal(prompt), v[:, :, 20:].equal(token)
    (torch.Size([2, 8, 21, 128]), True, True)
    """
    if gpu := gpu_kernels(layer.buffer):
        in_sight: tuple[torch.Tensor, torch.Tensor] = gpu.append_and_gather(
            layer, k, v, tables, start=start, first=first, visible=visible
        )
        return in_sight
    states = layer.kernel_blocks.size("N")
    tokens = torch.arange(first, start + k.shape[2], device=tables.device)
    ids = tables[:, tokens // states]
    slots = (ids * states + tokens % states).masked_fill(ids < 0, -1)
    new = (rows.transpose(1, 2).flatten(0, 1) for rows in (k, v))
    write(layer, *new, slots[:, start - first :].flatten())
    missing = (slots < 0) | (tokens < visible)
    pair = read(layer, slots.clamp(min=0).flatten(), dtype=k.dtype)
    keys, values = (torch.unflatten(rows, 0, slots.shape) for rows in pair)
    if bool(missing.any()):
        keys[missing], values[missing] = 0, 0
    return keys.transpose(1, 2), values.transpose(1, 2)
