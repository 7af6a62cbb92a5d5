"""`PrefixTier`: an engine's tier, by tokens; one object for its scheduler and its worker.

Both are in one process where an engine has one rank, and a tier belongs to one process. What
a tier has of a request is pinned and verified before the scheduler hears of it, so that a
damaged block is a miss, and not a request that fails.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas.engines.vllm.prefix_keys import PrefixKeys, RequestKeys, comes_after, stops_at
from kvatlas.errors import AtlasError, Code
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.routing import fingerprint
from kvatlas.specs import Visibility
from kvatlas.tier import Hit, Tier
from kvatlas.wire import Memory

log = logging.getLogger("kvatlas.vllm")

IN_MEMORY = "memory"
"""What the setting says for a tier in host memory."""
_BLOCK = 64
"""Tokens of a tier's block, where the model's layers allow it."""
_VERIFYING = 2

Rows = dict[int, list[bytes | None]]
BlockIds = Sequence[Sequence[int]]
"""Of an engine's own blocks, by group."""


@dataclass
class FoundPrefix:
    """What a tier has of a request, pinned until it is let go."""

    hit: Hit
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

    def __init__(self, tier: Tier, own: Plan, memory: Memory, identity: bytes) -> None:
        self._tier, self._plan, self._pools = tier, own, {0: memory}
        self._keys = PrefixKeys(tier.plan, identity)
        groups = tier.plan.groups
        self.recurrent = any(group.kind == "recurrent" for group in groups)
        self.partial = any(group.visibility != Visibility() for group in groups) or self.recurrent
        """Whether a prefix is of use only where a request has stopped."""
        self.longest = min(own.max_len, tier.plan.max_len)
        self._stops: dict[bytes, set[bytes]] = {}
        """Keys of stops by the digest of the whole blocks before them."""
        self._lock = threading.Lock()
        self._verifying = ThreadPoolExecutor(_VERIFYING, thread_name_prefix="kvatlas-verify")
        self._list_stops()

    # -- what there is --------------------------------------------------------------------

    def keys(self, tokens: Any, salt: str | None) -> RequestKeys:
        """The keys of a request's tokens."""
        return self._keys.of(tokens[: self.longest], salt or "")

    def find(self, keys: RequestKeys) -> Future[FoundPrefix | None] | None:
        """What there is of a request, once it is verified; None where there is nothing."""
        tokens, rows = self._longest(keys)
        if not tokens:
            return None
        return self._verifying.submit(self._pin, rows, tokens)

    def stored(self, keys: RequestKeys, tokens: int) -> int:
        """How many of a request's first tokens need not be stored any more."""
        return self._tier.match(keys.rows(tokens), tokens)

    def whole_blocks(self, tokens: int) -> int:
        """The tokens of a request that are worth storing: whole blocks, or all of them."""
        tokens = min(tokens, self.longest)
        return tokens if self.partial else tokens // self._keys.unit * self._keys.unit

    # -- moving ---------------------------------------------------------------------------

    def load(self, found: FoundPrefix, tables: BlockIds, start: int) -> None:
        """Fill an engine's blocks with tokens from `start` on."""
        blocks = dict(enumerate(tables))
        found.hit.fetch(self._pools, self._plan, blocks=blocks, start=start)

    def store(self, keys: RequestKeys, tables: BlockIds, start: int, stop: int) -> int:
        """Keep tokens start .. stop - 1 of an engine's blocks; how many blocks found no room."""
        rows = keys.rows(stop)
        result = self._tier.store(
            self._pools, self._plan, blocks=dict(enumerate(tables)), tokens=(start, stop), keys=rows
        )
        if self.partial:
            with self._lock:
                for key in {row[-1] for row in rows.values()}:
                    self._note_stop(key)
            if sum(map(len, self._stops.values())) > 2 * len(self._tier) + len(rows):
                self._list_stops()
        return result.no_room

    def forget_all(self) -> None:
        """Find nothing of what there is any more, neither now nor after a restart.

        From here on nobody knows which weights there are, so what comes is found by this
        engine alone.
        """
        self._keys = PrefixKeys(self._tier.plan, secrets.token_bytes(32))

    def close(self) -> None:
        """Wait for what is under way, and let go of the tier."""
        self._verifying.shutdown(wait=True, cancel_futures=True)
        self._tier.close()

    # -- inside ---------------------------------------------------------------------------

    def _longest(self, keys: RequestKeys) -> tuple[int, Rows]:
        """The most tokens that could be had, and the keys under which they are."""
        whole = keys.count // self._keys.unit * self._keys.unit
        best, rows = 0, keys.rows(whole)
        if whole:
            best = self._tier.match(rows, whole)
        if not self.partial:
            return best, rows
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

    def _list_stops(self) -> None:
        """Find all stops that the tier has; those that it has no more are forgotten."""
        with self._lock:
            self._stops = {}
            for _, key in self._tier.names():
                self._note_stop(key)

    def _note_stop(self, key: bytes | None) -> None:
        before = None if key is None else comes_after(key)
        if key is not None and before is not None:
            self._stops.setdefault(before, set()).add(key)

    def _pin(self, rows: Rows, tokens: int) -> FoundPrefix | None:
        with ExitStack() as pinned:
            hit = pinned.enter_context(self._tier.pin(rows, tokens))
            return FoundPrefix(hit, pinned.pop_all()) if hit.tokens else None


def open_tier(where: str, memory: str, model: Model, own: Plan) -> Tier | None:
    """The tier that a setting names: a new one for a model, or the file that is there.

    None for a file that is damaged or another model's: nothing is found in it, or kept.
    """
    if own.ranks > 1:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "A tier belongs to one process, and this engine has several ranks",
            got=f"tier {where!r} with tp {own.tp} and pp {own.pp}",
            hint="Serve with tp 1 and pp 1, or leave tier out: ranks cannot share one yet",
        )
    if where == IN_MEMORY or not Path(where).exists():
        made = plan(
            model,
            memory=memory,
            layout="BLHNC",
            block_size=_BLOCK,
            max_len=own.max_len,
            in_flight=0,
        )
        return Tier(made) if where == IN_MEMORY else Tier.open(where, made, durable=False)
    try:
        tier = Tier.open(where, durable=False)
    except AtlasError as refusal:
        if refusal.code is Code.TWICE:
            raise
        log.error("nothing is kept or found again: %s", refusal)
        return None
    if fingerprint(tier.plan) != fingerprint(own):
        log.error("nothing is kept or found again: %s is the tier of %s", where, tier.plan)
        tier.close()
        return None
    return tier


_of_engines: dict[str, PrefixTier | None] = {}
"""Tiers that workers of this process have opened; None for one that cannot be used."""


def share_tier(engine_id: str, tier: PrefixTier | None) -> None:
    """Have the scheduler of an engine find the tier that its worker has opened."""
    _of_engines[engine_id] = tier


def shared_tier(engine_id: str) -> PrefixTier | None:
    """The tier of an engine whose worker is in this process."""
    if engine_id not in _of_engines:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "A tier belongs to one process, and this engine's worker is in another",
            got=f"engine {engine_id!r}",
            hint="Run it in one process: VLLM_ENABLE_V1_MULTIPROCESSING=0, and one rank",
        )
    return _of_engines[engine_id]


def forget_tier(engine_id: str) -> None:
    """Close an engine's tier."""
    tier = _of_engines.pop(engine_id, None)
    if tier is not None:
        tier.close()
