"""Infer the requests of one engine from the blocks that it stores.

A request's prompt consists of its first stored blocks and everything before them. Blocks that are
stored after its last block soon afterwards continue the request: several at once are more of the
prompt, and single blocks are more of the answer. All other blocks belong to other requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvatlas.pool.events import BlockHash, BlockStored
from kvatlas.pool.traces.stored_blocks import Addition, StoredBlock, StoredBlocks

PAUSE = 2.0
"""Seconds after which blocks that follow a prompt belong to another request."""
FASTEST, SLOWEST = 500.0, 4.0
"""Bounds of the decoding rate, in tokens per second. A faster block belongs to a prompt, a slower
block to another request."""


@dataclass(slots=True, eq=False)
class InferredRequest:
    """A request as far as it has been inferred."""

    engine: EngineRequests
    line: int
    came: float
    prompt: StoredBlock
    """The last block of the prompt."""
    last: StoredBlock
    """The last block of the prompt or the answer."""
    stored: float
    """The time when the last block was stored."""
    tokens: int
    """Number of tokens that it stored."""
    found: bool
    """Whether all its blocks so far were already stored."""
    answer: int = 0
    """Number of tokens in the answer's blocks."""


class EngineRequests:
    """The cache of one data-parallel rank, and its requests that may continue."""

    def __init__(self) -> None:
        self.blocks = StoredBlocks()
        self.now = 0.0
        self._open: dict[BlockHash | None, list[InferredRequest]] = {}
        """Open requests by the last block that they stored."""

    def store(self, line: int, event: BlockStored) -> InferredRequest | None:
        """Process stored blocks, and return the request that begins with them, if one does."""
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
        """Close a request that cannot continue."""
        others = self._open[request.last.name]
        others.remove(request)
        if not others:
            del self._open[request.last.name]

    def _going_on(self, event: BlockStored, added: Addition) -> tuple[InferredRequest, bool] | None:
        """Return the request that an event continues, and whether it continues the answer."""
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
        """Return the waiting request that reports its cached blocks again.

        vLLM may report them in each step in which there is no space for the request.
        """
        for request in self._open.get(last.name, ()):
            if request.stored == self.now:
                break  # and so are all behind it: requests of one moment are another each
            if request.found and self.now <= request.stored + PAUSE:
                return request
        return None

    def _in_pieces(self, before: StoredBlock) -> InferredRequest | None:
        """Return the request that has just stored blocks before already cached ones.

        A `BlockPool` reports only new blocks, so a request with cached blocks arrives in pieces.
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
