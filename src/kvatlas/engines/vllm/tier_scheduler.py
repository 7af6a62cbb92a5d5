"""The scheduler's use of a tier: look up requests, and select finished ones to store."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Any

from kvatlas.engines.vllm.prefix_tier import FoundPrefix, PrefixTier
from kvatlas.errors import AtlasError
from kvatlas.pool import BlockEvent
from kvatlas.tier.chained_keys import BlockKeys, PrefixChain

log = logging.getLogger("kvatlas.vllm")

_FAILED = "FINISHED_ERROR"
LOOKUP_TIMEOUT = 5.0
"""Default seconds for which a request waits for its lookup."""
_PAUSE = 5.0
"""Seconds without lookups after a timeout, so that not every request waits for a slow tier."""


class TierScheduler:
    """Decide which tokens are loaded from a tier and which are stored in it."""

    def __init__(
        self, tier: PrefixTier, *, ahead: int, guesses: bool, timeout: float = LOOKUP_TIMEOUT
    ) -> None:
        self._tier, self._timeout = tier, timeout
        self.has_windows = tier.has_windows
        self._ahead = max(0, ahead)
        """Number of last tokens of a request whose drafter cache is speculative."""
        # Speculative tokens advance a recurrent state past the position that would be stored.
        self.keeps = not (tier.partial and (self._ahead or (guesses and tier.recurrent)))
        self._found: dict[str, Future[FoundPrefix] | None] = {}
        """Lookups of waiting requests; None if skipped, timed out or already used."""
        self._loading: dict[str, FoundPrefix] = {}
        """Prefixes that workers are loading, pinned until all workers have finished."""
        self._storing: dict[str, tuple[PrefixChain, int]] = {}
        """Prefixes that workers are storing, until all workers have finished."""
        self._wait_until: dict[str, float] = {}
        """Deadlines of lookups; afterwards the request is computed."""
        self._chains: dict[str, PrefixChain] = {}
        """The keys of requests that were looked up."""
        self._asked_from = 0.0
        self._outdated: set[str] = set()
        """Requests that started before the last weight update."""

    def matched(self, request: Any, computed: int) -> int | None:
        """Return how many tokens the tier has beyond `computed`; None while the lookup runs."""
        name = request.request_id
        if name not in self._found:
            self._outdated.discard(name)  # the request starts again
            now = time.monotonic()
            self._wait_until[name] = now + self._timeout
            self._found[name] = self._find(request) if now >= self._asked_from else None
        looked_up = self._found[name]
        if looked_up is None:
            return 0
        if not looked_up.done():
            if time.monotonic() < self._wait_until[name]:
                return None
            log.warning("computing the request locally: the tier lookup timed out request=%r", name)
            self._asked_from = time.monotonic() + _PAUSE
            self._found[name] = None
            self._let_go(looked_up)
            return 0
        found = _result(looked_up)
        return max(0, found.tokens - computed) if found is not None else 0

    def take(self, request_id: str, *, wanted: bool) -> FoundPrefix | None:
        """Return the prefix that was found for a request; it stays pinned until `loaded`.

        If `wanted` is false, or the lookup is still running, unpin the prefix and return None.
        """
        looked_up = self._found.get(request_id)
        self._found[request_id] = None
        if looked_up is not None and wanted and looked_up.done():
            found = _result(looked_up)
            if found is not None and found.tokens:
                self._loading[request_id] = found
                return found
        self._let_go(looked_up)
        return None

    def running(self, request_id: str) -> PrefixChain | None:
        """Return the keys of a running request's prompt; None if it should not be stored."""
        if not self.keeps or request_id in self._outdated:
            return None
        return self._chains.get(request_id)

    def attention(self, request_id: str) -> int:
        """Return for how many of a waiting request's first tokens the tier has full-attention rows.

        The result is 0 if the lookup has not finished.
        """
        looked_up = self._found.get(request_id)
        found = _result(looked_up) if looked_up is not None and looked_up.done() else None
        return 0 if found is None else found.attention

    def begun(self, request_id: str) -> None:
        """Register a request whose prompt another engine computed.

        The tier does not store this request if the weights are updated while the request runs.
        """
        self._found.setdefault(request_id, None)

    def loaded(self, request_id: str) -> None:
        """Unpin a request's prefix, after all workers have loaded it or failed."""
        found = self._loading.pop(request_id, None)
        if found is not None:
            self._tier.let_go(found)

    def stored(self, request_id: str) -> None:
        """Publish events for a request's prefix if the tier has it.

        Called after all workers have stored the prefix, or have failed to.
        """
        if request_id in self._storing:
            self._tier.note(*self._storing.pop(request_id))

    def take_events(self) -> list[BlockEvent]:
        """Return events for blocks that the tier stored or removed since the last call."""
        return self._tier.take_events()

    def forget(self, request_id: str) -> None:
        """Forget a finished request, and unpin the prefix that its lookup found or will find."""
        self._outdated.discard(request_id)
        self._wait_until.pop(request_id, None)
        self._chains.pop(request_id, None)
        self._let_go(self._found.pop(request_id, None))

    def reset(self) -> None:
        """Invalidate the prefixes and requests that were computed before a weight update."""
        self._tier.forget_all()
        self._outdated |= self._found.keys()
        for looked_up in self._found.values():
            self._let_go(looked_up)
        self._found.clear()
        self._wait_until.clear()
        self._chains.clear()
        self._storing.clear()

    def close(self) -> None:
        """Close the tier, which unpins all prefixes."""
        self._tier.close()

    def worth_keeping(
        self, request: Any, *, windows_alone: bool = False
    ) -> tuple[BlockKeys, int, int] | None:
        """Return (block keys, start, stop) to store tokens start .. stop - 1 of a finished request.

        Return None if nothing should be stored. `windows_alone` means that the engine no longer has
        the blocks before the sliding windows. Tiers that need these blocks then store nothing.
        """
        if windows_alone and self._tier.keeps_windows_whole:
            return None
        if not self.keeps or not _made_of_tokens(request) or request.status.name == _FAILED:
            return None
        if request.request_id in self._outdated:
            return None
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        tokens = request.num_computed_tokens - in_flight - self._ahead
        if self._tier.recurrent and in_flight:
            # The step in flight advances the state before it is stored.
            tokens = request.num_computed_tokens
            if tokens > len(request.all_token_ids):
                return None
        if tokens > self._tier.longest and self._tier.partial:
            return None
        tokens = self._tier.whole_blocks(tokens)
        if tokens < 1:
            return None
        try:
            chain = self._tier.chain(request.all_token_ids[:tokens], request.cache_salt)
            start = self._tier.stored(chain, tokens)
        except AtlasError as refusal:
            log.warning("store in the tier failed request=%r: %s", request.request_id, refusal)
            return None
        if start >= tokens:
            return None
        if self._tier.tells:
            self._storing[request.request_id] = chain, tokens
        return chain.keys(tokens), self._tier.start_for(start, tokens), tokens

    def _find(self, request: Any) -> Future[FoundPrefix] | None:
        if not _made_of_tokens(request) or getattr(request, "skip_reading_prefix_cache", False):
            return None
        last = request.num_tokens - max(1, self._ahead)  # the last token is always computed
        try:
            chain = self._tier.chain(request.all_token_ids[:last], request.cache_salt)
            self._chains[request.request_id] = chain
            return self._tier.find(chain)
        except (AtlasError, RuntimeError) as refusal:  # the tier is closed, or its file is damaged
            log.warning("lookup in the tier failed request=%r: %s", request.request_id, refusal)
            return None

    def _let_go(self, looked_up: Future[FoundPrefix] | None) -> None:
        """Unpin the result of a lookup, now or when it completes."""

        def unpin(done: Future[FoundPrefix]) -> None:
            found = _result(done)
            if found is not None:
                self._tier.let_go(found)

        if looked_up is not None:
            looked_up.add_done_callback(unpin)


def _made_of_tokens(request: Any) -> bool:
    """Return whether a request has only tokens: no media, adapter, embeddings or pooling."""
    return (
        request.prompt_token_ids is not None
        and not getattr(request, "mm_features", None)
        and getattr(request, "lora_request", None) is None
        and getattr(request, "prompt_embeds", None) is None
        and getattr(request, "pooling_params", None) is None
    )


def _result(looked_up: Future[FoundPrefix]) -> FoundPrefix | None:
    """Return the result of a finished lookup; None if it failed."""
    if looked_up.cancelled():
        return None
    problem = looked_up.exception()
    if problem is not None:
        log.warning("lookup in the tier failed: %s", problem)
        return None
    return looked_up.result()
