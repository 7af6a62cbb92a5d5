"""`PrefixFinder`: how much of a request a tier has, asked by its tokens.

Where all layers see all tokens, that is a number of whole blocks. A recurrent state, and mostly
a window, is there only where some request was stored up to: any token may be such an end, so
ends are asked for by their keys, many at once, from the last that the other layers allow on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from math import gcd
from typing import NamedTuple

from kvatlas.errors import AtlasError
from kvatlas.specs import Visibility
from kvatlas.tier.chained_keys import PrefixChain
from kvatlas.tier.served.client import TierClient
from kvatlas.tier.store_tier import StoreTier
from kvatlas.tier.tier import Tier

AnyTier = Tier | TierClient | StoreTier

_AT_ONCE = 1024
"""Keys that a tier is asked for in one call."""
_TRIES = 16
"""Ends that are looked at closely: some groups may lack what others have."""
_SECONDS = 2.0
"""Seconds after which a tier that is slow is asked for no further ends."""


class PrefixFinder:
    """Prefixes of requests in a tier, under one identity of a model and its weights.

    A store has the identity in its names. In a file or in memory it is part of the keys, so it
    is given here.

    >>> import numpy as np
    >>> from kvatlas.planning import plan
    >>> own = plan("Qwen3-8B", memory="64MiB", layout="BHLNC", max_len=64)
    >>> tier, pools = Tier(own), {0: np.zeros(own.pools[0].nbytes, np.uint8)}
    >>> finder = PrefixFinder(tier, b"a digest of the weights")
    >>> keys = finder.chain(range(40)).keys(32)
    >>> tier.store(pools, own, blocks=[3, 1], tokens=32, keys=keys)
    StoreResult(whole=2, waiting=0, no_room=0)
    >>> finder.longest(finder.chain([*range(30), 7, 7])), finder.longest(finder.chain(range(60)))
    (16, 32)
    >>> others = PrefixFinder(tier, b"a digest of other weights")
    >>> others.longest(others.chain(range(60)))
    0
    """

    def __init__(self, tier: AnyTier, identity: bytes = b"") -> None:
        self.tier, self.identity = tier, identity
        groups = tier.plan.groups
        self.unit = gcd(*(group.block for group in groups))
        """Tokens of the smallest block of which all groups have whole numbers."""
        recurrent = [n for n, group in enumerate(groups) if group.kind == "recurrent"]
        windows = [n for n, group in enumerate(groups) if group.visibility != Visibility()]
        self.recurrent = bool(recurrent)
        self.partial = bool(recurrent or windows)
        """Whether a prefix is of use mostly where a request was stored up to."""
        self._ending = (recurrent or windows or [0])[0]
        """A group that says where these ends are."""
        self._keeping = next(
            (n for n in range(len(groups)) if n not in recurrent and n not in windows), None
        )
        """A group that keeps every token, and so says how far an end can be."""
        converts = isinstance(tier, StoreTier) and tier.converts
        self._rows: list[dict[str, bool]] = [{}, {"other": True}] if converts else [{}]
        """Rows of each cache dtype: what one has an end in and another the rest serves nobody."""

    def chain(self, tokens: Sequence[int], salt: bytes = b"", lora: str = "") -> PrefixChain:
        """The keys of a request's tokens."""
        about = {"salt": salt, "identity": self.identity}
        return PrefixChain(self.tier.plan, tokens, lora=lora, **about)

    def whole_blocks(self, tokens: int) -> int:
        """The tokens of a request that are worth storing: whole blocks, or all of them."""
        return tokens if self.partial else tokens // self.unit * self.unit

    def longest(self, chain: PrefixChain) -> int:
        """How many of a request's first tokens the tier has; their keys are `chain.keys` of it."""
        if self.partial:
            until, found = time.monotonic() + _SECONDS, 0
            for rows in self._rows:
                try:
                    found = self._longest_end(_Ends(self.tier, chain, rows), found, until)
                except AtlasError:
                    if not found:
                        raise
            if found:
                return found
        # Where there is nothing, this also has a store count why.
        whole = chain.count // self.unit * self.unit
        return self.tier.match(chain.keys(whole), whole) if whole else 0

    def _longest_end(self, asked: _Ends, found: int, until: float) -> int:
        """The most tokens that some rows have, where these are more than were found before."""
        for stop in self._ends(asked, found, until):
            if self.tier.match(asked.chain.keys(stop), stop) == stop:
                return stop
        return found

    def _ends(self, asked: _Ends, beyond: int, until: float) -> Iterator[int]:
        """Where requests like this one were stored up to, beyond a token, the longest first."""
        tried = 0
        for last in range(self._farthest(asked, until), beyond, -_AT_ONCE):
            stops = range(last, max(beyond, last - _AT_ONCE), -1)
            for stop in compress(stops, asked.kept(self._ending, stops)):
                if tried == _TRIES or time.monotonic() > until:
                    return
                tried += 1
                yield stop
            if time.monotonic() > until:
                return

    def _farthest(self, asked: _Ends, until: float) -> int:
        """The last token that a prefix could end with: not a block behind what is kept whole."""
        count = asked.chain.count
        if self._keeping is None:
            return count
        block = self.tier.plan.groups[self._keeping].block
        whole = range(block, count + 1, block)
        for first in range(0, len(whole), _AT_ONCE):
            stops = whole[first : first + _AT_ONCE]
            for stop, there in zip(stops, asked.kept(self._keeping, stops), strict=True):
                if not there:
                    return stop - 1
            if time.monotonic() > until:
                return stops[-1]
        return count


class _Ends(NamedTuple):
    """Where a request could end, among a tier's rows of one cache dtype."""

    tier: AnyTier
    chain: PrefixChain
    rows: Mapping[str, bool]
    """Which rows, as `StoreTier.kept_ends` takes it."""

    def kept(self, group: int, stops: range) -> list[bool]:
        """Which ends a group has."""
        ends = [(stop, self.chain.key_at(stop)) for stop in stops]
        return self.tier.kept_ends(group, ends, **self.rows)
