"""Copies of runs between two addresses of a device, in one launch (see `address_runs`).

A run is a contiguous range of bytes. The kernel adds two offsets to get the offset of a run: one
from a short table of starts, and one from a short table of spans. A million runs therefore need
only a few kilobytes of tables.
These copies are intended for caches of other processes, which have addresses but no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvatlas.kernels.cast_scales import PlacedScales
from kvatlas.kernels.triton import storage_formats as formats
from kvatlas.kernels.triton import tune
from kvatlas.kernels.triton.addresses import VECTOR
from kvatlas.kernels.triton.launch_copy import tile_of
from kvatlas.kernels.triton.runs_device import convert_run_grid, copy_run_grid, place_spans
from kvatlas.specs.cell_formats import ElementCast

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class RunTables(NamedTuple):
    """Tables of the runs to copy, in the form that kernels read: int64 on the copying device.

    Starts and spans are two kinds of offsets. There is one run for every pair of a start and a
    span, and the run's offset is the sum of both. Offsets and lengths count bytes, or elements if
    the copy casts.
    """

    starts: torch.Tensor
    """[2, starts]: offsets at the source and at the target."""
    spans: torch.Tensor
    """[3, spans]: source offsets, target offsets and lengths."""
    alignment: int
    """Power of two that divides all offsets, lengths and addresses."""
    shortest: int
    longest: int
    starts_first: bool
    """Whether consecutive starts are closer together than consecutive spans."""


class RunTiling(NamedTuple):
    """The division of runs into tiles; a compile-time constant."""

    rows: int
    columns: int
    evict: str
    stages: int
    starts_first: bool
    """Whether consecutive rows use consecutive starts (rather than spans)."""
    whole: bool
    """Whether all runs have the same length, and it is a multiple of a tile's columns."""


def copy_runs(
    source: int, target: int, tables: RunTables, programs: int = 0, *, stream: Any = None,
    **choice: Any,
) -> RunKernel | None:  # fmt: skip
    """Copy the runs in `tables`, whose offsets are relative to the addresses `source` and `target`.

    The copy runs on `stream`, or on the current stream of the device. `programs` limits the number
    of Triton programs; 0 means no limit. No byte may be written twice, or be both read and written.
    A caller that passes `stream` must make its device the current one. Returns a kernel that can
    repeat the launch; None in Triton's interpreter.

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
    whole = tables.shortest == tables.longest and words % columns == 0
    constants = {
        "WORD": _WORDS[word],
        "UNIT": align // word,
        "TILING": RunTiling(rows, columns, use["evict"], use["stages"], tables.starts_first, whole),
    }
    arguments = (
        source, target, tables.starts, tables.spans, tables.starts.shape[1],
        tables.spans.shape[1], count, words,
    )  # fmt: skip
    launch = Launch(copy_run_grid, min(tiles, programs or tiles), arguments, constants)
    return _launch(launch, use["warps"], device, stream)


class CastTypes(NamedTuple):
    """Compile-time constants of a converting copy."""

    source: Any
    target: Any
    """Element types of the source and the target."""
    unit: int
    """Power of two, in elements, that divides all offsets, lengths and addresses."""
    divides: bool
    """Whether to divide by the target's scales instead of multiplying by their inverses."""
    ptx: bool
    """Whether to use PTX; False in Triton's interpreter."""


def convert_runs(
    source: int, target: int, tables: RunTables, cast: ElementCast, scales: PlacedScales,
    programs: int = 0, *, stream: Any = None, **choice: Any,
) -> RunKernel | None:  # fmt: skip
    """Copy runs like `copy_runs`, and cast their elements; offsets and lengths count elements."""
    device = tables.starts.device
    use = {**tune.choose("convert_runs", device, programs=programs), **choice}
    unit, words = min(tables.alignment, VECTOR), tables.longest
    columns, rows = tile_of(words, max(cast.items), use["tile"])
    count = tables.starts.shape[1] * tables.spans.shape[1]
    tiles = triton.cdiv(count, rows) * triton.cdiv(words, columns)
    whole = tables.shortest == words and words % columns == 0
    types = formats.ELEMENTS[cast.source.name], formats.ELEMENTS[cast.target.name]
    constants = {
        "CAST": CastTypes(*types, unit, scales.divides, formats.device_takes_ptx(device)),
        "TILING": RunTiling(rows, columns, use["evict"], use["stages"], tables.starts_first, whole),
    }
    arguments = (
        source, target, tables.starts, tables.spans, scales.table, tables.starts.shape[1],
        tables.spans.shape[1], count, words,
    )  # fmt: skip
    launch = Launch(convert_run_grid, min(tiles, programs or tiles), arguments, constants)
    return _launch(launch, use["warps"], device, stream)


def converts(cast: ElementCast, device: torch.device) -> bool:
    """Return whether a device supports the source and target element types of a cast."""
    names = {cast.source.name, cast.target.name}
    if not names <= set(formats.ELEMENTS):
        return False
    return (
        "e4m3" not in names
        or not formats.device_takes_ptx(device)
        or tune.capability(device) >= formats.E4M3_SINCE
    )


_PLACED_AT_ONCE = 512
"""Spans per program of `place_spans`."""


class SpanPlaces(NamedTuple):
    """Spans (ranges of bytes to copy) with offsets relative to the blocks that contain them.

    `place_runs` adds the offsets of the blocks.
    """

    table: torch.Tensor
    """[7, spans] of int64; see the device function `place_spans`, which reads and writes it."""
    blocks: int
    """Number of blocks at the source."""
    strides: tuple[int, int]
    """Bytes between consecutive blocks, at both ends."""


def place_runs(
    ids: tuple[torch.Tensor, torch.Tensor], places: SpanPlaces, *, stream: Any = None
) -> RunKernel | None:
    """Compute the offsets of spans from block ids, for use by `copy_runs`; launches `place_spans`.

    Pass the stream on which `copy_runs` runs. Returns a kernel that can repeat the launch; None in
    Triton's interpreter.
    """
    count = places.table.shape[1]
    arguments = (*ids, places.table, count, places.blocks, *places.strides)
    programs = triton.cdiv(count, _PLACED_AT_ONCE)
    launch = Launch(place_spans, programs, arguments, {"BLOCK": _PLACED_AT_ONCE})
    return _launch(launch, 4, places.table.device, stream)


class RunKernel(NamedTuple):
    """A kernel that can be launched again with the same arguments."""

    run: Callable[..., None]
    arguments: tuple[Any, ...]

    def launch(self, stream: int) -> None:
        """Launch the kernel again, with the current content of its argument tensors."""
        self.run(*self.arguments, stream=stream)


class Launch(NamedTuple):
    """A kernel with its grid size, arguments and constants."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


_compiled: dict[tuple[object, ...], Any] = {}
"""Compiled kernels, by everything that their compilation depends on; skips Triton's lookup."""


def _launch(what: Launch, warps: int, device: torch.device, stream: Any) -> RunKernel | None:
    # Triton compiles another kernel for integers that need 64 bits, so the key contains that.
    wide = tuple(one >= 1 << 31 for one in what.arguments if isinstance(one, int))
    key = (what.kernel, device, warps, wide, *what.constants.values())
    kernel = None if stream is None else _compiled.get(key)
    known = kernel is not None
    if kernel is None:
        current = nullcontext() if stream is None else torch.cuda.stream(stream)
        with tune.on(device), current:
            launch = what.kernel[(what.programs,)]
            kernel = launch(*what.arguments, **what.constants, num_warps=warps)
        if device.type != "cuda" or kernel is None:
            return None
        _compiled[key] = kernel
    plain = (one if isinstance(one, int) else one.data_ptr() for one in what.arguments)
    made = RunKernel(kernel[what.programs, 1, 1], (*plain, *what.constants.values()))
    if known:
        made.launch(stream.cuda_stream)
    return made
