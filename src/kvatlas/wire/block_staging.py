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

from kvatlas.geometry import Int64s
from kvatlas.routing import RunGrid
from kvatlas.wire.transports.base import Memory
from kvatlas.wire.transports.device_queue import AddressRuns, Posted

STAGED_BYTES = 32 << 20
"""Bytes of the buffer on the GPU."""


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


class BlockStaging:
    """The buffer of one GPU, and the stream on which it is used; any thread may."""

    def __init__(self, queue: Any, room: int = STAGED_BYTES) -> None:
        self.queue, self.room = queue, room
        self._buffer: Any = None
        self._lock = threading.Lock()

    def move(
        self, split: SplitBlocks, gpu: Mapping[int, Memory], host: Mapping[int, Memory],
        block_bytes: Mapping[int, int], *, out: bool,
    ) -> Posted | None:  # fmt: skip
        """Move the pieces, one behind the other; None where there are none."""
        posted = None
        for piece in split.pieces:
            with self._lock:
                if self._buffer is None:
                    self._buffer = self.queue.buffer(self.room)
                base, pool = self._buffer.data_ptr(), host[piece.pool].address
                stretches = [
                    (pool + at, base + to, nbytes)
                    for at, to, nbytes in piece.stretches(block_bytes[piece.pool])
                ]
                device = next(iter(gpu.values())).device
                buffer = {piece.pool: Memory(base, self.room, device)}
                runs = address_runs(piece.grids, *((gpu, buffer) if out else (buffer, gpu)))
                posted = self.queue.staged(runs, stretches, out=out)
        return posted

    def close(self) -> None:
        """Give the stream back; nothing is moved any more."""
        self.queue.close()


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
