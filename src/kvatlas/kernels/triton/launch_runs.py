"""Copies between any two addresses of a device, told as starts and spans: one launch.

Made for caches of other processes, of which there are addresses and no tensors. Offsets
are looked up in two short tables and added by the kernel, so that a gigabyte in a million
runs takes some kilobytes to describe.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvatlas.kernels.triton import tune
from kvatlas.kernels.triton.addresses import VECTOR
from kvatlas.kernels.triton.launch_copy import CopyTiling, tile_of
from kvatlas.kernels.triton.runs_device import copy_run_grid

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class RunTables(NamedTuple):
    """Where runs lie, as a kernel reads it: int64 on the device that copies, in bytes."""

    starts: torch.Tensor
    """[2, starts]: offsets at the source and at the target."""
    spans: torch.Tensor
    """[3, spans]: offsets at either end, and lengths."""
    alignment: int
    """What all offsets, lengths and addresses are a multiple of; a power of two."""
    shortest: int
    longest: int
    starts_first: bool
    """Whether starts that follow each other are nearer than spans that do."""


def copy_runs(
    source: int, target: int, tables: RunTables, programs: int = 0, **choice: Any
) -> None:
    """Copy runs between two addresses on the current stream of the tables' device.

    `programs` are launched at most, where it is not 0. No byte may be written twice, or be
    both read and written.

    >>> import torch
    >>> memory = torch.arange(48, dtype=torch.uint8)
    >>> tables = RunTables(torch.tensor([[0], [0]]), torch.tensor([[32, 0], [0, 16], [16, 8]]),
    ...                    8, 8, 16, True)
    >>> out = torch.zeros(32, dtype=torch.uint8)
    >>> copy_runs(memory.data_ptr(), out.data_ptr(), tables)  # doctest: +SKIP
    """
    device = tables.starts.device
    use = {**tune.choose("copy_runs", device, programs=programs), **choice}
    align = min(tables.alignment, VECTOR)
    word = min(align, 8)
    words = tables.longest // word
    columns, rows = tile_of(words, word, use["tile"])
    count = tables.starts.shape[1] * tables.spans.shape[1]
    tiles = triton.cdiv(count, rows) * triton.cdiv(words, columns)
    tiling = CopyTiling(rows, columns, evict=use["evict"], stages=use["stages"])
    with tune.on(device):
        copy_run_grid[(min(tiles, programs or tiles),)](
            source, target, tables.starts, tables.spans, tables.starts.shape[1],
            tables.spans.shape[1], count, words, WORD=_WORDS[word], UNIT=align // word,
            TILING=tiling, STARTS_FIRST=tables.starts_first,
            WHOLE=tables.shortest == tables.longest and words % columns == 0,
            num_warps=use["warps"],
        )  # fmt: skip
