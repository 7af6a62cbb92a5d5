"""Requests inferred from an engine's events, which tell of the blocks that were stored.

A request's prompt is what its first blocks are behind, and these. What is stored behind its last
block goes on with it, if that is soon: more of the prompt at once, or more of the answer block
by block. Whatever else is stored belongs to another request. A prompt is known by its whole
blocks; one more token is assumed behind them, since a prompt's last is always computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from kvatlas.planning import FULL_KINDS
from kvatlas.pool.events import (
    MEDIUM,
    AllBlocksCleared,
    BlockEvent,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from kvatlas.pool.traces.stored_blocks import ContradictionError, StoredBlock, StoredBlocks
from kvatlas.pool.traces.trace import Trace, TraceBuilder, Unseen, bad_trace

PAUSE = 2.0
"""Seconds after which what is stored behind a prompt is no more of it, but another request's."""
FASTEST, SLOWEST = 500.0, 4.0
"""Tokens a second of an answer: one block that is quicker is of a prompt, one that is slower of
another request."""
MOST_OPEN = 10_000
"""Requests that may still go on at a time; the first of more are taken to be done."""


@dataclass(slots=True, eq=False)
class _Request:
    engine: _Engine
    line: int
    came: float
    prompt: StoredBlock
    """The last block of the prompt."""
    last: StoredBlock
    """The last block, of the answer perhaps."""
    stored: float
    """When that was stored."""
    tokens: int
    """Tokens that it stored."""
    found: bool
    """Whether all its blocks so far were there before."""
    answer: int = 0


class _Engine:
    """One data-parallel rank: its cache, and requests by the last block that they stored."""

    def __init__(self) -> None:
        self.blocks = StoredBlocks()
        self.open: dict[BlockHash | None, list[_Request]] = {}
        self.now = 0.0

    def end(self, request: _Request) -> None:
        """Nothing goes on with this request."""
        others = self.open[request.last.name]
        others.remove(request)
        if not others:
            del self.open[request.last.name]

    def go_on(self, request: _Request, last: StoredBlock) -> None:
        """A request's last block is now this one."""
        self.end(request)
        request.last, request.stored = last, self.now
        self.open.setdefault(last.name, []).append(request)


class InferredRequests:
    """Batch after batch of events in, a trace out."""

    def __init__(self, name: str, file: str, *, block: int | None, unit: str) -> None:
        self._file, self._unit = file, unit
        self._group: tuple[int | None] | None = None
        """The group that is looked at: the first that keeps every token."""
        self._builder = TraceBuilder(name, block or 0, unit)
        self._builder.begin(file)
        self._engines: dict[int | None, _Engine] = {}
        self._waiting: deque[_Request] = deque()
        """Requests that may still go on, and those that came behind them."""
        self._begun: float | None = None
        self._now = 0.0
        self._unseen = Unseen()

    def take(self, line: int, batch: EventBatch, *, gap: bool = False) -> None:
        """The next batch of a file; `gap` where some before it are missing."""
        where = f"{self._file}, {self._unit} {line}"
        self._begun = batch.ts if self._begun is None else self._begun
        engine = self._engines.setdefault(batch.data_parallel_rank, _Engine())
        # A clock that was set back stands still until it has caught up.
        engine.now = max(engine.now, batch.ts - self._begun)
        self._now = max(self._now, engine.now)
        if gap:
            self._unseen = replace(self._unseen, gaps=self._unseen.gaps + 1)
        for event in batch.events:
            self._take_event(line, where, engine, event)
        self._let_go()

    def finish(self) -> Trace:
        """The trace of all requests, in the order in which they came."""
        self._let_go(everything=True)
        if not len(self._builder):
            got = "other events, or other blocks"
            if self._unseen.requests:
                got = f"{self._unseen.requests:,} requests that begin before the recording"
            problem = "there is no request whose blocks were all stored here"
            raise bad_trace(self._file, problem, got, "Record from an engine's start, or longer")
        unseen = replace(self._unseen, ranks=len(self._engines))
        return replace(self._builder.finish(), unseen=unseen)

    # -- events -------------------------------------------------------------------------

    def _take_event(self, line: int, where: str, engine: _Engine, event: BlockEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            engine.blocks.clear()
        elif event.medium not in (None, MEDIUM):
            return  # a tier below the GPU
        elif isinstance(event, BlockRemoved):
            if self._group == (event.group_idx,):
                engine.blocks.remove(event.block_hashes)
        elif event.block_hashes and self._counts(where, event):
            self._stored(line, where, engine, event)

    def _counts(self, where: str, event: BlockStored) -> bool:
        """Whether an event is of the group that is looked at, and of whole blocks."""
        if event.kv_cache_spec_kind is not None and event.kv_cache_spec_kind not in FULL_KINDS:
            return False
        self._group = self._group or (event.group_idx,)
        if self._group != (event.group_idx,):
            return False
        block = self._builder.block = self._builder.block or event.block_size
        if event.block_size > block or block % event.block_size:
            hint = f"Give {event.block_size} as the trace's block"
            got = f"{event.block_size} after {block} tokens"
            raise bad_trace(where, "blocks of two sizes", got, hint)
        if event.block_size < block:
            return False  # a block that is found by its first tokens, too
        if len(event.token_ids) > len(event.block_hashes) * event.block_size:
            got = f"{len(event.block_hashes)} blocks for {len(event.token_ids)} tokens"
            hint = "Record events that name the kind of each group, as vLLM 0.32 sends them"
            raise bad_trace(where, "the first group does not keep every token", got, hint)
        return True

    def _stored(self, line: int, where: str, engine: _Engine, event: BlockStored) -> None:
        try:
            last, new = engine.blocks.store(event)
        except ContradictionError as problem:
            hint = "Record one engine a file, or each rank by its number"
            raise bad_trace(where, "the events contradict each other", problem, hint) from None
        if self._goes_on(engine, event, last, new=new):
            return
        request = _Request(
            engine, line, engine.now, last, last, engine.now, len(event.token_ids), not new
        )
        engine.open.setdefault(last.name, []).append(request)
        self._waiting.append(request)

    def _goes_on(
        self, engine: _Engine, event: BlockStored, last: StoredBlock, *, new: bool
    ) -> bool:
        """Whether an event is of a request that is known, which then goes on."""
        tokens, one = len(event.token_ids), len(event.block_hashes) == 1
        if event.parent_block_hash is None:
            return not new and self._waits(engine, last)
        for request in engine.open.get(event.parent_block_hash, ()):
            waited = engine.now - request.stored
            prompt = not request.answer and waited <= PAUSE
            prompt &= not one or waited <= tokens / FASTEST
            if prompt:
                request.prompt = last
            elif one and waited <= tokens / SLOWEST:
                request.answer += tokens
            else:
                continue
            request.found &= not new
            request.tokens += tokens
            engine.go_on(request, last)
            return True
        return False

    def _waits(self, engine: _Engine, last: StoredBlock) -> bool:
        """Whether a request says again what it found: vLLM's do while they wait for room.

        Those do so of which all blocks are reported, found ones too.
        """
        for request in engine.open.get(last.name, ()):
            if request.found and request.stored < engine.now <= request.stored + PAUSE:
                engine.go_on(request, last)
                return True
        return False

    # -- requests -----------------------------------------------------------------------

    def _let_go(self, *, everything: bool = False) -> None:
        """Write down requests that cannot go on, as far as they came before all others."""
        longest = max(PAUSE, self._builder.block / SLOWEST)
        while self._waiting and (
            everything
            or self._now - self._waiting[0].stored > longest
            or len(self._waiting) > MOST_OPEN
        ):
            request = self._waiting.popleft()
            request.engine.end(request)
            self._write(request)

    def _write(self, request: _Request) -> None:
        if request.prompt.content is None:
            unseen = self._unseen
            self._unseen = replace(
                unseen, requests=unseen.requests + 1, tokens=unseen.tokens + request.tokens
            )
            return
        ids = request.prompt.ids()
        length = len(ids) * self._builder.block + 1
        self._builder.add(request.line, ids, length, request.answer, request.came)
