"""Whole blocks of a host's pool on their way to or from a GPU, by the GPU's copy engine.

Blocks that lie in one piece on the host go over the link as they are, many at a time, into a
buffer of the GPU or out of one. A kernel takes the buffer apart, or puts it together, in
whatever order the GPU's own pools have, at the speed of the GPU's memory. So the link carries
long stretches alone, which no kernel that reads across it does as fast.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import RunGrid
from kvatlas.wire.transports.base import Memory
from kvatlas.wire.transports.device_queue import AddressRuns, Posted

STAGED_BYTES = 32 << 20
"""Bytes of each of the two buffers on the GPU."""


@dataclass(frozen=True, eq=False)
class BlockPiece:
    """Some whole blocks of one host pool, which follow each other in the buffer."""

    pool: int
    blocks: Int64s
    """Their ids, ascending."""
    grids: list[RunGrid]
    """What moves, with the buffer at the host's end."""

    def stretches(self, block_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Where blocks that follow each other lie: offsets in the pool and buffer, and bytes.

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
    """What moves, divided by how it goes."""

    pieces: list[BlockPiece]
    rest: list[RunGrid]
    """Of blocks that move in part, or are larger than the buffer."""


def split_blocks(
    grids: Sequence[RunGrid], block_bytes: Mapping[int, int], *, end: int, room: int
) -> SplitBlocks:
    """Divide runs into pieces of whole blocks of the host, and the rest.

    `end` is the host's: 0 for the source, 1 for the destination. A block is whole where every
    one of its bytes moves.
    """
    split = SplitBlocks([], [])
    for pool in dict.fromkeys(_host_pool(grid, end) for grid in grids):
        own = [grid for grid in grids if _host_pool(grid, end) == pool]
        _split_pool(split, own, pool, block_bytes[pool], end, room)
    return split


def _split_pool(
    split: SplitBlocks, grids: list[RunGrid], pool: int, size: int, end: int, room: int
) -> None:
    each = room // size
    blocks = [_host_spans(grid, end) // size for grid in grids]
    ids, where = np.unique(np.concatenate(blocks), return_inverse=True)
    moved = [len(grid.starts.src) * grid.length for grid in grids]
    nbytes = np.bincount(where, weights=np.concatenate(moved)).astype(np.int64)
    whole = nbytes == size if each else np.zeros(len(ids), dtype=bool)
    # Which of the whole blocks a span lies in, -1 for none: pieces have `each` of them.
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


def _host_pool(grid: RunGrid, end: int) -> int:
    return grid.dst_pool if end else grid.src_pool


def _host_spans(grid: RunGrid, end: int) -> Int64s:
    return grid.dst if end else grid.src


def _with_spans(grid: RunGrid, chosen: Any, end: int, at: Int64s) -> RunGrid:
    """Some spans of a grid, which lie elsewhere at one end."""
    src, dst = grid.src[chosen], grid.dst[chosen]
    src, dst = (src, at) if end else (at, dst)
    return replace(grid, src=src, dst=dst, length=grid.length[chosen])


class BlockBuffer:
    """A buffer of a GPU, and the stream on which it is used."""

    def __init__(self, queue: Any, room: int) -> None:
        self.queue, self.room = queue, room
        self._buffer: Any = None

    def move(
        self, piece: BlockPiece, gpu: Mapping[int, Memory], pool: int, block_bytes: int, *,
        out: bool,
    ) -> Posted:  # fmt: skip
        """Move a piece between a GPU's pools and a host's, which begins at an address."""
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
    """The buffers of one GPU; any thread may use them.

    Pieces take them in turn: a kernel sees to one while the link carries the other.
    """

    def __init__(self, queues: Sequence[Any], room: int = STAGED_BYTES) -> None:
        """`room` is that of each; every queue has one."""
        self._buffers = [BlockBuffer(queue, room) for queue in queues]
        self._used = 0
        self._lock = threading.Lock()

    @property
    def queue(self) -> Any:
        """The first one's stream, for what needs no buffer."""
        return self._buffers[0].queue

    @property
    def room(self) -> int:
        """Bytes of a piece, at most."""
        return self._buffers[0].room

    def after_caller(self) -> None:
        """What is moved from now on comes after what the caller's current stream has to do."""
        for buffer in self._buffers:
            buffer.queue.after_caller()

    def move(
        self, split: SplitBlocks, gpu: Mapping[int, Memory], host: Mapping[int, Memory],
        block_bytes: Mapping[int, int], under_way: list[Posted], *, out: bool,
    ) -> None:  # fmt: skip
        """Move one piece after the other; each is `under_way`, also where a later one fails."""
        for piece in split.pieces:
            pool, size = host[piece.pool].address, block_bytes[piece.pool]
            with self._lock:
                buffer = self._buffers[self._used % len(self._buffers)]
                self._used += 1
                under_way.append(buffer.move(piece, gpu, pool, size, out=out))

    def close(self) -> None:
        """Give the streams back; nothing is moved any more."""
        for buffer in self._buffers:
            buffer.queue.close()


def address_runs(
    grids: Sequence[RunGrid], src: Mapping[int, Memory], dst: Mapping[int, Memory]
) -> list[AddressRuns]:
    """Grids between regions, by their addresses."""
    return [
        AddressRuns(
            src[grid.src_pool].address, dst[grid.dst_pool].address,
            (grid.starts.src, grid.starts.dst), (grid.src, grid.dst, grid.length),
        )
        for grid in grids
    ]  # fmt: skip
