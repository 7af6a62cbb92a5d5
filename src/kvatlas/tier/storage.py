"""`TierStorage`: the blocks of a tier in memory or in a file, and how they are read and written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from kvatlas.copying.block_staging import BlockStaging
from kvatlas.copying.cuda_driver import load_driver
from kvatlas.copying.gpu_offload import GpuOffload, HostPins
from kvatlas.copying.memory_copy import gpu_pools, is_on_gpu, rank_pools
from kvatlas.copying.nested_copy import copy_pools
from kvatlas.copying.run_bounds import Bytes
from kvatlas.copying.stream_pieces import convert_parts
from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Copy
from kvatlas.routing.converted_stream import CELLS, ConvertedPart
from kvatlas.tier.file import TierFile
from kvatlas.tier.file_pieces import grid_pieces
from kvatlas.tier.index import PartSums, TierBlock
from kvatlas.tier.ingest import Delivery, Ingest, Shape
from kvatlas.tier.request_blocks import NeededBlock
from kvatlas.wire import Memory, Metrics

Carry = Callable[[Sequence[Copy]], None]
"""Executes copies with any transport and returns when all bytes have arrived."""

StoredPart = tuple[int, Any, tuple[int, int], Mapping[NeededBlock, int]]
"""One rank's part of a store: the rank, its blocks, the token range, and the tier's block ids."""

Read = Callable[[Sequence[Any]], None]
"""Executes copies from a tier. Copies may have `Copy.starts` if `takes_sums` is true."""

Write = Callable[[Sequence[Any]], PartSums | None]
"""Executes copies into a tier and returns the known contributions to block checksums."""


class TierStorage:
    """The blocks of a tier, in memory or in a file."""

    def __init__(
        self,
        pools: Mapping[int, Bytes],
        file: TierFile | None,
        *,
        verify_always: bool,
        plan: Plan | None = None,
    ) -> None:
        """Keep blocks in `pools`, or in `file`.

        Omit `plan` if the pools contain staged rows with headers instead of the plan's blocks.
        """
        self._pools, self._file, self._verify_always = dict(pools), file, verify_always
        sizes = {pool.index: pool.block_bytes for pool in plan.pools} if plan else {}
        self._block_bytes = sizes
        self._staging: dict[int, BlockStaging] = {}
        """Staging memory by GPU index."""
        self.metrics = Metrics()
        self._pins = HostPins()
        self._idle = threading.Condition()
        self._busy, self._open = 0, True

    @property
    def pools(self) -> dict[int, Bytes]:
        """The memory of the blocks by pool. For a file: the staging memory that `carry` uses."""
        return self._pools if self._file is None else self._file.window.pools

    # -- moving bytes -------------------------------------------------------------------

    def writing(self, plan: Plan, rank: int, pools: Mapping[int, Any]) -> Write:
        """Return a function that copies from the given pools of a rank into the tier."""
        if is_on_gpu(pools):
            return self.carried(self.offload(plan, rank, pools).store)
        if self._file is None:
            return lambda moves: copy_pools(moves, rank_pools(plan, rank, pools), self._pools)
        write = self._file.write
        return lambda copies: write(copies, rank_pools(plan, rank, pools))

    def store_runs(
        self, ingest: Ingest, about: StoredPart, plan: Plan, pools: Mapping[int, Any]
    ) -> tuple[PartSums, dict[Shape, Delivery]]:
        """Copy a rank's part of a request from its pools into the tier.

        Returns the known contributions to block checksums, and a `Delivery` for each
        `NeededBlock.shape`: the byte ranges that the rank writes to such a block. The copies use
        spans and starts instead of single runs (see `Copy.starts`) if the tier is in memory, or if
        its file is written in long contiguous ranges.
        """
        file, rank = self._file, about[0]
        if not is_on_gpu(pools):
            with self.metrics.phase("bind"):
                grids, brought = ingest.grids(*about)
            if file is None:
                return self.carry("store", grids, self.writing(plan, rank, pools)), brought
            if all(map(grid_pieces, grids)):
                write = partial(file.write, pools=rank_pools(plan, rank, pools))
                return self.carry("store", grids, write), brought
        with self.metrics.phase("bind"):
            copies, brought = ingest.copies(*about)
        return self.carry("store", copies, self.writing(plan, rank, pools)), brought

    def takes_sums(self, pools: Mapping[int, Any] | None) -> bool:
        """Return whether `reading` accepts copies with `Copy.starts`: not for GPU pools."""
        return not is_on_gpu(pools)

    def reading(self, plan: Plan, rank: int, pools: Mapping[int, Any]) -> Read:
        """Return a function that copies from the tier into the given pools of a rank."""
        if is_on_gpu(pools):
            return self.offload(plan, rank, pools).fetch
        if self._file is None:
            return lambda moves: copy_pools(moves, self._pools, rank_pools(plan, rank, pools))
        read = self._file.read
        return lambda copies: read(copies, rank_pools(plan, rank, pools))

    def offload_of_sums(
        self, plan: Plan, rank: int, pools: Mapping[int, Any] | None
    ) -> GpuOffload | None:
        """Return the offload between GPU pools and the tier for copies with `Copy.starts`.

        Return None if the pools are not on a GPU or the tier's memory is not pinned.
        """
        if pools is None or not is_on_gpu(pools):
            return None
        made = self.offload(plan, rank, pools)
        return made if made.pinned and self._block_bytes else None

    def offload(self, plan: Plan, rank: int, pools: Mapping[int, Any]) -> GpuOffload:
        """Return the offload that copies between a rank's GPU pools and the tier's host memory."""
        memory = gpu_pools(plan, rank, pools)
        # The staging memory of a file is mostly unallocated. Pinning would allocate all of it.
        pinned = self._file is None and self._pins.pin(self._pools)
        return self._offload(memory, self.pools, pinned=pinned)

    def _offload(
        self, memory: Mapping[int, Memory], host: Mapping[int, Bytes], *, pinned: bool
    ) -> GpuOffload:
        """Return the offload that copies between GPU pools `memory` and host pools `host`."""
        number = next(iter(memory.values())).number
        with self._idle:
            if number not in self._staging:
                driver = load_driver()
                self._staging[number] = BlockStaging([driver.queue(number, 0) for _ in "ab"])
        sizes, staging = self._block_bytes, self._staging[number]
        return GpuOffload(memory, host, pinned=pinned, block_bytes=sizes, staging=staging)

    def carried(self, carry: Carry) -> Write:
        """Return `carry`, or for a tier in a file a function that also writes the file.

        The function copies with `carry` into staging memory, and from there into the file.
        """
        file = self._file
        if file is None:
            return carry

        def through_window(copies: Sequence[Copy]) -> PartSums:
            with file.window.used():
                carry(copies)
                within = [
                    replace(c, source_pool=c.destination_pool, source=c.destination) for c in copies
                ]
                return file.write(within, self.pools)

        return through_window

    def load(self, copies: Sequence[Copy], loaded: ExitStack) -> None:
        """Read the source bytes of copies into staging memory, if the tier is in a file.

        Closing `loaded` releases the staging memory.
        """
        file = self._file
        if file is not None:
            loaded.enter_context(file.window.used())
            within = [
                replace(c, destination_pool=c.source_pool, destination=c.source) for c in copies
            ]
            file.read(within, file.window.pools)

    def carry(self, phase: str, moves: Sequence[Copy], carry: Write) -> PartSums:
        """Execute copies with `carry`, and count their bytes and time under the name `phase`.

        Returns the contributions to block checksums that `carry` has computed.
        """
        with self.metrics.phase(phase):
            known = carry(moves)
        nbytes, descriptors = sum(move.nbytes for move in moves), sum(map(len, moves))
        self.metrics.add(**{f"{phase}_bytes": nbytes}, descriptors=descriptors)
        return known or {}

    def convert(
        self,
        parts: Iterable[ConvertedPart],
        plan: Plan,
        rank: int,
        pools: Mapping[int, Any],
        moved: Callable[[Copy], Copy] | None = None,
    ) -> None:
        """Convert parts of the tier's blocks to another dtype and copy them into a rank's pools.

        `moved` translates copies to the addresses at which the parts are staged.
        """
        file = self._file

        def gather(copies: Sequence[Copy], cells: Bytes) -> None:
            here = [moved(copy) for copy in copies] if moved else copies
            if file is None:
                copy_pools(here, self._pools, {CELLS: cells})
            else:
                file.read(here, {CELLS: cells})

        def scatter(copies: Sequence[Copy], cells: Bytes) -> None:
            if is_on_gpu(pools):
                memory = gpu_pools(plan, rank, pools)
                self._offload(memory, {CELLS: cells}, pinned=False).fetch(copies)
            else:
                copy_pools(copies, {CELLS: cells}, rank_pools(plan, rank, pools))

        with self.metrics.phase("convert"):
            arrived = convert_parts(parts, gather, scatter)
        self.metrics.add(fetch_bytes=arrived, converted_bytes=arrived)

    # -- whole blocks -------------------------------------------------------------------

    def commit(self, blocks: Sequence[TierBlock]) -> None:
        """Write the records of complete blocks to the file, if there is one."""
        if self._file is not None and blocks:
            with self.metrics.phase("commit"):
                self._file.commit(blocks)

    def damaged(self, blocks: Sequence[TierBlock]) -> list[TierBlock]:
        """Verify blocks and return the damaged ones. Only blocks in a file are verified."""
        if self._file is None:
            return []
        doubted = [block for block in blocks if self._verify_always or not block.verified]
        if not doubted:
            return []
        with self.metrics.phase("verify"):
            checksums = self._file.checksums(doubted)
        for block, checksum in zip(doubted, checksums, strict=True):
            block.verified = checksum == block.checksum
        return [block for block in doubted if not block.verified]

    # -- while it is open ---------------------------------------------------------------

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the storage open during the context. Raises an error if it is already closed."""
        with self._idle:
            if not self._open:
                raise AtlasError(
                    Code.UNREADABLE,
                    "The tier is closed",
                    got="a call after close()",
                    hint="Open the tier again",
                )
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Wait for calls in flight, then release the memory or the file."""
        with self._idle:
            was, self._open = self._open, False
            self._idle.wait_for(lambda: not self._busy)
        if was:
            self._pins.release()
            for staging in self._staging.values():
                staging.close()
            self._staging.clear()
            self._pools = {}
            if self._file is not None:
                self._file.close()
