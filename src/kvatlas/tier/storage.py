"""`TierStorage`: the blocks of a tier in memory or in a file, and how they are read and written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from kvatlas.tier.blocks import PartSums, TierBlock
from kvatlas.tier.file import TierFile
from kvatlas.tier.file_pieces import grid_pieces
from kvatlas.tier.ingest import Delivery, Ingest, Shape
from kvatlas.tier.request_blocks import NeededBlock
from kvatlas.wire import Memory, Metrics

Carry = Callable[[Sequence[Copy]], None]
"""Executes copies with any transport and returns when all bytes have arrived."""

StoredPart = tuple[int, Any, tuple[int, int], Mapping[NeededBlock, int]]
"""One rank's part of a store: the rank, its blocks, the token range, and the tier's block ids."""

Read = Callable[[Sequence[Any]], None]
"""Executes copies from a tier. Copies between host memory and a tier may have `Copy.starts`."""

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
        self._busy, self._open, self._released = 0, True, False

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

    def store_part(
        self,
        ingest: Ingest,
        about: StoredPart,
        plan: Plan,
        pools: Mapping[int, Any] | None,
        carry: Carry | None = None,
    ) -> tuple[PartSums, dict[Shape, Delivery]]:
        """Copy a rank's part of a request from its pools into the tier, with `carry` if given.

        Returns the known contributions to block checksums, and a `Delivery` for each
        `NeededBlock.shape`: the byte ranges that the rank writes to such a block. The copies use
        spans and starts instead of single runs (see `Copy.starts`). There are three exceptions:
        copies with `carry`, copies from a GPU if the tier's memory is not pinned, and short runs
        into a file.
        """
        rank = about[0]
        offload = None if carry else self.offload_of_sums(plan, rank, pools)
        as_grids = offload is not None or not (carry or is_on_gpu(pools))
        with self.metrics.phase("bind"):
            copies, brought = ingest.copies(*about, as_grids=as_grids)
            if as_grids and self._file is not None and not all(map(grid_pieces, copies)):
                copies, brought = ingest.copies(*about)
        write = self.carried(carry) if carry else self.writing(plan, rank, pools or {})
        return self.carry("store", copies, write), brought

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
                raise closed_error()
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def close(self, timeout: float | None = None) -> bool:
        """Wait for calls in flight, then release the memory or the file.

        If calls are still in flight after `timeout` seconds, release nothing and return False.
        """
        with self._idle:
            self._open = False
            if not self._idle.wait_for(lambda: not self._busy, timeout):
                return False
            released, self._released = self._released, True
        if not released:
            self._pins.release()
            for staging in self._staging.values():
                staging.close()
            self._staging.clear()
            self._pools = {}
            if self._file is not None:
                self._file.close()
        return True


def closed_error() -> AtlasError:
    """Return the error for a call of a tier that is closed."""
    problem, hint = "The tier is closed", "Open the tier again"
    return AtlasError(Code.UNREADABLE, problem, got="a call after close()", hint=hint)
