"""Copies between any two addresses of a device, told as starts and spans: one launch.

Made for caches of other processes, of which there are addresses and no tensors. Offsets
are looked up in two short tables and added by the kernel, so that a gigabyte in a million
runs takes some kilobytes to describe.
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
from kvatlas.specs import ElementCast

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


class RunTiling(NamedTuple):
    """How runs are cut into tiles: a constant."""

    rows: int
    columns: int
    evict: str
    stages: int
    starts_first: bool
    """Whether rows that follow each other have starts that do, rather than spans."""
    whole: bool
    """Whether all runs are of one length, which fills their tiles."""


def copy_runs(
    source: int, target: int, tables: RunTables, programs: int = 0, *, stream: Any = None,
    **choice: Any,
) -> RunKernel | None:  # fmt: skip
    """Copy runs between two addresses, on a stream of the tables' device or on its current one.

    `programs` are launched at most, where it is not 0. No byte may be written twice, or be
    both read and written. Whoever names a stream has made its device the current one. What is
    returned launches the same again; None where there is no GPU.

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
    """What a converting copy is compiled for."""

    source: Any
    target: Any
    """The types of elements."""
    unit: int
    """Elements that offsets, lengths and addresses are a multiple of."""
    divides: bool
    """Whether scales of the target are divisors."""
    ptx: bool
    """Whether the device takes PTX: not where Triton interprets."""


def convert_runs(
    source: int, target: int, tables: RunTables, cast: ElementCast, scales: PlacedScales,
    programs: int = 0, *, stream: Any = None, **choice: Any,
) -> RunKernel | None:  # fmt: skip
    """The same as `copy_runs` of elements that change their type: all is counted in elements."""
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
    """Whether a device has the types of both ends."""
    names = {cast.source.name, cast.target.name}
    if not names <= set(formats.ELEMENTS):
        return False
    return (
        "e4m3" not in names
        or not formats.device_takes_ptx(device)
        or tune.capability(device) >= formats.E4M3_SINCE
    )


_PLACED_AT_ONCE = 512
"""Spans that a program places."""


class SpanPlaces(NamedTuple):
    """Where spans lie in blocks whose ids come later."""

    table: torch.Tensor
    """[7, spans] of int64: what `place_spans` writes, and reads."""
    blocks: int
    """How many blocks the source has."""
    strides: tuple[int, int]
    """Bytes between blocks, at either end."""


def place_runs(
    ids: tuple[torch.Tensor, torch.Tensor], places: SpanPlaces, *, stream: Any = None
) -> RunKernel | None:
    """Write where spans lie, from the block ids of either end; the same device as `copy_runs`."""
    count = places.table.shape[1]
    arguments = (*ids, places.table, count, places.blocks, *places.strides)
    programs = triton.cdiv(count, _PLACED_AT_ONCE)
    launch = Launch(place_spans, programs, arguments, {"BLOCK": _PLACED_AT_ONCE})
    return _launch(launch, 4, places.table.device, stream)


class RunKernel(NamedTuple):
    """A kernel that was launched, to be launched again with all arguments as they were."""

    run: Callable[..., None]
    arguments: tuple[Any, ...]

    def launch(self, stream: int) -> None:
        """Launch it again: what lies where its arguments say may have changed."""
        self.run(*self.arguments, stream=stream)


class Launch(NamedTuple):
    """What is launched."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


_compiled: dict[tuple[object, ...], Any] = {}
"""Kernels that are launched again without being looked up, by all that they depend on."""


def _launch(what: Launch, warps: int, device: torch.device, stream: Any) -> RunKernel | None:
    # Numbers are handed over in 32 bits where they fit; nothing else of them matters.
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
