"""`TierFile`: the open file of a tier.

The file is accessed only through system calls. A failing or full disk and a truncated file are
therefore reported as errors. Direct access to a memory mapping would kill the process instead.
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

import msgspec
import numpy as np

from kvatlas.copying.checksum import crc32
from kvatlas.copying.file_runs import copy_file_runs
from kvatlas.copying.pool_bounds import check_bounds
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.planning import Plan
from kvatlas.routing import Copy
from kvatlas.routing.binding import ORIGIN
from kvatlas.tier.blocks import PartSums, TierBlock
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
from kvatlas.tier.file_pieces import Piece, Rooms, grid_pieces, pieces
from kvatlas.tier.file_reading import RunReader
from kvatlas.tier.file_window import Window
from kvatlas.tier.file_writing import PieceWriter
from kvatlas.tier.format import EMPTY_RECORD, RECORD, RecordFormat
from kvatlas.tier.part_sums import SummedStretches, block_checksum, part_sums
from kvatlas.wire import Memory, memory_of

_RECORDS = 8192
"""Number of records in one read."""
_SUMMING = min(4, os.cpu_count() or 1)
"""Maximum number of cores that read or compute checksums in parallel."""
_AT_ONCE = 256 << 10
"""Bytes per read and checksum update, small enough for the processor's cache."""
_WORTH_A_CORE = 8 << 20
"""Minimum number of bytes to read on an additional core."""
_CUT_SHORT = -1
"""The checksum of a block that is truncated in the file."""

_Work = tuple[Copy, Piece]
"""A copy and one of its pieces."""

T = TypeVar("T")
R = TypeVar("R")


class TierFile:
    """The open file of a tier: it is locked, its disk space is allocated, and its header is valid.

    With `shared`, another process owns the file: that process holds the lock and manages the
    records.
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
            if plan is not None and plan.without_notes() != self.plan.without_notes():
                problem = "The tier's file was created with another plan"
                got = f"{plan}, but the file has {self.plan}"
                hint = "Omit the plan to use that of the file, or use another path"
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
        """Copy from pools in memory into blocks of the file.

        Returns the contributions to block checksums that were computed while writing.
        """
        near = memory_of(pools)
        check_bounds(copies, near, self._places)
        cut = [(copy, self._pieces(copy)) for copy in copies]
        work: list[_Work] = [(copy, piece) for copy, of_copy in cut for piece in of_copy]
        with self._whole_file():
            sums = self._write_pieces(work, pools)
            for copy in (copy for copy, of_copy in cut if not of_copy and len(copy)):
                source, destination, length = copy.runs()
                ends = (
                    near[copy.source_pool].address + source,
                    self._far(copy.destination_pool, destination),
                )
                for _ in copy_file_runs(lambda: self._fd, *ends, length, write=True):
                    pass
        return sums

    def _pieces(self, copy: Copy) -> Sequence[Piece]:
        """Cut a copy into pieces, each moved by one core.

        The result is empty if the copy writes only short contiguous ranges of the file, for which
        separate writes are better.
        """
        if copy.starts is not ORIGIN:
            return grid_pieces(copy)
        return pieces(
            copy.source, copy.destination, copy.length, self._block_bytes[copy.destination_pool]
        )

    def _write_pieces(self, work: Sequence[_Work], pools: Mapping[int, Bytes]) -> PartSums:
        """Write pieces on several cores and return their contributions to block checksums."""
        written = self._on_cores(lambda one: self._write_piece(*one, pools), work)
        sums = {}
        for pool in {move.destination_pool for move, _ in work}:
            pairs = zip(work, written, strict=True)
            stretches = [some for (move, _), some in pairs if move.destination_pool == pool]
            for block_id, part in part_sums(stretches, self._block_bytes[pool]):
                sums[pool, block_id] = part
        return sums

    def _write_piece(self, move: Copy, piece: Piece, pools: Mapping[int, Bytes]) -> SummedStretches:
        offset = self._places[move.destination_pool].address
        return self._writer.write(piece, pools[move.source_pool], offset)

    def read(self, copies: Sequence[Copy], pools: Mapping[int, Bytes]) -> None:
        """Copy from blocks of the file into pools in memory."""
        check_bounds(copies, self._places, memory_of(pools))
        parts = [part for copy in copies for part in _parts(copy)]
        with self._whole_file():
            self._on_cores(lambda part: self._read_part(part, pools), parts)

    def _read_part(self, part: Copy, pools: Mapping[int, Bytes]) -> None:
        far, near, length = part.runs()
        self._reader.read(
            pools[part.destination_pool], near, self._far(part.source_pool, far), length
        )

    def _far(self, pool: int, at: Int64s) -> Int64s:
        """Translate byte offsets in a pool to byte offsets in the file."""
        return self._places[pool].address + at

    def checksums(self, blocks: Sequence[TierBlock]) -> list[int]:
        """Compute the checksums of blocks from their current bytes, on several cores."""
        with refusals(self.path):
            return self._on_cores(self._checksum, blocks)

    def _on_cores(self, act: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Call `act` on each item, on several cores, and return all results in order.

        If a call fails or the caller is interrupted, the error is raised only after all other calls
        have finished. Otherwise they could still write to blocks or memory with new owners.
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
        """Write the records of complete blocks, and flush them to disk if the tier is durable.

        A block is read again if its checksum cannot be combined from the checksums of its parts.
        """
        synced = self._helpers.submit(os.fdatasync, self._fd) if self.durable else None
        with self._whole_file():
            known = [self._summed(block) for block in blocks]
            unknown = [b for b, checksum in zip(blocks, known, strict=True) if checksum is None]
            read = iter(self.checksums(unknown))
            for block, checksum in zip(blocks, known, strict=True):
                block.checksum = next(read) if checksum is None else checksum
            if any(block.checksum == _CUT_SHORT for block in unknown):
                raise OSError(errno.ENODATA, "a truncated file that is too short for its blocks")
            if synced is not None:
                synced.result()
        with self._whole_file():
            for block in blocks:
                write_all(self._fd, self._records.write(block), self._records.place(block))
            if self.durable:
                os.fdatasync(self._fd)

    def _summed(self, block: TierBlock) -> int | None:
        """Return a block's checksum, combined from its parts; None if a part has no checksum."""
        return block_checksum(block.sums.values(), self._block_bytes[block.pool])

    def clear(self, block: TierBlock) -> None:
        """Clear the record of a block, so that the block counts as empty while it is written."""
        with self._whole_file():
            write_all(self._fd, EMPTY_RECORD, self._records.place(block))

    def flush(self) -> None:
        """Flush written and cleared records to disk, if the tier is durable."""
        if self.durable:
            with refusals(self.path):
                os.fdatasync(self._fd)

    def recorded(self) -> Iterator[TierBlock]:
        """Yield the blocks with valid records. Their bytes are not verified yet."""
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
        """Close the file."""
        self._helpers.shutdown()
        self.window.close()
        self._map.close()
        unlock_file(self._fd)
        os.close(self._fd)

    @contextmanager
    def _whole_file(self) -> Iterator[None]:
        """Raise an error if the file has a wrong length at the start or the end of the context.

        Writing to a truncated file would extend it again and leave a hole of zeros.
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
    """Split a copy into smaller copies, one for each core.

    A run of a `Copy` is a pair of a span and a start. Each part has some of the spans with all
    starts or, if there are too few spans, all spans with some of the starts.
    """
    if len(copy.length) >= min(_SUMMING, len(copy.starts.source)):
        for some in _cuts(len(copy.length), copy.nbytes):
            yield replace(
                copy,
                source=copy.source[some],
                destination=copy.destination[some],
                length=copy.length[some],
            )
    else:
        source, destination = copy.starts.ends
        for some in _cuts(len(source), copy.nbytes):
            ends = {"source": source[some], "destination": destination[some]}
            yield replace(copy, starts=msgspec.structs.replace(copy.starts, **ends))


def _cuts(count: int, nbytes: int) -> Iterator[slice]:
    """Yield slices that divide `count` items over several cores.

    `nbytes` is the size of the whole copy. If it is small, there is only one slice.
    """
    if not count:
        return
    parts = min(_SUMMING, count, 1 + nbytes // _WORTH_A_CORE)
    edges = [count * part // parts for part in range(parts + 1)]
    yield from map(slice, edges, edges[1:])


def _let_end(tasks: Sequence[Future[Any]]) -> None:
    """Cancel the tasks that have not started and wait for the running ones, even if interrupted."""
    while True:
        try:
            for task in tasks:
                task.cancel()
            wait(tasks)
        except BaseException:  # noqa: S112
            continue
        return
