"""Checks of block ids, block tables and layers, shared by the kernels in torch and in Triton."""

from __future__ import annotations

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.specs import Attention


def check_block(layer: LayerCache, block: int) -> None:
    """Raise an error unless `block`, the block size of the tables, is that of the layer."""
    if layer.block_states != block:
        raise AtlasError(
            Code.CONTRADICTORY,
            f"`block` must be the block size of the layer, {layer.block_states} tokens",
            got=f"{block} tokens",
            hint="Pass the block size and the tables of the layer's group",
        )


def check_appendable(spec: Attention) -> None:
    """Raise an error unless `append_step` supports a layer: its cache must not be quantised."""
    if spec.cache != "auto":
        raise AtlasError(
            Code.NO_KERNEL,
            "append_step does not support quantised layers",
            got=f"cache dtype {spec.cache}",
            hint="Use kernels.write and kernels.read",
        )


def check_pairs(ids: torch.Tensor, places: torch.Tensor) -> None:
    """Raise an error unless `places` has one target block for each source block in `ids`."""
    if ids.numel() != places.numel():
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            "`ids` and `places` must have the same length",
            got=f"{ids.numel()} ids and {places.numel()} places",
            hint="Pass one target block in `places` for each source block in `ids`",
        )


def race(ids: torch.Tensor, places: torch.Tensor, *, twice: bool) -> AtlasError:
    """Return the error for a copy that writes a block twice, or that writes a block it reads.

    `twice` selects the first of these errors.
    """
    return AtlasError(
        Code.OVERLAP,
        f"A copy must not {'write a block twice' if twice else 'read a block that it writes'}",
        got=f"ids {ids.tolist()[:8]} and places {places.tolist()[:8]} (the first 8)",
        hint="Split the copy into two calls",
    )


def check_tables(tables: torch.Tensor) -> None:
    """Raise an error unless `tables` is a tensor of integers with two axes."""
    whole = isinstance(tables, torch.Tensor) and tables.dtype in (torch.int32, torch.int64)
    if not whole or tables.ndim != 2:
        got = type(tables).__name__
        if isinstance(tables, torch.Tensor):
            got = f"{tables.dtype} of shape {tuple(tables.shape)}"
        raise AtlasError(
            Code.BAD_TENSOR,
            "`tables` must be a tensor [sequences, blocks] of int32 or int64",
            got=got,
            hint="Pass the scheduler's block tables as one tensor",
        )
