"""Checks of block tables that are tensors, for kernels in torch and in Triton."""

from __future__ import annotations

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code


def check_block(layer: LayerCache, block: int) -> None:
    """Raise an error if a layer's block size differs from that of the tables."""
    if layer.block_states != block:
        raise AtlasError(
            Code.CONTRADICTORY,
            "The tables and the layer must have the same block size",
            got=f"{block} tokens in the tables, {layer.block_states} in the layer",
            hint="Append to layers of the group that the tables belong to",
        )


def check_tables(tables: torch.Tensor) -> None:
    """Raise an error unless tables are integers in two axes."""
    whole = isinstance(tables, torch.Tensor) and tables.dtype in (torch.int32, torch.int64)
    if not whole or tables.ndim != 2:
        got = f"{tables.dtype} of shape {tuple(tables.shape)}" if whole else repr(tables)[:80]
        raise AtlasError(
            Code.BAD_TENSOR,
            "Tables must be a tensor of int32 or int64, [sequences, blocks]",
            got=got,
            hint="Pass the scheduler's block tables as one tensor",
        )
