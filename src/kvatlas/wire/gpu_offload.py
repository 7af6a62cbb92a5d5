"""Between pools on a GPU and pools on the host, of one process: what a tier stores and fetches.

Where the host's pools are pinned, a kernel of few programs reads one side and writes the
other, in whatever orders the two have: that fills the link, and leaves the rest of the GPU to
others. Where they are not (memory that stands for a file), pieces go through two pinned
buffers, one on the link while the processor is busy with the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvatlas.routing import Copy
from kvatlas.wire.memory_copy import Bytes, copy_runs, split_runs
from kvatlas.wire.pool_mover import PinnedMemory, stream_runs
from kvatlas.wire.transports.base import Memory
from kvatlas.wire.transports.cuda_driver import CudaDriver, load_driver
from kvatlas.wire.transports.device_queue import NO_STARTS, AddressRuns

_PIECE = 32 << 20
"""Bytes of a buffer; no run is longer than half of it."""
_PROGRAMS = 8
"""Programs that fill the link."""
_CHOICE = {"tile": 16384, "warps": 16, "stages": 3}


class GpuOffload:
    """Copies between GPU pools and host pools, by index."""

    def __init__(
        self,
        gpu: Mapping[int, Memory],
        host: Mapping[int, Bytes],
        *,
        pinned: bool,
        driver: CudaDriver | None = None,
    ) -> None:
        """`pinned` says that the GPU reaches all of the host's pools."""
        self._gpu, self._host, self._pinned = dict(gpu), dict(host), pinned
        number = next(iter(gpu.values())).number
        self._queue: Any = (driver or load_driver()).queue(number, 0)

    def store(self, copies: Sequence[Copy]) -> None:
        """From the GPU to the host, behind what the caller's stream has to do."""
        self._move(copies, out=True)

    def fetch(self, copies: Sequence[Copy]) -> None:
        """From the host to the GPU."""
        self._move(copies, out=False)

    def _move(self, copies: Sequence[Copy], *, out: bool) -> None:
        self._queue.after_caller()
        if self._pinned:
            self._direct(copies, out=out)
        else:
            self._bounced(copies, out=out)

    def _direct(self, copies: Sequence[Copy], *, out: bool) -> None:
        runs = []
        for copy in copies:
            ends = (
                self._gpu[copy.src_pool if out else copy.dst_pool].address,
                int(self._host[copy.dst_pool if out else copy.src_pool].ctypes.data),
            )
            source, target = ends if out else ends[::-1]
            runs.append(AddressRuns(source, target, NO_STARTS, (copy.src, copy.dst, copy.length)))
        self._queue.post(runs, programs=_PROGRAMS, **_CHOICE).wait()

    def _bounced(self, copies: Sequence[Copy], *, out: bool) -> None:
        """Two buffers in turn: the link carries one while the processor sees to the other."""
        pieces = list(_pieces(copies))
        buffers = [self._queue.buffers(min(_PIECE, piece_bytes(pieces))) for _ in "ab"]
        posted: list[Any] = []
        for number, piece in enumerate(pieces):
            here, there = buffers[number % 2]
            if not out:
                if number > 1:
                    posted[number - 2].wait()  # it still reads what is to be overwritten
                self._by_host(piece, here, out=False)
            runs = stream_runs(piece, self._gpu, there.data_ptr(), out=out)
            posted.append(self._queue.through(runs, here, there, piece_bytes([piece]), out=out))
            if out and number:
                posted[number - 1].wait()
                self._by_host(pieces[number - 1], buffers[(number - 1) % 2][0], out=True)
        if posted:
            posted[-1].wait()
        if out and pieces:
            self._by_host(pieces[-1], buffers[(len(pieces) - 1) % 2][0], out=True)

    def _by_host(self, piece: list[Copy], buffer: Any, *, out: bool) -> None:
        """Between a buffer and the host's pools."""
        stream, done = buffer.numpy(), 0
        for copy in piece:
            at = np.cumsum(copy.length) - copy.length + done
            done += copy.nbytes
            pool = self._host[copy.dst_pool if out else copy.src_pool]
            if out:
                steps = copy_runs(stream, pool, at, copy.dst, copy.length)
            else:
                steps = copy_runs(pool, stream, copy.src, at, copy.length)
            for _ in steps:
                pass


def piece_bytes(pieces: Sequence[Sequence[Copy]]) -> int:
    """Bytes of the largest of some pieces."""
    return max((sum(copy.nbytes for copy in piece) for piece in pieces), default=0)


def _pieces(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Copies in pieces that fit into a buffer each.

    >>> copy = Copy(0, 0, *(np.array(n) for n in ([0, 64], [8, 0], [20 << 20, 30 << 20])))
    >>> [[part.length.tolist() for part in piece] for piece in _pieces([copy])]
    [[[16777216, 4194304]], [[16777216, 14680064]]]
    """
    piece: list[Copy] = []
    room = _PIECE
    for copy in copies:
        if not len(copy):
            continue
        src, dst, length = split_runs(copy.src, copy.dst, copy.length)
        ends = np.cumsum(length)
        first = 0
        while first < len(length):
            begun = int(ends[first] - length[first])
            stop = int(np.searchsorted(ends, begun + room, side="right"))
            if stop > first:
                rows = slice(first, stop)
                piece.append(Copy(copy.src_pool, copy.dst_pool, src[rows], dst[rows], length[rows]))
                room -= int(ends[stop - 1]) - begun
                first = stop
            if first < len(length):
                yield piece
                piece, room = [], _PIECE
    if piece:
        yield piece


class HostPins:
    """Host pools that are pinned for the GPU, each once, until they are let go."""

    def __init__(self) -> None:
        self._pins: dict[int, PinnedMemory] = {}

    def pin(self, pools: Mapping[int, Bytes]) -> bool:
        """Pin pools that are not yet; whether all of them are now."""
        for pool in pools.values():
            if pool.nbytes and pool.ctypes.data not in self._pins:
                self._pins[pool.ctypes.data] = PinnedMemory(pool)
        return all(pin.held for pin in self._pins.values())

    def release(self) -> None:
        """Let go of all."""
        while self._pins:
            self._pins.popitem()[1].release()
