"""Build a trace from batches of events.

Events contain only the complete blocks of a prompt. One more token is assumed after them: the last
token of a prompt is always computed, so without it the last complete block could never be a hit.
With blocks of one token, no block is incomplete, so no token is added.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from kvatlas.planning.sized_layers import FULL_KINDS
from kvatlas.pool.events import (
    MEDIUM,
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from kvatlas.simulate.traces.engine_requests import PAUSE, SLOWEST, EngineRequests, InferredRequest
from kvatlas.simulate.traces.stored_blocks import ContradictionError, TooManyBlocksError
from kvatlas.simulate.traces.trace import Trace, Unseen, bad_trace
from kvatlas.simulate.traces.trace_builder import TraceBuilder, TraceRequest

MOST_OPEN = 100_000
"""Maximum number of open requests. If there are more, the oldest count as finished."""


class EventTraceBuilder:
    """Builds a trace of requests from batches of an engine's KV events."""

    def __init__(self, name: str, file: str, *, block: int | None, unit: str) -> None:
        self._file, self._unit = file, unit
        self._group: tuple[int | None] | None = None
        """The group whose events are used: the first that keeps every token."""
        self._builder = TraceBuilder(name, block or 0)
        self._engines: dict[int | None, EngineRequests] = {}
        self._waiting: deque[InferredRequest] = deque()
        """Requests that are not in the trace yet, in order of arrival."""
        self._begun: float | None = None
        self._now = 0.0
        self._unseen = Unseen()

    def take(self, line: int, batch: EventBatch, *, gap: bool = False) -> None:
        """Process the next batch of a file. With `gap`, batches directly before it are missing."""
        where = f"{self._file}, {self._unit} {line}"
        self._begun = batch.ts if self._begun is None else self._begun
        engine = self._engines.setdefault(batch.data_parallel_rank, EngineRequests())
        # If the clock was set back, time stands still until the clock has caught up.
        engine.now = max(engine.now, batch.ts - self._begun)
        self._now = max(self._now, engine.now)
        if gap:
            self._unseen = replace(self._unseen, gaps=self._unseen.gaps + 1)
        for event in batch.events:
            self._take_event(line, where, engine, event)
        self._let_go()

    def finish(self) -> Trace:
        """Return the trace of all requests in order of arrival."""
        self._let_go(everything=True)
        if not len(self._builder):
            got = "no stored blocks of full attention in GPU memory"
            if self._unseen.requests:
                got = f"only {self._unseen.requests:,} requests that begin before the recording"
            raise bad_trace(
                self._file,
                "the recording contains no request with all of its blocks",
                got,
                "Start recording when the engine starts, or record longer",
            )
        unseen = replace(self._unseen, ranks=len(self._engines))
        return replace(self._builder.finish(), unseen=unseen)

    # -- events -------------------------------------------------------------------------

    def _take_event(self, line: int, where: str, engine: EngineRequests, event: BlockEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            engine.blocks.clear()
        elif event.medium not in (None, MEDIUM):
            return  # blocks in a tier below the GPU
        elif isinstance(event, BlockRemoved):
            if self._group == (event.group_idx,):
                engine.blocks.remove(event.block_hashes)
        elif event.block_hashes and self._counts(where, event):
            self._stored(line, where, engine, event)

    def _counts(self, where: str, event: BlockStored) -> bool:
        """Return whether an event has complete blocks of the first full-attention group.

        All other events are ignored. Raises an error if the event has another block size than
        earlier events.
        """
        if event.kv_cache_spec_kind is not None and event.kv_cache_spec_kind not in FULL_KINDS:
            return False
        self._group = self._group or (event.group_idx,)
        if self._group != (event.group_idx,):
            return False
        block = self._builder.block = self._builder.block or event.block_size
        if event.block_size > block or block % event.block_size:
            raise bad_trace(
                where,
                "the block size differs from earlier events",
                f"{event.block_size} tokens, after {block} tokens in earlier events",
                f"Choose one block size with --trace-block, such as {event.block_size}",
            )
        if event.block_size < block:
            return False  # a partial block, which vLLM can match by its first tokens
        if len(event.token_ids) > len(event.block_hashes) * event.block_size:
            raise bad_trace(
                where,
                "the event has more tokens than its blocks can hold",
                f"{len(event.token_ids)} tokens for {len(event.block_hashes)} blocks of {block}",
                "Record events that include kv_cache_spec_kind, as vLLM 0.32 sends them",
            )
        return True

    def _stored(self, line: int, where: str, engine: EngineRequests, event: BlockStored) -> None:
        try:
            request = engine.store(line, event)
        except ContradictionError as problem:
            raise bad_trace(
                where,
                "two events use the same block hash for different prefixes",
                problem,
                "Record one engine per file, or set data_parallel_rank in each batch",
            ) from None
        except TooManyBlocksError as problem:
            raise bad_trace(
                where,
                "the engine has stored too many blocks",
                problem,
                "Record BlockRemoved events too, and only one engine per file",
            ) from None
        except OverflowError as problem:  # JSON numbers can have any size
            raise bad_trace(
                where,
                "this is not a valid event",
                problem,
                "Use numbers of at most 64 bits",
            ) from None
        if request is not None:
            self._waiting.append(request)

    # -- requests -----------------------------------------------------------------------

    def _let_go(self, *, everything: bool = False) -> None:
        """Add requests to the trace in order of arrival. Stop at one that may still continue.

        While more than `MOST_OPEN` requests wait, the oldest is added even if it may continue. If
        `everything` is true, all requests are added.
        """
        longest = max(PAUSE, self._builder.block / SLOWEST)
        while self._waiting and (
            everything
            or self._now - self._waiting[0].stored > longest
            or len(self._waiting) > MOST_OPEN
        ):
            request = self._waiting.popleft()
            request.engine.end(request)
            self._write(request)

    def _write(self, request: InferredRequest) -> None:
        if request.prompt.content is None:
            unseen = self._unseen
            self._unseen = replace(
                unseen, requests=unseen.requests + 1, tokens=unseen.tokens + request.tokens
            )
            return
        ids = request.prompt.ids()
        block = self._builder.block
        length = len(ids) * block + (block > 1)
        where = f"{self._file}, {self._unit} {request.line}"
        self._builder.add(where, TraceRequest(length, ids, request.answer, request.came))
