"""Append a step's tokens to the cache, and gather all tokens that attention sees.

All layers of a group use the same block tables. `append_step` does the work that depends only on
the step, and returns a function to call for each layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import natural, positive
from kvatlas.kernels.dispatch import gpu_kernels
from kvatlas.kernels.table_checks import check_appendable, check_block, check_tables
from kvatlas.kernels.write_read_kv import read, write
from kvatlas.specs import Attention

AppendStep = Callable[[LayerCache, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function (layer, k, v): stores the new tokens, and returns K and V of all gathered tokens."""


def append_step(
    tables: torch.Tensor, *, block: int, start: int, count: int, first: int = 0, visible: int = 0
) -> AppendStep:
    """Return a function that stores new tokens in a layer and gathers its cached tokens.

    The new tokens are start .. start + count - 1, and the gathered tokens are first .. start +
    count - 1. `tables` [sequences, blocks] contains block ids: the id at index t // `block` is the
    block of token t. K and V are [sequences, heads, tokens, D] in the layer's dtype. The gathered K
    and V have the same axes and are copies. Tokens before `visible`, and tokens whose block id is
    negative, are returned as zeros.

    >>> from kvatlas.cache import allocate
    >>> from kvatlas.planning import plan
    >>> cache = allocate(plan("Qwen3-8B", memory="1GiB", max_len=512))
    >>> tables = torch.tensor([[5, 3], [7, 1]])  # two sequences, in blocks of 16 tokens
    >>> prompt, token = (torch.randn(2, 8, count, 128).bfloat16() for count in (20, 1))
    >>> first_step = append_step(tables, block=16, start=0, count=20)
    >>> second_step = append_step(tables, block=16, start=20, count=1)
    >>> for layer in cache.values():
    ...     _ = first_step(layer, prompt, prompt)
    ...     k, v = second_step(layer, token, token)
    >>> k.shape, k[:, :, :20].equal(prompt), v[:, :, 20:].equal(token)
    (torch.Size([2, 8, 21, 128]), True, True)
    """
    check_tables(tables)
    block, start = positive(block, "the block size"), natural(start, "the start")
    count, first = natural(count, "the number of new tokens"), natural(first, "the first token")
    visible = natural(visible, "the first visible token")
    stop, most = start + count, tables.shape[1] * block
    if max(first, visible) > start:
        raise AtlasError(
            Code.OUT_OF_RANGE,
            f"`first` and `visible` must not exceed `start`, which is {start}",
            got=f"first={first}, visible={visible}",
            hint="Pass the number of cached tokens as `start`",
        )
    if stop > most:
        raise AtlasError(
            Code.OUT_OF_RANGE,
            f"The new tokens must fit in the tables, which cover {most} tokens",
            got=f"start + count = {stop}",
            hint="Allocate blocks for the new tokens first",
        )
    if gpu := gpu_kernels(tables):
        step: AppendStep = gpu.TableAppend(
            tables, block=block, start=start, count=count, first=first, visible=visible
        )
        return step
    tokens = torch.arange(first, stop)
    ids = tables[:, tokens // block]
    slots = (ids * block + tokens % block).masked_fill(ids < 0, -1)
    new, in_sight = slots[:, start - first :].flatten(), slots.clamp(min=0)
    missing = (slots < 0) | (tokens < visible)
    whole = not bool(missing.any())

    def append(
        layer: LayerCache, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_block(layer, block)
        _check_rows(layer, k, v, len(tables), count)
        write(layer, k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1), new)
        pair = read(layer, in_sight.flatten(), dtype=k.dtype)
        keys, values = (torch.unflatten(rows, 0, slots.shape) for rows in pair)
        if not whole:
            keys[missing], values[missing] = 0, 0
        return keys.transpose(1, 2), values.transpose(1, 2)

    return append


def _check_rows(
    layer: LayerCache, k: torch.Tensor, v: torch.Tensor, sequences: int, count: int
) -> None:
    """Raise an error for a quantised layer, or for new K or V rows of the wrong shape or dtype."""
    spec = layer.spec_as(Attention)
    check_appendable(spec)
    heads, dtype = layer.place("k").size("H"), layer.field("k").dtype
    for name, rows, dim in (("k", k, spec.head_dim), ("v", v, spec.v_dim or spec.head_dim)):
        wanted = (sequences, heads, count, dim)
        if tuple(rows.shape) != wanted or rows.dtype != dtype:
            raise AtlasError(
                Code.BAD_TENSOR,
                f"`{name}` must be {dtype} of shape {wanted}",
                got=f"{rows.dtype} of shape {tuple(rows.shape)}",
                hint="Pass the rows of the new tokens in this dtype, or convert with `write`",
            )
