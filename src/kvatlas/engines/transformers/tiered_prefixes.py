"""`TieredPrefixes`: an `AtlasCache`'s prefixes in a tier, loaded from it and stored in it.

A tier that is slow, full or gone costs a request nothing but time: what cannot be loaded is
computed, and what cannot be stored is not.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvatlas.cache import Cache
from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.pool import PrefixIdentity
from kvatlas.tier import PrefixFinder, StoreTier, TierEvents, open_tier
from kvatlas.tier.chained_keys import PrefixChain
from kvatlas.tier.prefix_finder import AnyTier
from kvatlas.tier.tier_events import EventListener

log = logging.getLogger("kvatlas.transformers")

Blocks = Mapping[int, Sequence[int]]
"""The blocks of a sequence, by group."""

_SUMMED = 1 << 18
"""Words of a tensor that are summed together."""
_NOT_THE_MODEL = ("transformers_version", "use_cache")


class TieredPrefixes:
    """What a tier has of a model's requests."""

    def __init__(
        self,
        tier: AnyTier,
        identity: CacheIdentity,
        events: EventListener | None = None,
        *,
        own: bool = False,
    ) -> None:
        """A store was opened with an identity, and is believed that it is this one.

        A tier that is its `own` is closed with it.
        """
        about = {"weights": identity.computed_with, "tenant": identity.tenant}
        said = b"" if isinstance(tier, StoreTier) else msgspec.msgpack.encode(about)
        self._finder = PrefixFinder(tier, blake2b(said, digest_size=16).digest() if said else b"")
        self.tier, self._own = tier, own
        self.events = None if events is None else TierEvents(tier, events)
        """Tells what is stored, where somebody listens."""
        self.counts: Counter[str] = Counter()
        """Requests that were loaded, stored, or not: `loaded`, `absent`, `failed`, and so on."""

    def chain(self, tokens: Sequence[int], identity: PrefixIdentity | None) -> PrefixChain | None:
        """The keys of a request's tokens; None where tokens alone do not say what it is."""
        about = identity or PrefixIdentity()
        if about.media:
            return None
        told_apart = bool(about.weights or about.salt)
        salt = msgspec.msgpack.encode([about.weights, about.salt]) if told_apart else b""
        longest = self.tier.plan.max_len
        return self._finder.chain(tokens[:longest], salt, about.lora)

    def longest(self, chain: PrefixChain | None) -> int:
        """How many of a request's first tokens the tier has; none where it cannot be asked."""
        try:
            found = self._finder.longest(chain) if chain else 0
        except AtlasError as refusal:
            log.warning("not looked up in the tier: %s", refusal)
            self.counts["failed"] += 1
            return 0
        self.counts["absent"] += not found
        return found

    def load(self, chain: PrefixChain, cache: Cache, blocks: Blocks, start: int, stop: int) -> bool:
        """Fill blocks with tokens start .. stop - 1; whether all of them are there.

        Where they are not, blocks may have been filled in part.
        """
        try:
            with self.tier.pin(chain.keys(stop), stop) as hit:
                there = hit.tokens == stop
                if there:
                    hit.fetch(cache.pools, cache.plan, blocks=blocks, start=start)
        except AtlasError as refusal:
            log.warning("not loaded from the tier: %s", refusal)
            there = False
        self.counts["loaded" if there else "lost"] += 1
        return there

    def store(self, chain: PrefixChain | None, cache: Cache, blocks: Blocks, tokens: int) -> None:
        """Store a request's first tokens, as far as they are worth it and not there yet."""
        stop = 0
        # A state is of use where it was computed; whole blocks also where a tier's longest ends.
        if chain is not None and (tokens <= chain.count or not self._finder.partial):
            stop = self._finder.whole_blocks(min(tokens, chain.count))
        if chain is None or not stop:
            return
        try:
            keys = chain.keys(stop)
            # What was converted as it was loaded is not there in this cache's dtype.
            own = {"convert": False} if isinstance(self.tier, StoreTier) else {}
            start = self.tier.match(keys, stop, **own)
            if start < stop:
                about: dict[str, Any] = {"blocks": blocks, "tokens": (start, stop), "keys": keys}
                if isinstance(self.tier, StoreTier):
                    about["wait"] = False  # the blocks have been read: the rest is the store's
                result = self.tier.store(cache.pools, cache.plan, **about)
                self.counts["no_room" if result.no_room else "stored"] += 1
            if self.events is not None:
                self.events.note(chain, stop)
                self.events.tell()
        except AtlasError as refusal:
            log.warning("not stored in the tier: %s", refusal)
            self.counts["not_stored"] += 1

    def ends_here(self, tokens: int) -> bool:
        """Whether a state is stored where a prompt goes on: at whole blocks of the tier."""
        return self._finder.recurrent and tokens % self._finder.unit == 0

    def close(self) -> None:
        """Wait for what is on its way to the tier, and let go of it."""
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
    **options: Any,
) -> TieredPrefixes:
    """A model's prefixes in a tier that is open, or in the one at an address.

    The tier of an address is shared with other processes; `options` are those of `open_tier`.
    """
    identity = identity or CacheIdentity(weights=loaded_weights(model))
    if isinstance(tier, str | Path):
        about = {"max_len": cache.plan.max_len, "shared": True, **options}
        opened = open_tier(tier, cache.plan, identity, **about)
        return TieredPrefixes(opened, identity, events, own=True)
    if options:
        problem, hint = "A tier that is open takes no options", "Pass its address instead"
        raise AtlasError(Code.CONTRADICTORY, problem, got=sorted(options), hint=hint)
    return TieredPrefixes(tier, identity, events)


def loaded_weights(model: Any) -> str:
    """A digest of a model in memory: its config, and all of its tensors.

    >>> layer = torch.nn.Linear(4, 4)
    >>> one = loaded_weights(layer)
    >>> _ = torch.nn.init.ones_(layer.bias)
    >>> one == loaded_weights(layer)
    False
    """
    config = model.config.to_dict() if hasattr(model, "config") else {}
    said = {
        key: value
        for key, value in config.items()
        if key not in _NOT_THE_MODEL and not key.startswith("_")
    }
    digest = blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(_summed(tensor.detach()))
    return digest.hexdigest()


def _summed(tensor: torch.Tensor) -> bytes:
    """Sums over a tensor's bytes, made where it lies: each word counts by an odd number."""
    text = tensor.reshape(-1).contiguous().view(torch.uint8)
    text = text.clone() if text.storage_offset() % 8 else text
    words = text[: text.numel() // 8 * 8].view(torch.int64)
    by = torch.arange(1, 2 * _SUMMED, 2, device=words.device)
    sums = [(part * by[: len(part)]).sum().view(1) for part in torch.split(words, _SUMMED)]
    parts = (torch.cat(sums).view(torch.uint8), text[len(words) * 8 :])
    return b"".join(part.cpu().numpy().tobytes() for part in parts)
