"""Copy between GPU pools and host pools of one process, when a tier stores or fetches blocks.

If the host pools are pinned, whole blocks cross the link unchanged and a kernel rearranges them for
the GPU's pools (`block_staging`). Blocks that move only in part are read or written across the link
by a kernel with few programs. If the host pools are not pinned (a mapped file, for example), the
bytes pass through two pinned buffers: the link transfers one while the CPU copies the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvatlas.copying.block_staging import BlockStaging, address_runs, split_blocks
from kvatlas.copying.device_queue import Posted
from kvatlas.copying.memory import Memory
from kvatlas.copying.memory_copy import copy_runs_unchecked, split_runs
from kvatlas.copying.movers import PinnedMemory, stream_runs
from kvatlas.copying.run_bounds import Bytes
from kvatlas.routing import Copy
from kvatlas.routing.binding import ORIGIN

_PIECE = 32 << 20
"""The size of a buffer in bytes. `split_runs` limits runs to half of it."""
_OUT = {"programs": 8, "tile": 16384, "warps": 16, "stages": 3}
_IN = {"programs": 32, "tile": 16384, "warps": 16, "stages": 1}
"""Launch options of kernels that access host memory. Reads need more programs to hide latency."""


class GpuOffload:
    """Copies between the GPU pools and the host pools of one rank. Pools are given by index."""

    def __init__(
        self,
        gpu: Mapping[int, Memory],
        host: Mapping[int, Bytes],
        *,
        pinned: bool,
        block_bytes: Mapping[int, int],
        staging: BlockStaging,
    ) -> None:
        """Set up copies between the pools `gpu` and `host`.

        `pinned` is true if all host pools are pinned, so that the GPU can access them.
        `block_bytes` maps each host pool with contiguous blocks to the size of a block in bytes.
        """
        self._gpu, self._host, self.pinned = dict(gpu), dict(host), pinned
        self._block_bytes, self._staging, self._queue = block_bytes, staging, staging.queue

    def store(self, copies: Sequence[Copy]) -> None:
        """Copy from the GPU to the host, after the work queued on the caller's stream."""
        self._move(copies, out=True)

    def fetch(self, copies: Sequence[Copy]) -> None:
        """Copy from the host to the GPU, after the work queued on the caller's stream."""
        self._move(copies, out=False)

    def _move(self, copies: Sequence[Copy], *, out: bool) -> None:
        if not self.pinned:
            self._bounced([copy.expanded() for copy in copies], out=out)
        elif self._block_bytes and all(copy.starts is not ORIGIN for copy in copies):
            self._by_blocks(copies, out=out)
        else:
            self._across_link(copies, out=out)

    def _across_link(self, copies: Sequence[Copy], *, out: bool) -> None:
        """Copy with a kernel that accesses the host's pinned pools over the link.

        The direction is GPU to host if `out` is true, otherwise host to GPU.
        """
        host = self._host_memory()
        runs = address_runs(copies, *((self._gpu, host) if out else (host, self._gpu)))
        self._queue.after_caller()
        self._queue.post(runs, **(_OUT if out else _IN)).wait()

    def _by_blocks(self, copies: Sequence[Copy], *, out: bool) -> None:
        """Copy whole blocks through a GPU buffer, and all other runs with a kernel across the link.

        The direction is GPU to host if `out` is true, otherwise host to GPU. The caller ensures
        that no span (contiguous byte range) crosses a block boundary.
        """
        self._staging.after_caller()
        host = self._host_memory()
        split = split_blocks(copies, self._block_bytes, end=int(out), room=self._staging.room)
        posted: list[Posted] = []
        try:
            self._staging.move(split, self._gpu, host, self._block_bytes, posted, out=out)
            if split.rest:
                ends = (self._gpu, host) if out else (host, self._gpu)
                runs = address_runs(split.rest, *ends)
                posted.append(self._queue.post(runs, **(_OUT if out else _IN)))
        finally:
            for one in posted:
                one.wait()

    def _host_memory(self) -> dict[int, Memory]:
        return {i: Memory(pool.ctypes.data, pool.nbytes) for i, pool in self._host.items()}

    def _bounced(self, copies: Sequence[Copy], *, out: bool) -> None:
        """Copy through two pinned buffers: the link transfers one while the CPU uses the other.

        The direction is GPU to host if `out` is true, otherwise host to GPU.
        """
        self._queue.after_caller()
        pieces = list(_pieces(copies))
        buffers = [self._queue.buffers(min(_PIECE, piece_bytes(pieces))) for _ in "ab"]
        posted: list[Any] = []
        for number, piece in enumerate(pieces):
            here, there = buffers[number % 2]
            if not out:
                if number > 1:
                    posted[number - 2].wait()  # this copy still uses the buffer
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
        """Copy a piece on the CPU, between a pinned buffer and the host's pools.

        The direction is buffer to pools if `out` is true, otherwise pools to buffer.
        """
        stream, done = buffer.numpy(), 0
        for copy in piece:
            at = np.cumsum(copy.length) - copy.length + done
            done += copy.nbytes
            pool = self._host[copy.destination_pool if out else copy.source_pool]
            if out:
                steps = copy_runs_unchecked(stream, pool, at, copy.destination, copy.length)
            else:
                steps = copy_runs_unchecked(pool, stream, copy.source, at, copy.length)
            for _ in steps:
                pass


def piece_bytes(pieces: Sequence[Sequence[Copy]]) -> int:
    """Return the size in bytes of the largest piece. A piece is a list of copy operations."""
    return max((sum(copy.nbytes for copy in piece) for piece in pieces), default=0)


def _pieces(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Split `copies` into pieces of at most `_PIECE` bytes, and yield each piece.

    A piece is a list of copy operations.

    >>> copy = Copy(0, 0, *(np.array(n) for n in ([0, 64], [8, 0], [20 << 20, 30 << 20])))
    >>> [[part.length.tolist() for part in piece] for piece in _pieces([copy])]
    [[[16777216, 4194304]], [[16777216, 14680064]]]
    """
    piece: list[Copy] = []
    room = _PIECE
    for copy in copies:
        if not len(copy):
            continue
        source, destination, length = split_runs(copy.source, copy.destination, copy.length)
        ends = np.cumsum(length)
        first = 0
        while first < len(length):
            begun = int(ends[first] - length[first])
            stop = int(np.searchsorted(ends, begun + room, side="right"))
            if stop > first:
                rows = slice(first, stop)
                piece.append(
                    Copy(
                        copy.source_pool,
                        copy.destination_pool,
                        source[rows],
                        destination[rows],
                        length[rows],
                    )
                )
                room -= int(ends[stop - 1]) - begun
                first = stop
            if first < len(length):
                yield piece
                piece, room = [], _PIECE
    if piece:
        yield piece


class HostPins:
    """Pins host pools for the GPU, each pool once, until `release`."""

    def __init__(self) -> None:
        self._pins: dict[int, PinnedMemory] = {}

    def pin(self, pools: Mapping[int, Bytes]) -> bool:
        """Pin the pools that are not pinned yet. Return whether all of them are pinned now."""
        for pool in pools.values():
            if pool.nbytes and pool.ctypes.data not in self._pins:
                self._pins[pool.ctypes.data] = PinnedMemory(pool)
        return all(pin.held for pin in self._pins.values())

    def release(self) -> None:
        """Unpin all pools."""
        while self._pins:
            self._pins.popitem()[1].release()
