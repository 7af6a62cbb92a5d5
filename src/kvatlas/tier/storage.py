"""`TierStorage`: where a tier's blocks are, in memory or in a file, and how bytes get there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Copy, RunGrid
from kvatlas.routing.converted_stream import CELLS, ConvertedPart
from kvatlas.tier.file import TierFile
from kvatlas.tier.file_pieces import grid_pieces
from kvatlas.tier.index import PartSums, TierBlock
from kvatlas.tier.ingest import Delivery, Ingest, Shape
from kvatlas.tier.request_blocks import NeededBlock
from kvatlas.wire import Memory, Metrics
from kvatlas.wire.block_staging import BlockStaging
from kvatlas.wire.gpu_offload import GpuOffload, HostPins
from kvatlas.wire.memory_copy import copy_pools, gpu_pools, is_on_gpu, rank_pools
from kvatlas.wire.nested_copy import move_pools
from kvatlas.wire.run_bounds import Bytes
from kvatlas.wire.stream_copy import convert_parts
from kvatlas.wire.transports.cuda_driver import load_driver

Carry = Callable[[Sequence[Copy]], None]
"""Carries copies out, by any transport, and returns when all bytes are there."""

StoredPart = tuple[int, Any, tuple[int, int], Mapping[NeededBlock, int]]
"""What is stored: the rank, its blocks, the tokens, and the tier's blocks for them."""

Read = Callable[[Sequence[Any]], None]
"""Carries copies, and between memory also sums of runs, out from a tier."""

Write = Callable[[Sequence[Any]], PartSums | None]
"""The same into a tier; what they add to checksums of blocks, where it is known."""


class TierStorage:
    """The blocks of a tier: pools in memory, or a file, until it is closed."""

    def __init__(
        self,
        pools: Mapping[int, Bytes],
        file: TierFile | None,
        *,
        verify_always: bool,
        plan: Plan | None = None,
    ) -> None:
        """`plan` is the tier's, where its pools have whole blocks of it."""
        self._pools, self._file, self._verify_always = dict(pools), file, verify_always
        sizes = {pool.index: pool.block_bytes for pool in plan.pools} if plan else {}
        self._block_bytes = sizes
        self._staging: dict[int, BlockStaging] = {}
        """By the number of the GPU."""
        self.metrics = Metrics()
        self._pins = HostPins()
        self._idle = threading.Condition()
        self._busy, self._open = 0, True

    @property
    def pools(self) -> dict[int, Bytes]:
        """The blocks' memory, by pool; of a file, what stands for it in a `carry`."""
        return self._pools if self._file is None else self._file.window.pools

    # -- moving bytes -------------------------------------------------------------------

    def writing(self, plan: Plan, rank: int, pools: Mapping[int, Any]) -> Write:
        """From memory that this process can reach, into the tier."""
        if is_on_gpu(pools):
            return self.carried(self.offload(plan, rank, pools).store)
        if self._file is None:
            return lambda moves: move_pools(moves, rank_pools(plan, rank, pools), self._pools)
        write = self._file.write
        return lambda copies: write(copies, rank_pools(plan, rank, pools))

    def store_runs(
        self, ingest: Ingest, about: StoredPart, plan: Plan, pools: Mapping[int, Any]
    ) -> tuple[PartSums, dict[Shape, Delivery]]:
        """Store a rank's part from memory that this process can reach; what it brought.

        Memory takes sums of runs, and so does a file where its stretches are long: fewer
        numbers are made.
        """
        file, rank = self._file, about[0]
        if not is_on_gpu(pools):
            with self.metrics.phase("bind"):
                grids, brought = ingest.grids(*about)
            if file is None:
                return self.carry("store", grids, self.writing(plan, rank, pools)), brought
            if all(map(grid_pieces, grids)):
                held = rank_pools(plan, rank, pools)
                write = partial(file.write_grids, pools=held)
                return self.carry("store", grids, write), brought
        with self.metrics.phase("bind"):
            copies, brought = ingest.copies(*about)
        return self.carry("store", copies, self.writing(plan, rank, pools)), brought

    def takes_sums(self, pools: Mapping[int, Any] | None) -> bool:
        """Whether `reading` takes sums of runs: where they go to this process's memory."""
        return not is_on_gpu(pools)

    def reading(self, plan: Plan, rank: int, pools: Mapping[int, Any]) -> Read:
        """From the tier into memory that this process can reach."""
        if is_on_gpu(pools):
            return self.offload(plan, rank, pools).fetch
        if self._file is None:
            return lambda moves: move_pools(moves, self._pools, rank_pools(plan, rank, pools))
        read = self._file.read_grids
        return lambda grids: read(grids, rank_pools(plan, rank, pools))

    def offload_of_sums(
        self, plan: Plan, rank: int, pools: Mapping[int, Any] | None
    ) -> GpuOffload | None:
        """What moves sums between pools on a GPU and memory that is pinned; None for others."""
        if pools is None or not is_on_gpu(pools):
            return None
        made = self.offload(plan, rank, pools)
        return made if made.pinned and self._block_bytes else None

    def offload(self, plan: Plan, rank: int, pools: Mapping[int, Any]) -> GpuOffload:
        """Between a rank's pools on a GPU and the blocks' memory."""
        memory = gpu_pools(plan, rank, pools)
        # Memory that stands for a file is mostly not there, and shall not be.
        pinned = self._file is None and self._pins.pin(self._pools)
        return self._offload(memory, self.pools, pinned=pinned)

    def _offload(
        self, memory: Mapping[int, Memory], host: Mapping[int, Bytes], *, pinned: bool
    ) -> GpuOffload:
        """Between pools on a GPU and memory of the host."""
        number = next(iter(memory.values())).number
        with self._idle:
            if number not in self._staging:
                driver = load_driver()
                self._staging[number] = BlockStaging([driver.queue(number, 0) for _ in "ab"])
        sizes, staging = self._block_bytes, self._staging[number]
        return GpuOffload(memory, host, pinned=pinned, block_bytes=sizes, staging=staging)

    def carried(self, carry: Carry) -> Write:
        """From anywhere, into the tier's memory; from there into its file."""
        file = self._file
        if file is None:
            return carry

        def through_window(copies: Sequence[Copy]) -> PartSums:
            with file.window.used():
                carry(copies)
                within = [replace(c, src_pool=c.dst_pool, src=c.dst) for c in copies]
                return file.write(within, self.pools)

        return through_window

    def load(self, copies: Sequence[Copy], loaded: ExitStack) -> None:
        """Read what copies take from a file into the memory that stands for it, until `loaded`."""
        file = self._file
        if file is not None:
            loaded.enter_context(file.window.used())
            within = [replace(c, dst_pool=c.src_pool, dst=c.src) for c in copies]
            file.read(within, file.window.pools)

    def carry(self, phase: str, moves: Sequence[Copy | RunGrid], carry: Write) -> PartSums:
        """Carry copies out, and count them; what is known of checksums from it."""
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
        """Convert cells of the tier into a rank's pools; `moved` says where they are instead."""
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
        """Record blocks that have all of their bytes."""
        if self._file is not None and blocks:
            with self.metrics.phase("commit"):
                self._file.commit(blocks)

    def damaged(self, blocks: Sequence[TierBlock]) -> list[TierBlock]:
        """The blocks whose bytes are not those that were stored."""
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
        """Keep it open meanwhile; refused once it is closed."""
        with self._idle:
            if not self._open:
                problem = "The tier is closed"
                raise AtlasError(Code.UNREADABLE, problem, got="a call", hint="Open it again")
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Wait for calls that are under way, then let go."""
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
