"""`PrefixTier`: what a tier has of requests, by their tokens, as an engine's scheduler sees it.

The scheduler asks, beside its own thread, and pins what there is: verified before it hears
of it, so that a damaged block is a miss, and not a request that fails. Workers then fetch
what is pinned, by its name. A store pins nothing: there workers look for the same keys. A tier
that is gone, or slow, is a miss.
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
"""Requests that are looked up at once."""
_SOON = 0.005
"""Seconds that the scheduler waits for an answer which it can do without."""
_HURRIED = 1.0
"""Seconds for which it waits for none, once one was late."""
_ASK_AGAIN = 5.0
"""Seconds after which the tier is asked whether it still has what listeners were told of."""
_NEWS = 1 << 16
"""Events that wait to be taken."""


@dataclass
class FoundPrefix:
    """What a tier has of a request, pinned until it is let go."""

    hit: Hit | StoreHit
    keys: BlockKeys
    """The keys under which it was found."""
    _pinned: ExitStack

    @property
    def tokens(self) -> int:
        """How many of the request's first tokens."""
        return self.hit.tokens

    @property
    def pin(self) -> bytes:
        """The name by which workers join the pin; empty where nothing is pinned."""
        return self.hit.name if isinstance(self.hit, Hit) else b""

    def let_go(self) -> None:
        """Unpin it; a second call does nothing."""
        self._pinned.close()


class PrefixTier:
    """Prefixes of requests in a tier, found by their tokens."""

    def __init__(
        self,
        tier: TierClient | StoreTier,
        max_len: int,
        identity: bytes,
        *,
        events_from: str | None = None,
    ) -> None:
        """`identity` is that of the model and its weights, `max_len` the engine's.

        Where `events_from` names a medium, what is there is told as events.
        """
        self._tier, self._finder = tier, PrefixFinder(tier, identity)
        self.recurrent, self.partial = self._finder.recurrent, self._finder.partial
        self.keeps_windows_whole = any(
            tier.plan.groups[region.group].visibility == Visibility() != layer.spec.visibility
            for region in tier.plan.regions
            for layer in region.layers
        )
        """Whether the tier has every token of layers that see a window."""
        self.has_windows = any(group.visibility != Visibility() for group in tier.plan.groups)
        """Whether it has windows alone of such layers."""
        self.longest = min(max_len, tier.plan.max_len)
        self._asking = ThreadPoolExecutor(_ASKING, thread_name_prefix="kvatlas-ask")
        self._hurried_until = 0.0
        self._medium = events_from
        self._begin_events()
        self._telling: Future[None] | None = None
        self._tell_at = 0.0

    def chain(self, tokens: Any, salt: str | None) -> PrefixChain:
        """The keys of a request's tokens."""
        # A client chooses the salt: what JSON can say, half a surrogate pair too, is one.
        said = (salt or "").encode("utf-8", "surrogatepass")
        return self._finder.chain(tokens[: self.longest], said)

    def find(self, chain: PrefixChain) -> Future[FoundPrefix | None]:
        """What there is of a request, once that is known; it may be by now."""
        asked = self._asking.submit(self._pin, self._finder, chain)
        self._is_soon(asked)
        return asked

    def stored(self, chain: PrefixChain, tokens: int) -> int:
        """How many of a request's first tokens need not be stored any more; 0 in doubt."""
        # What is converted as it is read is not there in this engine's own dtype.
        tier = self._tier
        match = partial(tier.match, convert=False) if isinstance(tier, StoreTier) else tier.match
        asked = self._asking.submit(match, chain.keys(tokens), tokens)
        return asked.result() if self._is_soon(asked) else 0

    def whole_blocks(self, tokens: int) -> int:
        """The tokens of a request that are worth storing: whole blocks, or all of them."""
        return self._finder.whole_blocks(min(tokens, self.longest))

    def let_go(self, found: FoundPrefix) -> None:
        """Unpin what was found, beside the caller's thread."""
        with suppress(RuntimeError):  # closed: with the session all pins go
            self._asking.submit(found.let_go)

    @property
    def tells(self) -> bool:
        """Whether somebody listens to events."""
        return self._events is not None

    def note(self, chain: PrefixChain, tokens: int) -> None:
        """A request's first tokens were stored: listeners are told, once they can be found."""
        if self._events is not None:
            self._events.note(chain, tokens)
            self._tell_at = 0.0

    def take_events(self) -> list[BlockEvent]:
        """What can be found since the last call, and what no more; the tier is asked beside it."""
        ready = self._telling is None or self._telling.done()
        if self._events is not None and ready and time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _ASK_AGAIN
            with suppress(RuntimeError):  # closed
                self._telling = self._asking.submit(self._events.tell)
        return [self._news.popleft() for _ in range(len(self._news))]

    def forget_all(self) -> None:
        """Find nothing of what there is any more, neither now nor after a restart.

        From here on nobody knows which weights there are, so what comes is found by this
        engine alone.
        """
        self._finder = PrefixFinder(self._tier, secrets.token_bytes(32))
        self._begin_events()

    def close(self) -> None:
        """Wait for what is under way, and let go of the tier."""
        self._asking.shutdown(wait=True, cancel_futures=True)
        if isinstance(self._tier, StoreTier):
            log.info("misses of the store by reason: %s", dict(self._tier.misses))
        self._tier.close()

    # -- inside ---------------------------------------------------------------------------

    def _begin_events(self) -> None:
        """Know of nothing that listeners were told; what is being asked is told nobody."""
        self._news: deque[BlockEvent] = deque(maxlen=_NEWS)
        self._events: TierEvents | None = None
        if self._medium is not None:
            self._events = TierEvents(self._tier, self._news.extend, medium=self._medium)

    def _is_soon(self, asked: Future[Any]) -> bool:
        """Whether an answer is there soon; a tier that is slow holds up no step twice."""
        if time.monotonic() < self._hurried_until:
            return asked.done() and not asked.exception()
        try:
            return not asked.exception(_SOON)
        except TimeoutError:
            self._hurried_until = time.monotonic() + _HURRIED
            return False

    def _pin(self, finder: PrefixFinder, chain: PrefixChain) -> FoundPrefix | None:
        tokens = finder.longest(chain)
        if not tokens:
            return None
        keys = chain.keys(tokens)
        with ExitStack() as pinned:
            pin: AbstractContextManager[Hit | StoreHit] = self._tier.pin(keys, tokens)
            hit = pinned.enter_context(pin)
            return FoundPrefix(hit, keys, pinned.pop_all()) if hit.tokens else None
