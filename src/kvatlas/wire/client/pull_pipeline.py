"""The pull pipeline: workers read a stream piece by piece, and write the pieces to the blocks.

All pulls use one loop. A worker takes the next piece and prepares it; only one worker at a time may
do so. The worker then reads the piece. If the piece was read into a staging buffer, the worker
scatters it into the blocks. The ways to move a stream differ only in their pieces:

- `direct`: one descriptor per run, from the source's pools into the blocks, in batches. If the
  transport computes the runs on a GPU, there is one piece, and the GPU may also cast elements.
- `coalesced`: adjacent runs are read as one run into a staging buffer of this node. Runs are often
  short only because the two layouts differ; at the source most of them are adjacent. The source
  does no work.
- `staged`: the source gathers the piece into its staging buffer, and then this node reads it into
  its own staging buffer. Pieces must be gathered in order.

Each worker has its own staging buffer. One worker reads while another scatters, or while the source
gathers a piece for another worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvatlas.copying.read_coalescing import CoalescedBatch, coalesced_batches
from kvatlas.copying.stream_pieces import DESTINATION, AnyStream, StreamPiece, piece_spans
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import ConvertedStream, Copy, Stream
from kvatlas.wire import protocol
from kvatlas.wire.byte_ranges import ByteRanges, source_ranges
from kvatlas.wire.client.connections import Way
from kvatlas.wire.client.rank_reads import RankReads

_BATCH = 64 << 20
"""The maximum bytes of a piece in a direct pull.

Progress is reported, and cancellation is checked, after each piece.
"""

_BATCH_RUNS = 1 << 20
"""The approximate maximum number of runs of a piece in a direct pull. Each run takes memory."""

_LOOK_SECONDS = 0.05
"""Seconds within which the end of a transfer is noticed while the peer gathers."""

T = TypeVar("T")
Arrived = Callable[[int, int, Any], None]
"""Called with the start and stop of each converted piece, and its bytes as they were sent."""


class PullPiece(NamedTuple):
    """A part of a stream that one operation reads."""

    prepare: Callable[[int], Sequence[Copy]]
    """Called with a worker's number. Returns the runs to read, once the source has them ready."""
    place: Callable[[int], int]
    """Called with a worker's number after its read. Writes the bytes to their blocks.

    Returns the number of bytes that arrived.
    """


class _Plan(NamedTuple):
    """The pieces of a stream, and how they are read."""

    phase: str
    pieces: Iterator[PullPiece]
    read: Callable[[Sequence[Copy]], None]
    workers: int = 1


class PullPipeline:
    """Moves the bytes of one transfer, after the source's GPU event `after_event` completes.

    For a converted stream, `arrived` is called for each piece that the source has gathered.
    """

    def __init__(
        self,
        reads: RankReads,
        stream: AnyStream,
        way: Way,
        after_event: int | None,
        arrived: Arrived,
    ) -> None:
        self._reads, self._stream, self._arrived = reads, stream, arrived
        self._lease, self._node, self._transfer = reads.lease, reads.node, reads.transfer
        self._gathers = way == "staged"
        self._taking = threading.Lock()
        """Held by the worker that takes and prepares a piece, so that pieces are in order."""
        self._moving = threading.Lock() if self._gathers else nullcontext()
        """Held by the worker that reads and places a staged piece, while the source gathers."""
        self._changed = threading.Condition()
        """Guards the fields below. It is taken after the other locks."""
        self._busy = 0
        """Workers that read or place a piece, and so use blocks and buffers."""
        self._over = False
        self._failure: BaseException | None = None
        self._plan = self._planned(way, after_event)

    def run(self) -> None:
        """Move the stream. Return or raise only after all workers have stopped."""
        # A peer that gathers may never answer. The calling thread must notice the end of the
        # transfer nevertheless, so for staged pulls it only waits.
        others = range(0 if self._gathers else 1, self._plan.workers)
        for nth in others:
            self._lease.connection.background.submit(self._work, nth)
        if not self._gathers:
            self._work(0)
        self._wait_for_workers()
        if self._failure is not None:
            raise self._failure
        self._transfer.check_cancelled()

    # -- workers ----------------------------------------------------------------------------

    def _work(self, nth: int) -> None:
        """Move pieces until none is left, or this worker is no longer needed."""
        try:
            while self._is_needed(nth) and (taken := self._take(nth)) is not None:
                try:
                    self._move(*taken, nth)
                finally:
                    with self._changed:
                        self._busy -= 1
                        self._changed.notify_all()
        except BaseException as failure:
            self._end(failure)

    def _is_needed(self, nth: int) -> bool:
        """Whether worker `nth` may take a piece. `scatter_threads` may shrink during a transfer."""
        return not nth or self._gathers or nth < self._node.scatter_threads

    def _take(self, nth: int) -> tuple[PullPiece, Sequence[Copy]] | None:
        """Return (next piece, copies that read it) for worker `nth`; None if no piece is left."""
        while not self._taking.acquire(timeout=_LOOK_SECONDS):
            self._transfer.check_cancelled()
        try:
            if self._over:
                return None
            self._transfer.check_cancelled()
            self._lease.renew_in_time()
            piece = next(self._plan.pieces, None)
            if piece is None:
                self._end()
                return None
            copies = piece.prepare(nth)
            with self._changed:
                if self._over:  # while the source gathered: the caller no longer waits
                    return None
                self._busy += 1
            return piece, copies
        finally:
            self._taking.release()

    def _move(self, piece: PullPiece, copies: Sequence[Copy], nth: int) -> None:
        with self._moving:
            if self._failure is not None:
                return
            self._transfer.check_cancelled()
            with self._node.metrics.phase(self._plan.phase):
                self._plan.read(copies)
                arrived = piece.place(nth)
        self._transfer.add(self._lease.rank, arrived)

    def _end(self, failure: BaseException | None = None) -> None:
        """Keep workers from taking another piece. Store `failure` unless one is already stored."""
        with self._changed:
            self._over, self._failure = True, self._failure or failure
            self._changed.notify_all()

    def _wait_for_workers(self) -> None:
        """Wait until all pieces are in place or the transfer has ended, and no worker is busy."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._over, _LOOK_SECONDS):
                self._over = self._transfer.done
            self._changed.wait_for(lambda: not self._busy)

    # -- pieces -----------------------------------------------------------------------------

    def _planned(self, way: Way, after_event: int | None) -> _Plan:
        """Return the pieces of the stream, after acquiring the buffers that they need."""
        reads, stream = self._reads, self._stream
        if way == "staged":
            if not reads.borrow(both=True):
                raise self._no_buffers()
            workers = min(len(reads.buffers), len(self._lease.lent))
            return _Plan("staged", self._staged(), reads.read_lent, workers)
        at_once = partial(reads.read_at_once, after=after_event)
        if isinstance(stream, ConvertedStream):
            return _Plan("converted", self._at_once(), at_once)
        if self._lease.connection.link.adds and way == "direct":
            return _Plan("direct", self._at_once(), at_once)
        if way == "coalesced":
            reads.borrow(both=False)
            read = partial(reads.read, into="buffers")
            return _Plan("coalesced", self._coalesced(stream), read, len(reads.buffers))
        return _Plan("direct", self._direct(stream), partial(reads.read, into="blocks"))

    def _no_buffers(self) -> AtlasError:
        here, there = self._node.staging.most(), "some" if self._lease.opened.piece else "no"
        return AtlasError(
            Code.TOO_MANY,
            "A staged transfer needs staging buffers at both ends",
            got=f"{here} buffers at this node, {there} buffers at the peer",
            hint='Pass a larger buffers= to both nodes, or use how="auto"',
        )

    def _direct(self, stream: Stream) -> Iterator[PullPiece]:
        total, piece = stream.nbytes, piece_bytes(stream)
        for start in range(0, total, piece):
            stop = min(total, start + piece)
            copies = stream.copies(start, stop)
            self._reads.count(sum(map(len, copies)))
            yield PullPiece(partial(_same, copies), partial(_same, stop - start))

    def _at_once(self) -> Iterator[PullPiece]:
        """Yield a single piece with all runs. The GPU computes the runs, and may cast elements."""
        stream, copies = self._stream, self._stream.grids() or []
        self._reads.count(sum(map(len, copies)))
        arriving = stream.nbytes if isinstance(stream, Stream) else stream.arriving
        yield PullPiece(partial(_same, copies), partial(_same, arriving))
        if isinstance(stream, ConvertedStream):
            self._node.metrics.add(gpu_converted_bytes=arriving)

    def _coalesced(self, stream: Stream) -> Iterator[PullPiece]:
        self._reads.count(stream.runs_apart)
        # If the peer does not serve the bytes between the runs, they are not read.
        exact = source_ranges(stream) if self._lease.connection.link.exact else None
        for batch in coalesced_batches(stream.grids(), self._node.staging.piece):
            yield PullPiece(partial(self._joined, batch, exact), partial(self._spread, batch))

    def _joined(
        self, batch: CoalescedBatch, exact: dict[int, ByteRanges] | None, nth: int
    ) -> list[Copy]:
        """Return the runs to read from the source's pool into a worker's staging buffer.

        Adjacent runs are joined. If `exact` is given, bytes outside of these ranges are not read.
        """
        read = batch.read(self._reads.buffers[nth] * self._node.staging.piece)
        return [read if exact is None else exact[read.source_pool].clip(read)]

    def _spread(self, batch: CoalescedBatch, nth: int) -> int:
        """Scatter a batch from a worker's buffer into the blocks. Return the number of bytes."""
        staging = self._node.staging
        here = staging.view(self._reads.buffers[nth], staging.piece)
        for one in batch.placing:
            one.carry_out(here, self._node.pools)
        return batch.nbytes

    def _staged(self) -> Iterator[PullPiece]:
        piece = min(self._node.staging.piece, self._lease.opened.piece)
        for span in piece_spans(self._stream, piece):
            yield PullPiece(partial(self._gather, *span), partial(self._scatter, *span))

    def _gather(self, start: int, stop: int, nth: int) -> list[Copy]:
        """Have the source gather bytes `start .. stop - 1` of the stream into its staging buffer.

        Return the runs to read from that buffer into the buffer of worker `nth`.
        """
        about = {"start": start, "stop": stop, "buffer": self._lease.lent[nth]}
        self._lease.ask_of_lease(protocol.Gather, protocol.Ok, **about)
        return [self._reads.staging_copy(nth, stop - start)]

    def _scatter(self, start: int, stop: int, nth: int) -> int:
        """Scatter a gathered piece from a worker's buffer into the blocks.

        Return the number of bytes written.
        """
        here = self._node.staging.view(self._reads.buffers[nth], stop - start)
        if isinstance(self._stream, ConvertedStream):
            self._arrived(start, stop, here)
        arriving = StreamPiece.of(self._stream, start, stop, DESTINATION)
        return self._node.deliver(here, arriving)


def piece_bytes(stream: Stream) -> int:
    """Return the maximum number of bytes that one operation of a direct transfer reads."""
    by_runs = stream.nbytes * _BATCH_RUNS // max(1, stream.runs_apart)
    return max(4096, min(_BATCH, by_runs))


def _same(value: T, _: int) -> T:
    """Return `value`. A callback of pieces that are the same for every worker."""
    return value
