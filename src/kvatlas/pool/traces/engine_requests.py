"""Requests of one engine, inferred from the blocks that it stores.

A request's prompt is what its first blocks are behind, and these. What is stored behind its last
block goes on with it, if that is soon: more of the prompt at once, or more of the answer block
by block. Whatever else is stored belongs to another request.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvatlas.pool.events import BlockHash, BlockStored
from kvatlas.pool.traces.stored_blocks import Addition, StoredBlock, StoredBlocks

PAUSE = 2.0
"""Seconds after which what is stored behind a prompt is no more of it, but another request's."""
FASTEST, SLOWEST = 500.0, 4.0
"""Tokens a second of an answer: one block that is quicker is of a prompt, one that is slower of
another request."""


@dataclass(slots=True, eq=False)
class InferredRequest:
    """A request so far."""

    engine: EngineRequests
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
    """Tokens of the answer's blocks."""


class EngineRequests:
    """One data-parallel rank: its cache, and requests that may go on."""

    def __init__(self) -> None:
        self.blocks = StoredBlocks()
        self.now = 0.0
        self._open: dict[BlockHash | None, list[InferredRequest]] = {}
        """By the last block that they stored."""

    def store(self, line: int, event: BlockStored) -> InferredRequest | None:
        """Blocks are stored; the request that begins with them, unless an earlier one goes on."""
        added, tokens = self.blocks.store(event), len(event.token_ids)
        going_on = self._going_on(event, added)
        if going_on is None:
            last = added.last
            request = InferredRequest(
                self, line, self.now, last, last, self.now, tokens, not added.new
            )
            self._open.setdefault(last.name, []).append(request)
            return request
        request, answer = going_on
        self.end(request)
        if answer:
            request.prompt = request.prompt if request.answer else added.before
            request.answer += tokens
        else:
            request.prompt = added.last
        request.last, request.stored = added.last, self.now
        request.tokens += tokens
        request.found &= not added.new
        self._open.setdefault(request.last.name, []).append(request)
        return None

    def end(self, request: InferredRequest) -> None:
        """Nothing goes on with this request."""
        others = self._open[request.last.name]
        others.remove(request)
        if not others:
            del self._open[request.last.name]

    def _going_on(self, event: BlockStored, added: Addition) -> tuple[InferredRequest, bool] | None:
        """The request that an event is of, and whether it is of its answer."""
        if event.parent_block_hash is None:
            waiting = None if added.new else self._waiting_for_room(added.last)
            return None if waiting is None else (waiting, False)
        tokens, one = len(event.token_ids), len(event.block_hashes) == 1
        quick = min(PAUSE, tokens / FASTEST) if one else PAUSE
        for request in self._open.get(event.parent_block_hash, ()):
            waited = self.now - request.stored
            if not request.answer and waited <= quick:
                return request, False
            if one and waited <= tokens / SLOWEST:
                return request, True
        pieces = self._in_pieces(added.before)
        return None if pieces is None else (pieces, self.now - pieces.stored > quick)

    def _waiting_for_room(self, last: StoredBlock) -> InferredRequest | None:
        """The request that says again what it has found.

        vLLM's do in each step in which there is no room for them, if they report that at all.
        """
        for request in self._open.get(last.name, ()):
            if request.stored == self.now:
                break  # and so are all behind it: requests of one moment are another each
            if request.found and self.now <= request.stored + PAUSE:
                return request
        return None

    def _in_pieces(self, before: StoredBlock) -> InferredRequest | None:
        """The request that has just stored something before what was there.

        Pools of ours say what is new alone: a request is in pieces where some of it was there.
        """
        if before.content is None:
            return None
        block = before.before  # behind its last block it would have gone on
        while block is not None:
            for request in self._open.get(block.name, ()):
                new = not request.found and not request.answer
                if new and self.now - request.stored <= PAUSE:
                    return request
            block = block.before
        return None
