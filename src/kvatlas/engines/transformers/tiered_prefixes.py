"""`TieredPrefixes`: load prefixes of an `AtlasCache` from a tier and store them in it.

A slow, full or unreachable tier never fails a request. Tokens that cannot be loaded are computed,
and tokens that cannot be stored are skipped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.cache import Cache
from kvatlas.engines.transformers.identity_of_model import stored_identity
from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.pool import Checkpoints, PrefixIdentity
from kvatlas.tier import PrefixFinder, StoreTier, TierEvents, open_tier
from kvatlas.tier.any_tier import AnyTier
from kvatlas.tier.chained_keys import PrefixChain
from kvatlas.tier.prefix_finder import StoredPrefix
from kvatlas.tier.stored_positions import default_policy, stored_positions
from kvatlas.tier.tier_events import EventListener

log = logging.getLogger("kvatlas.transformers")

Blocks = Mapping[int, Sequence[int]]
"""The block ids of a sequence, by group."""

_NOTHING = StoredPrefix(0, 0)


class TieredPrefixes:
    """Load prefixes of a model's requests from a tier, and store them in it."""

    def __init__(
        self,
        tier: AnyTier,
        identity: CacheIdentity,
        events: EventListener | None = None,
        *,
        policy: Checkpoints | None = None,
        own: bool = False,
    ) -> None:
        """Use an open tier. If `own` is true, `close` also closes the tier.

        `policy` selects the positions of a prompt at which windows and states are stored.

        `identity` identifies the model's caches in the tier. A `StoreTier` must have been opened
        with the same `identity`; this is not checked. `events` is called with stored and evicted
        prefixes.
        """
        about = {"weights": identity.computed_with, "tenant": identity.tenant}
        said = b"" if isinstance(tier, StoreTier) else msgspec.msgpack.encode(about)
        self._finder = PrefixFinder(tier, blake2b(said, digest_size=16).digest() if said else b"")
        self._policy = policy or default_policy(recurrent=self._finder.recurrent)
        self.tier, self._own = tier, own
        self.events = None if events is None else TierEvents(tier, events)
        """Reports stored prefixes to the listener; None without a listener."""
        self.counts: Counter[str] = Counter()
        """Number of operations by outcome: `loaded`, `absent`, `lost`, `failed`, `stored`,
        `no_room` and `not_stored`."""

    def chain(self, tokens: Sequence[int], identity: PrefixIdentity | None) -> PrefixChain | None:
        """Return the tier's keys for a request's prefixes; None if the request contains media.

        Keys are computed from tokens, salt and adapter, so they cannot identify media.
        """
        about = identity or PrefixIdentity()
        if about.media:
            return None
        told_apart = bool(about.weights or about.salt)
        salt = msgspec.msgpack.encode([about.weights, about.salt]) if told_apart else b""
        longest = self.tier.plan.max_len
        return self._finder.chain(tokens[:longest], salt, about.lora)

    def search(self, chain: PrefixChain | None) -> StoredPrefix:
        """Return the request's longest prefix that the tier stores; empty if the lookup fails."""
        try:
            found = self._finder.search(chain) if chain else _NOTHING
        except AtlasError as refusal:
            log.warning("tier lookup failed: %s", refusal)
            self.counts["failed"] += 1
            return _NOTHING
        self.counts["absent"] += not found.tokens
        return found

    def positions(self, prompt: int, hit: int, attention: int) -> list[int]:
        """Return the positions of a prompt at which to store windows and states.

        The prompt has `prompt` tokens, and its first `hit` tokens need not be computed. For the
        first `attention` tokens of the prompt, the tier has the rows of full-attention layers.
        """
        if not self._finder.partial:
            return []
        about = {"prompt": prompt, "hit": hit, "attention": attention}
        return stored_positions(self._policy, step=self._finder.step, **about)

    def load(self, chain: PrefixChain, cache: Cache, blocks: Blocks, start: int, stop: int) -> bool:
        """Load tokens start .. stop - 1 into blocks and return whether all were loaded.

        If the result is false, some of the blocks may have been overwritten.
        """
        try:
            with self.tier.pin(chain.keys(stop), stop) as hit:
                there = hit.tokens == stop
                if there:
                    hit.fetch(cache.pools, cache.plan, blocks=blocks, start=start)
        except AtlasError as refusal:
            log.warning("loading from the tier failed: %s", refusal)
            there = False
        self.counts["loaded" if there else "lost"] += 1
        return there

    def store(self, chain: PrefixChain | None, cache: Cache, blocks: Blocks, tokens: int) -> None:
        """Store a request's first `tokens` tokens, except those that the tier already has.

        If all layers use full attention, an incomplete last block is not stored.
        """
        stop = 0
        # A recurrent state or a window can be reused only at the token where the request ended.
        # A request that is longer than the chain would be cut elsewhere, so it is not stored.
        if chain is not None and (tokens <= chain.count or not self._finder.partial):
            stop = self._finder.whole_blocks(min(tokens, chain.count))
        if chain is None or not stop:
            return
        try:
            keys = chain.keys(stop)
            # Rows that were converted while loading are not yet stored in this cache's dtype.
            own = {"convert": False} if isinstance(self.tier, StoreTier) else {}
            start = self.tier.match(keys, stop, **own)
            if start < stop:
                start = self._finder.start_for(start, stop)
                about: dict[str, Any] = {"blocks": blocks, "tokens": (start, stop), "keys": keys}
                if isinstance(self.tier, StoreTier):
                    about["wait"] = False  # return as soon as the blocks have been read
                result = self.tier.store(cache.pools, cache.plan, **about)
                self.counts["no_room" if result.no_room else "stored"] += 1
            if self.events is not None:
                self.events.note(chain, stop)
                self.events.tell()
        except AtlasError as refusal:
            log.warning("storing in the tier failed: %s", refusal)
            self.counts["not_stored"] += 1

    @property
    def recurrent(self) -> bool:
        """Whether the model has recurrent states.

        A recurrent state is known only after the last token of a forward call.
        """
        return self._finder.recurrent

    def close(self) -> None:
        """Wait for pending writes to the tier, and close the tier if this object owns it."""
        if isinstance(self.tier, StoreTier):
            self.tier.flush()
        if self.events is not None:
            self.events.tell()
        if self._own:
            self.tier.close()


def tiered_prefixes(
    tier: AnyTier | str | Path,
    model: Any,
    cache: Cache,
    *,
    identity: CacheIdentity | None = None,
    events: EventListener | None = None,
    policy: Checkpoints | None = None,
    **options: Any,
) -> TieredPrefixes:
    """Return a model's `TieredPrefixes`. `tier` is an open tier, or the address of a tier.

    A tier that is opened by address is shared with other processes. `options` are passed to
    `open_tier`.
    """
    identity = identity or stored_identity(model, cache.plan)
    if isinstance(tier, str | Path):
        about = {"max_len": cache.plan.max_len, "shared": True, **options}
        opened = open_tier(tier, cache.plan, identity, **about)
        return TieredPrefixes(opened, identity, events, policy=policy, own=True)
    if options:
        problem = "Options are accepted only when the tier is given by its address"
        hint = "Pass the address, or set the options where the tier is opened"
        got = f"an open tier and the options {', '.join(sorted(options))}"
        raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)
    return TieredPrefixes(tier, identity, events, policy=policy)
