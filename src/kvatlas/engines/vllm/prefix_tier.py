"""`PrefixTier`: what a tier has of requests, by their tokens, as an engine's scheduler sees it.

The scheduler asks, beside its own thread, and pins what there is: verified before it hears
of it, so that a damaged block is a miss, and not a request that fails. Workers then fetch
what is pinned, by its name. A tier that is gone, or slow, is a miss.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from kvatlas.engines.vllm.prefix_keys import PrefixKeys, RequestKeys, Rows, comes_after, stops_at
from kvatlas.specs import Visibility
from kvatlas.tier import Hit, TierClient

log = logging.getLogger("kvatlas.vllm")

_ASKING = 4
"""Requests that are looked up at once."""
_STALE = 64
"""Stops that may be listed and not be there, beyond as many as there are."""
_SOON = 0.005
"""Seconds that the scheduler waits for an answer which it can do without."""
_HURRIED = 1.0
"""Seconds for which it waits for none, once one was late."""


@dataclass
class FoundPrefix:
    """What a tier has of a request, pinned until it is let go."""

    hit: Hit
    rows: Rows
    """The keys under which it was found."""
    _pinned: ExitStack

    @property
    def tokens(self) -> int:
        """How many of the request's first tokens."""
        return self.hit.tokens

    def let_go(self) -> None:
        """Unpin it; a second call does nothing."""
        self._pinned.close()


class PrefixTier:
    """Prefixes of requests in a tier, found by their tokens."""

    def __init__(self, tier: TierClient, max_len: int, identity: bytes) -> None:
        """`identity` is that of the model and its weights, `max_len` the engine's."""
        self._tier = tier
        self._keys = PrefixKeys(tier.plan, identity)
        groups = tier.plan.groups
        self.recurrent = any(group.kind == "recurrent" for group in groups)
        self.partial = any(group.visibility != Visibility() for group in groups) or self.recurrent
        """Whether a prefix is of use only where a request has stopped."""
        self.longest = min(max_len, tier.plan.max_len)
        self._stops: dict[bytes, set[bytes]] = {}
        """Keys of stops by the digest of the whole blocks before them."""
        self._mark = 0
        """Up to where the tier's names have been listed."""
        self._lock = threading.Lock()
        self._asking = ThreadPoolExecutor(_ASKING, thread_name_prefix="kvatlas-ask")
        self._hurried_until = 0.0

    def keys(self, tokens: Any, salt: str | None) -> RequestKeys:
        """The keys of a request's tokens."""
        return self._keys.of(tokens[: self.longest], salt or "")

    def find(self, keys: RequestKeys) -> Future[FoundPrefix | None]:
        """What there is of a request, once that is known; it may be by now."""
        asked = self._asking.submit(self._pin, keys)
        self._is_soon(asked)
        return asked

    def stored(self, keys: RequestKeys, tokens: int) -> int:
        """How many of a request's first tokens need not be stored any more; 0 in doubt."""
        asked = self._asking.submit(self._tier.match, keys.rows(tokens), tokens)
        return asked.result() if self._is_soon(asked) else 0

    def whole_blocks(self, tokens: int) -> int:
        """The tokens of a request that are worth storing: whole blocks, or all of them."""
        tokens = min(tokens, self.longest)
        return tokens if self.partial else tokens // self._keys.unit * self._keys.unit

    def let_go(self, found: FoundPrefix) -> None:
        """Unpin what was found, beside the caller's thread."""
        with suppress(RuntimeError):  # closed: with the session all pins go
            self._asking.submit(found.let_go)

    def forget_all(self) -> None:
        """Find nothing of what there is any more, neither now nor after a restart.

        From here on nobody knows which weights there are, so what comes is found by this
        engine alone.
        """
        self._keys = PrefixKeys(self._tier.plan, secrets.token_bytes(32))

    def close(self) -> None:
        """Wait for what is under way, and let go of the tier."""
        self._asking.shutdown(wait=True, cancel_futures=True)
        self._tier.close()

    # -- inside ---------------------------------------------------------------------------

    def _is_soon(self, asked: Future[Any]) -> bool:
        """Whether an answer is there soon; a tier that is slow holds up no step twice."""
        if time.monotonic() < self._hurried_until:
            return asked.done() and not asked.exception()
        try:
            return not asked.exception(_SOON)
        except TimeoutError:
            self._hurried_until = time.monotonic() + _HURRIED
            return False

    def _pin(self, keys: RequestKeys) -> FoundPrefix | None:
        tokens, rows = self._longest(keys)
        if not tokens:
            return None
        with ExitStack() as pinned:
            hit = pinned.enter_context(self._tier.pin(rows, tokens))
            return FoundPrefix(hit, rows, pinned.pop_all()) if hit.tokens else None

    def _longest(self, keys: RequestKeys) -> tuple[int, Rows]:
        """The most tokens that could be had, and the keys under which they are."""
        whole = keys.count // self._keys.unit * self._keys.unit
        best, rows = 0, keys.rows(whole)
        if whole:
            best = self._tier.match(rows, whole)
        if not self.partial:
            return best, rows
        self._note_new_stops()
        for stop in self._stops_of(keys, best):
            at_stop = keys.rows(stop)
            if self._tier.match(at_stop, stop) == stop:
                return stop, at_stop
        return best, rows

    def _stops_of(self, keys: RequestKeys, beyond: int) -> list[int]:
        """Where requests have stopped that began as this one does, the longest first."""
        unit, stops = self._keys.unit, []
        with self._lock:
            for place in range(beyond // unit * unit, keys.count + 1, unit):
                stops += [stops_at(key) for key in self._stops.get(keys.before(place), ())
                         if beyond < stops_at(key) <= keys.count
                         and keys.at_stop(stops_at(key)) == key]  # fmt: skip
        return sorted(stops, reverse=True)

    def _note_new_stops(self) -> None:
        """Learn of stops that anybody has stored since the last look."""
        with self._lock:
            # Of blocks that have made room for others nobody tells: all are listed again.
            if sum(map(len, self._stops.values())) > 2 * len(self._tier) + _STALE:
                self._stops, self._mark = {}, 0
            while True:
                names, mark = self._tier.names_since(self._mark)
                for _, key in names:
                    before = comes_after(key)
                    if before is not None:
                        self._stops.setdefault(before, set()).add(key)
                if mark == self._mark:
                    return
                self._mark = mark
