"""Runs between two addresses of one device, told as sums of starts and spans.

The memory may be another process's: there are addresses and no tensors. Starts are known
long before a request and are kept on the device; spans come with it and are few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.cast_scales import PlacedScales
from kvatlas.specs import ElementCast

_WIDEST = 16
"""Bytes that are loaded at once, at most."""

Offsets = NDArray[np.int64]


class PlacedStarts(NamedTuple):
    """Offsets at both ends that spans are added to, on the device that copies."""

    table: torch.Tensor
    bits: int
    """All offsets put together bit by bit: its lowest bit is what they are a multiple of."""
    step: int
    """The least that they are apart at the target."""


def place_starts(src: Offsets, dst: Offsets, device: torch.device | str) -> PlacedStarts:
    """Put starts on a device, for as many copies as there will be.

    >>> place_starts(np.array([0, 64]), np.array([0, 96]), "cpu")[1:]
    (96, 96)
    """
    table = np.stack([src, dst])
    step = int(np.abs(np.diff(dst)).min()) if len(dst) > 1 else 0
    bits = int(np.bitwise_or.reduce(table, axis=None))
    return PlacedStarts(_uploaded(table, torch.device(device)), bits, step)


class BlockSpans(NamedTuple):
    """Spans of requests of one shape: where they lie in blocks whose ids come later.

    >>> two = np.arange(2)
    >>> spans = BlockSpans((two, two // 2), (two * 0, two * 32), two * 0 + 32, (64, 128), 9)
    >>> spans.bits, spans.apart
    (224, 32)
    """

    entries: tuple[Offsets, Offsets]
    """Which of the block ids is each one's, at the source and at the target."""
    offsets: tuple[Offsets, Offsets]
    """Where it lies in that block."""
    length: Offsets
    strides: tuple[int, int]
    """Bytes between blocks."""
    blocks: int
    """How many blocks the source has: other ids are taken for the first, and harm nobody."""

    @property
    def bits(self) -> int:
        """All that where spans lie is a sum or a multiple of, put together bit by bit."""
        bits = abs(self.strides[0]) | abs(self.strides[1])
        for numbers in (*self.offsets, self.length):
            bits |= int(np.bitwise_or.reduce(numbers))
        return bits

    @property
    def apart(self) -> int:
        """Bytes that are at least between the first span at the target, and the next."""
        entries, offsets = self.entries[1][:2].tolist(), self.offsets[1][:2].tolist()
        if len(entries) < 2:
            return 0
        inside: int = abs(offsets[1] - offsets[0])
        return inside if entries[0] == entries[1] else max(0, abs(self.strides[1]) - inside)


class RepeatedCopy:
    """Copies between two addresses for requests that differ in their block ids alone.

    All but those is worked out and on the device before: launching one more costs the host some
    microseconds. `ids` are where the block ids of either end will be, as int64: on the device or
    in pinned memory. Copies of one `RepeatedCopy` come one behind the other, on one stream.
    """

    def __init__(
        self,
        ends: tuple[int, int],
        starts: PlacedStarts,
        spans: BlockSpans,
        ids: tuple[torch.Tensor, torch.Tensor],
        programs: int = 0,
    ) -> None:
        self._ends, self._starts, self._ids, self._programs = ends, starts, ids, programs
        self._about = spans.blocks, spans.strides
        rows = np.stack([*spans.offsets, spans.length, *spans.entries, *spans.offsets])
        self._table = _uploaded(rows, starts.table.device)
        every = starts.bits | spans.bits | ends[0] | ends[1]
        sizes = int(spans.length.min()), int(spans.length.max())
        self._tables = (min(_WIDEST, every & -every), *sizes, spans.apart > starts.step)
        self._kernels: list[Any] = []

    def launch(self, stream: Any) -> None:
        """Copy between the blocks whose ids are there by then; the device is the current one."""
        if self._kernels:
            for kernel in self._kernels:
                kernel.launch(stream.cuda_stream)
            return
        triton = _launcher()
        places = triton.SpanPlaces(self._table, *self._about)
        tables = triton.RunTables(self._starts.table, self._table[:3], *self._tables)
        made = [
            triton.place_runs(self._ids, places, stream=stream),
            triton.copy_runs(*self._ends, tables, self._programs, stream=stream),
        ]
        self._kernels = [one for one in made if one is not None]


def _launcher() -> Any:
    """Triton's side of it."""
    try:
        from kvatlas.kernels.triton import launch_runs
    except ModuleNotFoundError as problem:
        hint = "Install kvatlas[triton] where caches are in a GPU's memory"
        raise AtlasError(Code.MISSING_EXTRA, "", got=problem, hint=hint) from problem
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
    """Copy a run for every sum of a start and a span, on a stream, or on the current one.

    `spans` are offsets at the source, at the target, and lengths, in bytes; at most
    `programs` programs are launched where it is not 0. `place` puts a table on the device in
    the order of the stream. Nobody looks whether a run lies in
    memory: that is for who knows the memory. No byte may be written twice.
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
    """The same of elements that change their type on the way: all is counted in elements.

    Both addresses are multiples of an element there. `scales` are those of the starts.
    """
    items = source // cast.source.item | target // cast.target.item
    tables = _tables(starts, spans, items, place)
    if tables is not None:
        about = (cast, scales, programs)
        _launcher().convert_runs(source, target, tables, *about, stream=stream, **choice)


def can_convert(cast: ElementCast, device: torch.device) -> bool:
    """Whether `convert_address_runs` has both types of elements on a device."""
    converts: bool = _launcher().converts(cast, device)
    return converts


def _tables(
    starts: PlacedStarts,
    spans: tuple[Offsets, Offsets, Offsets],
    addresses: int,
    place: Callable[[Offsets], torch.Tensor] | None,
) -> Any:
    """Where runs lie, as a kernel reads it; None where there are none."""
    table = np.array(spans)
    if not table.size or not starts.table.shape[1]:
        return None
    bits = starts.bits | int(np.bitwise_or.reduce(table, axis=None)) | addresses
    dst, length = table[1], table[2]
    apart = abs(int(dst[1]) - int(dst[0])) if len(dst) > 1 else 0
    return _launcher().RunTables(
        starts.table,
        _uploaded(table, starts.table.device) if place is None else place(table),
        alignment=min(_WIDEST, bits & -bits),
        shortest=int(length.min()),
        longest=int(length.max()),
        starts_first=apart > starts.step,
    )


def _uploaded(table: Offsets, device: torch.device) -> torch.Tensor:
    """A table on a device, without waiting for it."""
    tensor = torch.from_numpy(table)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
