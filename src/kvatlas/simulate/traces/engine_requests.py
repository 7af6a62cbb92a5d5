"""Infer the requests of one engine from the blocks that it stores.

A request's prompt may begin with blocks that were cached before. After them come the blocks that
the engine stores first for the request. More blocks continue the request if they follow its last
block and are stored soon after it: several at once belong to the prompt, and single blocks belong
to the answer. All other blocks belong to other requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvatlas.pool.events import BlockHash, BlockStored
from kvatlas.simulate.traces.stored_blocks import Addition, StoredBlock, StoredBlocks

PAUSE = 2.0
"""Seconds after which further blocks of a prompt count as another request."""
FASTEST, SLOWEST = 500.0, 4.0
"""Bounds of the decoding rate, in tokens per second. A block that follows faster belongs to the
prompt, and one that follows slower belongs to another request."""


@dataclass(slots=True, eq=False)
class InferredRequest:
    """A request that was inferred from the events so far."""

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
    """Number of tokens in the blocks that the request reported as stored."""
    found: bool
    """Whether all these blocks were already stored before."""
    answer: int = 0
    """Number of tokens of the answer, in complete blocks."""


class EngineRequests:
    """The cache of one data-parallel rank, and its open requests, which may still continue."""

    def __init__(self) -> None:
        self.blocks = StoredBlocks()
        self.now = 0.0
        self._open: dict[BlockHash | None, list[InferredRequest]] = {}
        """Open requests, by the hash of the last block that they stored."""

    def store(self, line: int, event: BlockStored) -> InferredRequest | None:
        """Process an event of stored blocks.

        Returns a new request if the event begins one, or None if it continues another request.
        """
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
        """Remove a request from the open requests."""
        others = self._open[request.last.name]
        others.remove(request)
        if not others:
            del self._open[request.last.name]

    def _going_on(self, event: BlockStored, added: Addition) -> tuple[InferredRequest, bool] | None:
        """Return (request, answer) for the open request that an event continues, or None.

        `answer` is True if the event continues the request's answer, and False if it continues the
        prompt.
        """
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
        """Return the open request for which vLLM reports the cached blocks up to `last` again.

        vLLM may do so in every step in which the request waits for space. Returns None if there is
        no such request.
        """
        for request in self._open.get(last.name, ()):
            if request.stored == self.now:
                break  # this and all later requests arrived now, so they are other requests
            if request.found and self.now <= request.stored + PAUSE:
                return request
        return None

    def _in_pieces(self, before: StoredBlock) -> InferredRequest | None:
        """Return the open request whose last stored block is an ancestor of `before`, or None.

        The blocks between these two were cached. A `BlockPool` reports only new blocks, so the
        events of such a request are not consecutive.
        """
        if before.content is None:
            return None
        block = before.before  # a request that ends at `before` itself was checked already
        while block is not None:
            for request in self._open.get(block.name, ()):
                new = not request.found and not request.answer
                if new and self.now - request.stored <= PAUSE:
                    return request
            block = block.before
        return None
