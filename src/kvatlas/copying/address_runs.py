"""Copy runs of contiguous bytes between two addresses of one device.

A start is a pair of offsets, one at the source and one at the target. A span is such a pair and a
length. One run is copied for every combination of a start and a span. At the source and at the
target, a run begins at the sum of the offsets of its start and its span. Starts are known before a
request and stay on the device. Spans come with each request and are few. The memory may belong to
another process, so the functions of this module take addresses instead of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.cast_scales import PlacedScales
from kvatlas.specs.cell_formats import ElementCast

_WIDEST = 16
"""Maximum width of a load, in bytes."""

Offsets = NDArray[np.int64]


class PlacedStarts(NamedTuple):
    """Starts (pairs of a source and a target offset) in the memory of the copying device."""

    table: torch.Tensor
    bits: int
    """Bitwise OR of all offsets; its lowest set bit is their common alignment."""
    step: int
    """The smallest distance between two offsets at the target."""


def place_starts(source: Offsets, destination: Offsets, device: torch.device | str) -> PlacedStarts:
    """Upload starts (pairs of a source and a target offset) to a device, for any number of copies.

    The two numbers in the example are the fields `bits` and `step` of the result.

    >>> place_starts(np.array([0, 64]), np.array([0, 96]), "cpu")[1:]
    (96, 96)
    """
    table = np.stack([source, destination])
    step = int(np.abs(np.diff(destination)).min()) if len(destination) > 1 else 0
    bits = int(np.bitwise_or.reduce(table, axis=None))
    return PlacedStarts(_uploaded(table, torch.device(device)), bits, step)


class BlockSpans(NamedTuple):
    """Spans (byte ranges to copy), each given by its block and its offset in that block.

    A block is given by its index in a request's list of block ids. Requests that differ only in
    block ids therefore share the spans.

    >>> two = np.arange(2)
    >>> spans = BlockSpans((two, two // 2), (two * 0, two * 32), two * 0 + 32, (64, 128), 9)
    >>> spans.bits, spans.apart
    (224, 32)
    """

    entries: tuple[Offsets, Offsets]
    """Index of each span's block in the list of block ids, at the source and at the target."""
    offsets: tuple[Offsets, Offsets]
    """Offset of each span in its block."""
    length: Offsets
    strides: tuple[int, int]
    """Bytes between consecutive blocks, at the source and at the target."""
    blocks: int
    """Number of blocks at the source. A source id that is not in 0..blocks - 1 becomes 0."""

    @property
    def bits(self) -> int:
        """Bitwise OR of all strides, offsets and lengths.

        Its lowest set bit is their common alignment in bytes.
        """
        bits = abs(self.strides[0]) | abs(self.strides[1])
        for numbers in (*self.offsets, self.length):
            bits |= int(np.bitwise_or.reduce(numbers))
        return bits

    @property
    def apart(self) -> int:
        """Distance in bytes between the first two spans at the target.

        If the two spans are in different blocks, the blocks are assumed to be adjacent in memory.
        """
        entries, offsets = self.entries[1][:2].tolist(), self.offsets[1][:2].tolist()
        if len(entries) < 2:
            return 0
        inside: int = abs(offsets[1] - offsets[0])
        return inside if entries[0] == entries[1] else max(0, abs(self.strides[1]) - inside)


class RepeatedCopy:
    """A copy operation between two addresses, repeated for requests that differ only in block ids.

    Everything else is computed and uploaded once, so each later launch costs the host only a few
    microseconds. `ids` are two int64 tensors, on the device or in pinned memory: source block ids
    and target block ids. The caller writes the block ids into these tensors before each launch.
    With `cast`, each element is cast with the scale of its start, and all offsets, strides and
    lengths count elements. All launches of one `RepeatedCopy` must run in order on one stream.
    """

    def __init__(
        self,
        ends: tuple[int, int],
        starts: PlacedStarts,
        spans: BlockSpans,
        ids: tuple[torch.Tensor, torch.Tensor],
        programs: int = 0,
        cast: tuple[ElementCast, PlacedScales] | None = None,
    ) -> None:
        self._ends, self._starts, self._ids, self._programs = ends, starts, ids, programs
        self._cast = cast
        self._about = spans.blocks, spans.strides
        rows = np.stack([*spans.offsets, spans.length, *spans.entries, *spans.offsets])
        self._table = _uploaded(rows, starts.table.device)
        items = (1, 1) if cast is None else (cast[0].source.item, cast[0].target.item)
        every = starts.bits | spans.bits | ends[0] // items[0] | ends[1] // items[1]
        sizes = int(spans.length.min()), int(spans.length.max())
        self._tables = (min(_WIDEST, every & -every), *sizes, spans.apart > starts.step)
        self._kernels: list[Any] = []

    def launch(self, stream: Any) -> None:
        """Launch the copy on `stream`. The kernel reads the block ids from `ids` when it runs."""
        if self._kernels:
            for kernel in self._kernels:
                kernel.launch(stream.cuda_stream)
            return
        triton = _launcher()
        places = triton.SpanPlaces(self._table, *self._about)
        tables = triton.RunTables(self._starts.table, self._table[:3], *self._tables)
        made = [triton.place_runs(self._ids, places, stream=stream)]
        if self._cast is None:
            made.append(triton.copy_runs(*self._ends, tables, self._programs, stream=stream))
        else:
            about = (*self._cast, self._programs)
            made.append(triton.convert_runs(*self._ends, tables, *about, stream=stream))
        self._kernels = [one for one in made if one is not None]


def _launcher() -> Any:
    """Import the Triton launcher; raise `missing_extra` if Triton is not installed."""
    try:
        from kvatlas.kernels.triton import launch_runs
    except ModuleNotFoundError as problem:
        hint = "Install kvatlas[triton] to use caches in GPU memory"
        missing = "Triton is not installed"
        raise AtlasError(Code.MISSING_EXTRA, missing, got=problem, hint=hint) from problem
    return launch_runs


def copy_address_runs(
    source: int,
    target: int,
    starts: PlacedStarts,
    spans: tuple[Offsets, Offsets, Offsets],
    *,
    programs: int = 0,
    stream: Any = None,
    place: Callable[[Offsets], torch.Tensor] | None = None,
    **choice: Any,
) -> None:
    """Copy one run per combination of a start and a span, on `stream` or on the current stream.

    A run begins at the sum of the offsets of its start and its span. `spans` are (source offsets,
    target offsets, lengths), in bytes. `programs` limits the number of Triton programs; 0 means no
    limit. `place` uploads a table to the device in stream order. `choice` overrides the tuned
    launch parameters. Runs are not bounds-checked: the caller must ensure that every run is inside
    memory that it may access. No byte may be written twice.
    """
    tables = _tables(starts, spans, source | target, place)
    if tables is not None:
        _launcher().copy_runs(source, target, tables, programs, stream=stream, **choice)


def convert_address_runs(
    source: int,
    target: int,
    starts: PlacedStarts,
    spans: tuple[Offsets, Offsets, Offsets],
    cast: ElementCast,
    scales: PlacedScales,
    *,
    programs: int = 0,
    stream: Any = None,
    place: Callable[[Offsets], torch.Tensor] | None = None,
    **choice: Any,
) -> None:
    """Copy runs like `copy_address_runs`, and cast each element.

    All offsets and lengths count elements instead of bytes. Each address must be a multiple of its
    element size. `scales` contains the scale of each start.
    """
    items = source // cast.source.item | target // cast.target.item
    tables = _tables(starts, spans, items, place)
    if tables is not None:
        about = (cast, scales, programs)
        _launcher().convert_runs(source, target, tables, *about, stream=stream, **choice)


def can_convert(cast: ElementCast, device: torch.device) -> bool:
    """Return whether `convert_address_runs` supports both element types of `cast` on a device."""
    converts: bool = _launcher().converts(cast, device)
    return converts


def _tables(
    starts: PlacedStarts,
    spans: tuple[Offsets, Offsets, Offsets],
    addresses: int,
    place: Callable[[Offsets], torch.Tensor] | None,
) -> Any:
    """Return starts and spans as the tables that a kernel reads; None if there are no runs."""
    table = np.array(spans)
    if not table.size or not starts.table.shape[1]:
        return None
    bits = starts.bits | int(np.bitwise_or.reduce(table, axis=None)) | addresses
    destination, length = table[1], table[2]
    apart = abs(int(destination[1]) - int(destination[0])) if len(destination) > 1 else 0
    return _launcher().RunTables(
        starts.table,
        _uploaded(table, starts.table.device) if place is None else place(table),
        alignment=min(_WIDEST, bits & -bits),
        shortest=int(length.min()),
        longest=int(length.max()),
        starts_first=apart > starts.step,
    )


def _uploaded(table: Offsets, device: torch.device) -> torch.Tensor:
    """Return a table as a tensor on a device, without waiting for the upload."""
    tensor = torch.from_numpy(table)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
