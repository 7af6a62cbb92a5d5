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


class RepeatedCopy:
    """Copies between two addresses whose spans lie elsewhere each time, and have the same lengths.

    All but that is worked out once: launching one more costs the host some microseconds. `bits`
    are offsets that may come, put together bit by bit, and `apart` the bytes that are at least
    between where a span begins at the target and where the next one does.
    """

    def __init__(
        self,
        source: int,
        target: int,
        starts: PlacedStarts,
        length: Offsets,
        bits: int,
        apart: int,
        programs: int = 0,
    ) -> None:
        self._ends, self._starts, self._programs = (source, target), starts, programs
        self._starts_first = apart > starts.step
        """Whether starts that follow each other are nearer than spans."""
        self._sizes = int(length.min()), int(length.max())
        every = starts.bits | int(np.bitwise_or.reduce(length)) | bits | source | target
        self._alignment = min(_WIDEST, every & -every)
        self._kernel: Any = None

    def launch(self, spans: torch.Tensor, stream: Any) -> None:
        """Copy spans [3, spans] of the device, in an order that suits where they lie.

        The device is the current one, and the spans are at a multiple of 16.
        """
        if self._kernel is not None:
            self._kernel.launch(spans.data_ptr(), stream.cuda_stream)
            return
        run_tables, copy_runs = _launcher()
        first = self._starts_first
        tables = run_tables(
            self._starts.table, spans, self._alignment, *self._sizes, starts_first=first
        )
        self._kernel = copy_runs(*self._ends, tables, self._programs, stream=stream)


def _launcher() -> tuple[Any, Any]:
    """Triton's side of it."""
    try:
        from kvatlas.kernels.triton.launch_runs import RunTables, copy_runs
    except ModuleNotFoundError as problem:
        hint = "Install kvatlas[triton] where caches are in a GPU's memory"
        raise AtlasError(Code.MISSING_EXTRA, "", got=problem, hint=hint) from problem
    return RunTables, copy_runs


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
    run_tables, copy_runs = _launcher()
    table = np.array(spans)
    if not table.size or not starts.table.shape[1]:
        return
    bits = starts.bits | int(np.bitwise_or.reduce(table, axis=None)) | source | target
    dst, length = table[1], table[2]
    apart = abs(int(dst[1]) - int(dst[0])) if len(dst) > 1 else 0
    tables = run_tables(
        starts.table,
        _uploaded(table, starts.table.device) if place is None else place(table),
        alignment=min(_WIDEST, bits & -bits),
        shortest=int(length.min()),
        longest=int(length.max()),
        starts_first=apart > starts.step,
    )
    copy_runs(source, target, tables, programs, stream=stream, **choice)


def _uploaded(table: Offsets, device: torch.device) -> torch.Tensor:
    """A table on a device, without waiting for it."""
    tensor = torch.from_numpy(table)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
