"""`PrefixTier`: the scheduler's lookup of prefixes in a tier, by their tokens.

Lookups run in background threads. A lookup pins and verifies the blocks that it finds, so that a
damaged block is a miss instead of a failed request. Workers then fetch the pinned blocks by the
name of the pin. A store has no pins; there, workers look up the same keys again. An unreachable
or slow tier counts as a miss.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvatlas.pool import BlockEvent
from kvatlas.specs import Visibility
from kvatlas.tier import PrefixFinder, StoreTier, TierClient, TierEvents
from kvatlas.tier.chained_keys import BlockKeys, PrefixChain
from kvatlas.tier.hit import Hit
from kvatlas.tier.store_hit import StoreHit

log = logging.getLogger("kvatlas.vllm")

_ASKING = 4
"""Concurrent lookups."""
_SOON = 0.005
"""Seconds that the scheduler waits for a lookup whose result is optional."""
_HURRIED = 1.0
"""Seconds after a slow lookup during which the scheduler does not wait for optional results."""
_ASK_AGAIN = 5.0
"""Seconds between checks whether the tier still stores the published blocks."""
_NEWS = 1 << 16
"""Maximum number of queued events."""


@dataclass
class FoundPrefix:
    """The result of a lookup in a tier. The prefix is pinned until `let_go`."""

    hit: Hit | StoreHit | None
    """The prefix; None if the tier has none from which all layers can continue."""
    keys: BlockKeys
    """The keys of the prefix's blocks."""
    attention: int
    """Number of leading tokens for which the tier has the rows of full attention."""
    _pinned: ExitStack

    @property
    def tokens(self) -> int:
        """The number of tokens in the prefix."""
        return 0 if self.hit is None else self.hit.tokens

    @property
    def pin(self) -> bytes:
        """The name of the pin, with which workers fetch the blocks; empty for a store."""
        return self.hit.name if isinstance(self.hit, Hit) else b""

    def let_go(self) -> None:
        """Unpin the prefix; a second call does nothing."""
        self._pinned.close()


class PrefixTier:
    """Find the prefixes of requests in a tier by their tokens."""

    def __init__(
        self,
        tier: TierClient | StoreTier,
        max_len: int,
        identity: bytes,
        *,
        events_from: str | None = None,
    ) -> None:
        """Set up lookups for one model. `identity` identifies the model and its weights.

        `max_len` is the number of tokens in the engine's longest request. Events for the tier's
        blocks contain `events_from`, the name of a storage medium; if it is None, no events are
        reported.
        """
        self._tier, self._finder = tier, PrefixFinder(tier, identity)
        self.recurrent, self.partial = self._finder.recurrent, self._finder.partial
        self.keeps_windows_whole = any(
            tier.plan.groups[region.group].visibility == Visibility() != layer.spec.visibility
            for region in tier.plan.regions
            for layer in region.layers
        )
        """Whether the tier stores all tokens of sliding-window layers."""
        self.has_windows = any(group.visibility != Visibility() for group in tier.plan.groups)
        """Whether the tier stores only the windows of some layers."""
        self.longest = min(max_len, tier.plan.max_len)
        self.step = self._finder.step
        """A number of tokens that is a multiple of every group's block size."""
        self._asking = ThreadPoolExecutor(_ASKING, thread_name_prefix="kvatlas-ask")
        self._hurried_until = 0.0
        self._medium = events_from
        self._begin_events()
        self._telling: Future[None] | None = None
        self._tell_at = 0.0

    def chain(self, tokens: Any, salt: str | None) -> PrefixChain:
        """Return the keys under which the tier stores the prefixes of a request."""
        # A client chooses the salt, and JSON allows half of a surrogate pair.
        said = (salt or "").encode("utf-8", "surrogatepass")
        return self._finder.chain(tokens[: self.longest], said)

    def find(self, chain: PrefixChain) -> Future[FoundPrefix]:
        """Look up and pin the longest stored prefix of a request, in the background."""
        asked = self._asking.submit(self._pin, self._finder, chain)
        self._is_soon(asked)
        return asked

    def stored(self, chain: PrefixChain, tokens: int) -> int:
        """Return how many of the first `tokens` tokens the tier stores; 0 if the lookup is slow."""
        # Rows that are converted on read are not stored in this engine's dtype.
        tier = self._tier
        match = partial(tier.match, convert=False) if isinstance(tier, StoreTier) else tier.match
        asked = self._asking.submit(match, chain.keys(tokens), tokens)
        return asked.result() if self._is_soon(asked) else 0

    def whole_blocks(self, tokens: int) -> int:
        """Return how many of a request's first `tokens` tokens to store.

        An incomplete last block is left out, unless some layers store only windows or states. The
        result is at most the number of tokens in the longest request that engine and tier support.
        """
        return self._finder.whole_blocks(min(tokens, self.longest))

    def start_for(self, stored: int, stop: int) -> int:
        """Return the first token to store, if the tier already has the first `stored` tokens."""
        return self._finder.start_for(stored, stop)

    def let_go(self, found: FoundPrefix) -> None:
        """Unpin a prefix in the background."""
        with suppress(RuntimeError):  # closed: the session's pins are released with it
            self._asking.submit(found.let_go)

    @property
    def tells(self) -> bool:
        """Whether the tier's blocks are published as events."""
        return self._events is not None

    def note(self, chain: PrefixChain, tokens: int) -> None:
        """Publish events for the prefix of `tokens` tokens once a lookup finds it in the tier."""
        if self._events is not None:
            self._events.note(chain, tokens)
            self._tell_at = 0.0

    def take_events(self) -> list[BlockEvent]:
        """Return events since the last call, and start a background check for newer ones."""
        ready = self._telling is None or self._telling.done()
        if self._events is not None and ready and time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _ASK_AGAIN
            with suppress(RuntimeError):  # closed
                self._telling = self._asking.submit(self._events.tell)
        return [self._news.popleft() for _ in range(len(self._news))]

    def forget_all(self) -> None:
        """Stop using the prefixes stored so far, because the weights have changed.

        The new weights have no known identity. Prefixes stored from now on get a random identity,
        so that only this engine finds them, until it restarts.
        """
        self._finder = PrefixFinder(self._tier, secrets.token_bytes(32))
        self._begin_events()

    def close(self) -> None:
        """Wait for running lookups, and close the tier."""
        self._asking.shutdown(wait=True, cancel_futures=True)
        if isinstance(self._tier, StoreTier):
            log.info("store misses by reason: %s", dict(self._tier.misses))
        self._tier.close()

    # -- inside ---------------------------------------------------------------------------

    def _begin_events(self) -> None:
        """Start with an empty event queue, and drop the results of running checks."""
        self._news: deque[BlockEvent] = deque(maxlen=_NEWS)
        self._events: TierEvents | None = None
        if self._medium is not None:
            self._events = TierEvents(self._tier, self._news.extend, medium=self._medium)

    def _is_soon(self, asked: Future[Any]) -> bool:
        """Wait a few milliseconds for a lookup; return whether it has succeeded.

        For a second after a slow lookup, do not wait, so that a slow tier does not delay every
        step.
        """
        if time.monotonic() < self._hurried_until:
            return asked.done() and not asked.exception()
        try:
            return not asked.exception(_SOON)
        except TimeoutError:
            self._hurried_until = time.monotonic() + _HURRIED
            return False

    def _pin(self, finder: PrefixFinder, chain: PrefixChain) -> FoundPrefix:
        found = finder.search(chain)
        keys = chain.keys(found.tokens)
        with ExitStack() as pinned:
            if not found.tokens:
                return FoundPrefix(None, keys, found.attention, pinned.pop_all())
            pin: AbstractContextManager[Hit | StoreHit] = self._tier.pin(keys, found.tokens)
            hit = pinned.enter_context(pin)
            return FoundPrefix(hit, keys, found.attention, pinned.pop_all())
