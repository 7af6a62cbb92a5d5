"""Copy whole blocks between a pinned host pool and a GPU with the GPU's copy engine.

Blocks that are contiguous on the host cross the link unchanged, many at a time, into or out of a
buffer on the GPU. A kernel copies between this buffer and the GPU's pools at the bandwidth of GPU
memory. The link thus carries only long contiguous copies, which is faster
than a kernel that reads across the link.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvatlas.copying.device_queue import AddressRuns, Posted
from kvatlas.copying.memory import Memory
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy

STAGED_BYTES = 32 << 20
"""Size in bytes of each of the two buffers on the GPU."""


@dataclass(frozen=True, eq=False)
class BlockPiece:
    """Whole blocks of one host pool that are copied together to or from a buffer on the GPU."""

    pool: int
    blocks: Int64s
    """Block ids, ascending."""
    grids: list[Copy]
    """The runs between the buffer and the GPU's pools. Buffer offsets replace host offsets."""

    def stretches(self, block_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (pool offset, buffer offset, number of bytes) of each sequence of adjacent blocks.

        >>> piece = BlockPiece(0, np.array([3, 4, 9]), [])
        >>> list(piece.stretches(100))
        [(300, 0, 200), (900, 200, 100)]
        """
        first = np.flatnonzero(np.diff(self.blocks, prepend=-2) != 1)
        counts = np.diff(first, append=len(self.blocks))
        for at, count in zip(first.tolist(), counts.tolist(), strict=True):
            pool_at = int(self.blocks[at]) * block_bytes
            yield pool_at, at * block_bytes, count * block_bytes


class SplitBlocks(NamedTuple):
    """The runs of a copy: whole blocks for the copy engine, and the rest for a kernel."""

    pieces: list[BlockPiece]
    rest: list[Copy]
    """Runs of blocks that move only in part, or that are larger than the buffer."""


def split_blocks(
    grids: Sequence[Copy], block_bytes: Mapping[int, int], *, end: int, room: int
) -> SplitBlocks:
    """Separate the runs of `grids` that make up whole host blocks from all other runs.

    A block is whole if all of its bytes move. Whole blocks are grouped into pieces.
    `block_bytes` maps each host pool to the size of a block in bytes. `end` is 0 if the host is the
    source, 1 if it is the destination. `room` is the maximum size of a piece in bytes.
    """
    split = SplitBlocks([], [])
    for pool in dict.fromkeys(_host_pool(grid, end) for grid in grids):
        own = [grid for grid in grids if _host_pool(grid, end) == pool]
        _split_pool(split, own, pool, block_bytes[pool], end, room)
    return split


def _split_pool(
    split: SplitBlocks, grids: list[Copy], pool: int, size: int, end: int, room: int
) -> None:
    each = room // size
    blocks = [_host_spans(grid, end) // size for grid in grids]
    ids, where = np.unique(np.concatenate(blocks), return_inverse=True)
    moved = [len(grid.starts.source) * grid.length for grid in grids]
    nbytes = np.bincount(where, weights=np.concatenate(moved)).astype(np.int64)
    whole = nbytes == size if each else np.zeros(len(ids), dtype=bool)
    # The index of each span's block among the whole blocks, or -1. A piece has `each` blocks.
    rank = np.where(whole, np.cumsum(whole) - 1, -1)[where]
    ranks = np.split(rank, np.cumsum([len(one) for one in blocks])[:-1])
    own = ids[whole]
    for first in range(0, len(own), max(each, 1)):
        chosen = own[first : first + each]
        parts = []
        for grid, place in zip(grids, ranks, strict=True):
            inside = (place >= first) & (place < first + each)
            if inside.any():
                at = _host_spans(grid, end)[inside] % size + (place[inside] - first) * size
                parts.append(_with_spans(grid, inside, end, at))
        split.pieces.append(BlockPiece(pool, chosen, parts))
    for grid, place in zip(grids, ranks, strict=True):
        left = place < 0
        if left.any():
            split.rest.append(_with_spans(grid, left, end, _host_spans(grid, end)[left]))


def _host_pool(grid: Copy, end: int) -> int:
    return grid.destination_pool if end else grid.source_pool


def _host_spans(grid: Copy, end: int) -> Int64s:
    return grid.destination if end else grid.source


def _with_spans(grid: Copy, chosen: Any, end: int, at: Int64s) -> Copy:
    """Return `grid` with only the `chosen` spans (contiguous byte ranges).

    `at` replaces the offsets of the chosen spans on the host.
    `end` is 0 if the host is the source, 1 if it is the destination.
    """
    source, destination = grid.source[chosen], grid.destination[chosen]
    source, destination = (source, at) if end else (at, destination)
    return replace(grid, source=source, destination=destination, length=grid.length[chosen])


class BlockBuffer:
    """A staging buffer on a GPU, and the queue of copy operations that use the buffer."""

    def __init__(self, queue: Any, room: int) -> None:
        self.queue, self.room = queue, room
        self._buffer: Any = None

    def move(
        self, piece: BlockPiece, gpu: Mapping[int, Memory], pool: int, block_bytes: int, *,
        out: bool,
    ) -> Posted:  # fmt: skip
        """Queue a copy of one piece between the GPU's pools and the host pool at address `pool`.

        The direction is GPU to host if `out` is true, otherwise host to GPU.
        """
        if self._buffer is None:
            self._buffer = self.queue.buffer(self.room)
        base = self._buffer.data_ptr()
        stretches = [
            (pool + at, base + to, nbytes) for at, to, nbytes in piece.stretches(block_bytes)
        ]
        device = next(iter(gpu.values())).device
        buffer = {piece.pool: Memory(base, self.room, device)}
        runs = address_runs(piece.grids, *((gpu, buffer) if out else (buffer, gpu)))
        posted: Posted = self.queue.staged(runs, stretches, out=out)
        return posted


class BlockStaging:
    """The staging buffers of one GPU. Any thread may use them.

    Pieces alternate between the buffers: a kernel uses one buffer while the link uses the other.
    """

    def __init__(self, queues: Sequence[Any], room: int = STAGED_BYTES) -> None:
        """Create one buffer of `room` bytes for each queue; memory is allocated on first use."""
        self._buffers = [BlockBuffer(queue, room) for queue in queues]
        self._used = 0
        self._lock = threading.Lock()

    @property
    def queue(self) -> Any:
        """The first buffer's queue, for work that needs no buffer."""
        return self._buffers[0].queue

    @property
    def room(self) -> int:
        """The maximum size of a piece in bytes."""
        return self._buffers[0].room

    def after_caller(self) -> None:
        """Order later copies after the work that is queued on the caller's current stream."""
        for buffer in self._buffers:
            buffer.queue.after_caller()

    def move(
        self, split: SplitBlocks, gpu: Mapping[int, Memory], host: Mapping[int, Memory],
        block_bytes: Mapping[int, int], under_way: list[Posted], *, out: bool,
    ) -> None:  # fmt: skip
        """Queue one copy operation for each piece, in order.

        Each posted copy is appended to `under_way`, so the caller can wait for it even if a later
        piece fails. The direction is GPU to host if `out` is true, otherwise host to GPU.
        """
        for piece in split.pieces:
            pool, size = host[piece.pool].address, block_bytes[piece.pool]
            with self._lock:
                buffer = self._buffers[self._used % len(self._buffers)]
                self._used += 1
                under_way.append(buffer.move(piece, gpu, pool, size, out=out))

    def close(self) -> None:
        """Close the queues. Nothing can be copied after this."""
        for buffer in self._buffers:
            buffer.queue.close()


def address_runs(
    grids: Sequence[Copy], source: Mapping[int, Memory], destination: Mapping[int, Memory]
) -> list[AddressRuns]:
    """Convert copies between pools to runs between addresses.

    `source` and `destination` map pool indices to memory regions.
    """
    return [
        AddressRuns(
            source[grid.source_pool].address, destination[grid.destination_pool].address,
            (grid.starts.source, grid.starts.destination),
            (grid.source, grid.destination, grid.length),
        )
        for grid in grids
    ]  # fmt: skip
