"""`TierFile`: the file of a tier, open.

It is read and written by calls alone: a disk that fails or fills, and a file that somebody
cuts short, are then errors, where a mapping that is touched would end the process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.planning import Plan
from kvatlas.routing import Copy, RunGrid
from kvatlas.tier.file_map import FileMap
from kvatlas.tier.file_opening import (
    allocate,
    check_length,
    create_file,
    open_own,
    read_all,
    read_plan,
    refusals,
    write_all,
)
from kvatlas.tier.file_owner import FileUse, lock_file, unlock_file
from kvatlas.tier.file_pieces import GridPiece, Piece, Rooms, grid_pieces, pieces
from kvatlas.tier.file_reading import RunReader
from kvatlas.tier.file_window import Window
from kvatlas.tier.file_writing import PieceWriter
from kvatlas.tier.format import EMPTY_RECORD, RECORD, RecordFormat
from kvatlas.tier.index import PartSums, TierBlock
from kvatlas.tier.part_sums import SummedStretches, block_checksum, part_sums
from kvatlas.wire import Memory, memory_of
from kvatlas.wire.checksum import crc32
from kvatlas.wire.run_bounds import Bytes
from kvatlas.wire.transports.bounds import check_bounds, check_grid_bounds
from kvatlas.wire.transports.file import copy_file_runs

_RECORDS = 8192
"""Records that are read at once."""
_SUMMING = min(4, os.cpu_count() or 1)
_AT_ONCE = 256 << 10
"""Bytes that are read and summed together: what stays in the processor's cache."""
_WORTH_A_CORE = 8 << 20
"""Bytes of a read that are worth another core."""
_CUT_SHORT = -1
"""The checksum of a block that the file does not have to its end."""

_Work = tuple[Copy | RunGrid, Piece | GridPiece]
"""A piece, and what it is of."""

T = TypeVar("T")
R = TypeVar("R")


class TierFile:
    """A file that is open, locked, allocated, and as sound as its header says.

    With `shared` it is another process's: that has the lock, and sees to the records.
    """

    def __init__(
        self, path: Path, plan: Plan | None, *, durable: bool, shared: bool = False
    ) -> None:
        self.path, self.durable = path.absolute(), durable
        if plan is not None and not path.exists():
            create_file(path, plan)
        self._fd = open_own(path)
        try:
            if not shared:
                lock_file(self._fd, path)
            with refusals(path):
                self.plan, self.identity, self.extent = read_plan(self._fd, path)
            if plan is not None and plan.to_json() != self.plan.to_json():
                problem = "The tier's file was made for another plan"
                got = f"{plan}, not {self.plan}"
                hint = "Leave the plan out, or use another path"
                raise AtlasError(Code.BAD_PLAN, problem, got=got, hint=hint)
            if not shared:
                with refusals(path):
                    allocate(self._fd, self.extent.nbytes)
        except BaseException:
            os.close(self._fd)
            raise
        self._records = RecordFormat(self.plan, self.extent, self.identity)
        self._places = {
            pool.index: Memory(self.extent.pools[pool.index], pool.nbytes)
            for pool in self.plan.pools
        }
        self.window = Window(self._places)
        self.use = FileUse(self._fd)
        self._map = FileMap(self._fd, self.extent.nbytes)
        rooms = Rooms()
        mapped = None if durable else self._map
        self._writer = PieceWriter(self._fd, self.extent.nbytes, mapped, rooms)
        self._reader = RunReader(self._fd, self._map, rooms)
        self._helpers = ThreadPoolExecutor(1 + _SUMMING, thread_name_prefix="kvatlas-tier")
        self._block_bytes = {pool.index: pool.block_bytes for pool in self.plan.pools}

    # -- blocks -------------------------------------------------------------------------

    def write(self, copies: Sequence[Copy], pools: Mapping[int, Bytes]) -> PartSums:
        """Carry copies out from pools in memory into blocks of the file.

        What they add to the checksums of blocks is returned, where it is known from
        writing them.
        """
        near = memory_of(pools)
        check_bounds(copies, near, self._places)
        cut = [(c, pieces(c.src, c.dst, c.length, self._block_bytes[c.dst_pool])) for c in copies]
        work: list[_Work] = [(copy, piece) for copy, of_copy in cut for piece in of_copy]
        with self._whole_file():
            sums = self._write_pieces(work, pools)
            for copy in (copy for copy, of_copy in cut if not of_copy and len(copy)):
                ends = near[copy.src_pool].address + copy.src, self._far(copy.dst_pool, copy.dst)
                for _ in copy_file_runs(lambda: self._fd, *ends, copy.length, write=True):
                    pass
        return sums

    def write_grids(self, grids: Sequence[RunGrid], pools: Mapping[int, Bytes]) -> PartSums:
        """The same of runs that nobody has written out, where `grid_pieces` has some of each."""
        check_grid_bounds(grids, memory_of(pools), self._places)
        with self._whole_file():
            work: list[_Work] = [(grid, piece) for grid in grids for piece in grid_pieces(grid)]
            return self._write_pieces(work, pools)

    def _write_pieces(self, work: Sequence[_Work], pools: Mapping[int, Bytes]) -> PartSums:
        """Write pieces on several cores; what they add to the checksums of blocks."""
        written = self._on_cores(lambda one: self._write_piece(*one, pools), work)
        sums = {}
        for pool in {move.dst_pool for move, _ in work}:
            pairs = zip(work, written, strict=True)
            stretches = [some for (move, _), some in pairs if move.dst_pool == pool]
            for block_id, part in part_sums(stretches, self._block_bytes[pool]):
                sums[pool, block_id] = part
        return sums

    def _write_piece(
        self, move: Copy | RunGrid, piece: Piece | GridPiece, pools: Mapping[int, Bytes]
    ) -> SummedStretches:
        offset = self._places[move.dst_pool].address
        return self._writer.write(piece, pools[move.src_pool], offset)

    def read(self, copies: Sequence[Copy], pools: Mapping[int, Bytes]) -> None:
        """Carry copies out from blocks of the file into pools in memory."""
        check_bounds(copies, self._places, memory_of(pools))
        self._read([part for copy in copies for part in _parts(copy)], pools)

    def read_grids(self, grids: Sequence[RunGrid], pools: Mapping[int, Bytes]) -> None:
        """The same of runs that nobody has written out."""
        grids = [grid for grid in grids if len(grid)]
        check_grid_bounds(grids, self._places, memory_of(pools))
        self._read([part for grid in grids for part in _grid_parts(grid)], pools)

    def _read(self, parts: Sequence[Copy | RunGrid], pools: Mapping[int, Bytes]) -> None:
        with self._whole_file():
            self._on_cores(lambda part: self._read_part(part, pools), parts)

    def _read_part(self, part: Copy | RunGrid, pools: Mapping[int, Bytes]) -> None:
        runs = part.runs() if isinstance(part, RunGrid) else (part.src, part.dst, part.length)
        far, near, length = runs
        self._reader.read(pools[part.dst_pool], near, self._far(part.src_pool, far), length)

    def _far(self, pool: int, at: Int64s) -> Int64s:
        """Offsets of the file from those of a pool."""
        return self._places[pool].address + at

    def checksums(self, blocks: Sequence[TierBlock]) -> list[int]:
        """The checksums of blocks, as their bytes are now; on several cores where there are."""
        with refusals(self.path):
            return self._on_cores(self._checksum, blocks)

    def _on_cores(self, act: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """The results for all items, on several cores where there are several: this is one.

        Where one fails, or the caller is interrupted, that is raised once none is at work any
        more: what the others still wrote would else land in blocks, or in memory, that belong
        to somebody else by then.
        """
        if len(items) < 2:
            return [act(item) for item in items]
        tasks: list[Future[R]] = []
        try:
            tasks.extend(self._helpers.submit(act, item) for item in items[1:])
            return [act(items[0]), *(task.result() for task in tasks)]
        except BaseException:
            _let_end(tasks)
            raise

    def commit(self, blocks: Sequence[TierBlock]) -> None:
        """Write the records of blocks whose bytes are all there, and on the disk where asked.

        Blocks whose checksums do not follow from those of their parts are read for them.
        """
        synced = self._helpers.submit(os.fdatasync, self._fd) if self.durable else None
        with self._whole_file():
            known = [self._summed(block) for block in blocks]
            unknown = [b for b, checksum in zip(blocks, known, strict=True) if checksum is None]
            read = iter(self.checksums(unknown))
            for block, checksum in zip(blocks, known, strict=True):
                block.checksum = next(read) if checksum is None else checksum
            if any(block.checksum == _CUT_SHORT for block in unknown):
                raise OSError(errno.ENODATA, "The file ends before its blocks")
            if synced is not None:
                synced.result()
        with self._whole_file():
            for block in blocks:
                write_all(self._fd, self._records.write(block), self._records.place(block))
            if self.durable:
                os.fdatasync(self._fd)

    def _summed(self, block: TierBlock) -> int | None:
        """The checksum of a block, where all that ranks have brought to it was summed."""
        return block_checksum(block.sums.values(), self._block_bytes[block.pool])

    def clear(self, block: TierBlock) -> None:
        """Say that a block is empty, before anything is written to it."""
        with self._whole_file():
            write_all(self._fd, EMPTY_RECORD, self._records.place(block))

    def recorded(self) -> Iterator[TierBlock]:
        """The blocks that have sound records; their bytes are yet to be verified."""
        for first in range(0, self.extent.blocks, _RECORDS):
            many = min(_RECORDS, self.extent.blocks - first)
            with refusals(self.path):
                text = read_all(self._fd, many * RECORD, self.extent.index + first * RECORD)
            records = np.frombuffer(text, dtype=np.uint8).reshape(-1, RECORD)
            for place in np.flatnonzero(records.any(axis=1)).tolist():
                block = self._records.read(first + place, records[place].tobytes())
                if block is not None:
                    yield block

    def close(self) -> None:
        """Let go of the file."""
        self._helpers.shutdown()
        self.window.close()
        self._map.close()
        unlock_file(self._fd)
        os.close(self._fd)

    @contextmanager
    def _whole_file(self) -> Iterator[None]:
        """Refuse where the file is not as long as it was, before or after something is done.

        Writing to a file that was cut short would make it long again, with zeros in it
        that nobody has stored.
        """
        with refusals(self.path):
            check_length(self._fd, self.path, self.extent)
            yield
            check_length(self._fd, self.path, self.extent)

    def _checksum(self, block: TierBlock) -> int:
        nbytes = self._block_bytes[block.pool]
        start = self.extent.pools[block.pool] + block.block_id * nbytes
        checksum, room = 0, memoryview(bytearray(min(nbytes, _AT_ONCE)))
        at = start
        while at < start + nbytes:
            done = os.preadv(self._fd, [room[: start + nbytes - at]], at)
            if not done:
                return _CUT_SHORT
            checksum = crc32(room[:done], checksum)
            at += done
        return checksum


def _parts(copy: Copy) -> Iterator[Copy]:
    """What each core reads of a copy."""
    for some in _cuts(len(copy), copy.nbytes):
        yield replace(copy, src=copy.src[some], dst=copy.dst[some], length=copy.length[some])


def _grid_parts(grid: RunGrid) -> Iterator[RunGrid]:
    """What each core reads of a grid: some spans, or some starts where spans are too few."""
    if len(grid.length) >= min(_SUMMING, len(grid.starts.src)):
        for some in _cuts(len(grid.length), grid.nbytes):
            yield replace(grid, src=grid.src[some], dst=grid.dst[some], length=grid.length[some])
    else:
        src, dst = grid.starts.ends
        for some in _cuts(len(src), grid.nbytes):
            yield replace(grid, starts=replace(grid.starts, src=src[some], dst=dst[some]))


def _cuts(count: int, nbytes: int) -> Iterator[slice]:
    """Runs in parts for several cores, where they have so many bytes; the first is the caller's."""
    if not count:
        return
    parts = min(_SUMMING, count, 1 + nbytes // _WORTH_A_CORE)
    edges = [count * part // parts for part in range(parts + 1)]
    yield from map(slice, edges, edges[1:])


def _let_end(tasks: Sequence[Future[Any]]) -> None:
    """Wait for tasks that have begun, however often that is interrupted."""
    while True:
        try:
            for task in tasks:
                task.cancel()
            wait(tasks)
        except BaseException:  # noqa: S112
            continue
        return
