"""`PrefixFinder`: find the longest prefix of a request's tokens in a tier.

If all layers use full attention, the prefix is a number of whole blocks. A recurrent state, and
usually a sliding window, is stored only for the position at which an earlier request ended, which
can be any token. Such positions are looked up by their keys, many per call, starting at the last
position that the other layers can serve.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from math import gcd, lcm
from typing import NamedTuple

from kvatlas.errors import AtlasError
from kvatlas.specs import Visibility
from kvatlas.tier.any_tier import AnyTier
from kvatlas.tier.chained_keys import PrefixChain

_AT_ONCE = 1024
"""Number of keys in one lookup."""
_TRIES = 16
"""Maximum number of ends, found in one group, that are checked in all groups."""
_SECONDS = 2.0
"""Seconds after which the search for ends stops, if the tier is slow."""


class StoredPrefix(NamedTuple):
    """The result of a search for a request's prefix in a tier. Lengths are in tokens."""

    tokens: int
    """Length of the longest prefix from which all layers can continue."""
    attention: int
    """Length of the longest prefix that full attention has; 0 if the model has windows alone."""


class PrefixFinder:
    """Find prefixes of requests in a tier, for one identity of a model and its weights.

    A store includes the identity in its object names. For a tier in a file or in memory, the
    identity is part of the keys, so pass it here.

    >>> import numpy as np
    >>> from kvatlas.planning import plan
    >>> from kvatlas.tier import Tier
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
        """The greatest common divisor of all groups' block sizes, in tokens."""
        recurrent = [n for n, group in enumerate(groups) if group.kind == "recurrent"]
        windows = [n for n, group in enumerate(groups) if group.visibility != Visibility()]
        self.step = lcm(*(group.block for group in groups))
        """The least common multiple of all groups' block sizes, in tokens."""
        self.recurrent = bool(recurrent)
        self.partial = bool(recurrent or windows)
        """Whether a prefix can usually be reused only at the token where a request ended."""
        self._ending = (recurrent or windows or [0])[0]
        """The group whose keys are looked up to find these ends."""
        self._keeping = next(
            (n for n in range(len(groups)) if n not in recurrent and n not in windows), None
        )
        """A group that stores every token and thus bounds the ends; None if there is none."""
        self._windows = [groups[n].visibility for n in windows if n not in recurrent]
        self._rows: list[dict[str, bool]] = [{}, {"other": True}] if tier.converts else [{}]
        """The lookup options for each cache dtype. A hit cannot combine rows of two dtypes."""

    def chain(self, tokens: Sequence[int], salt: bytes = b"", lora: str = "") -> PrefixChain:
        """Return the hash chain of a request's tokens, which computes their keys."""
        about = {"salt": salt, "identity": self.identity}
        return PrefixChain(self.tier.plan, tokens, lora=lora, **about)

    def whole_blocks(self, tokens: int) -> int:
        """Return how many of a request's tokens to store.

        Only whole blocks are stored, unless the model has windows or recurrent states.
        """
        return tokens if self.partial else tokens // self.unit * self.unit

    def start_for(self, stored: int, stop: int) -> int:
        """Return the first token to store, if the tier has a prefix of `stored` tokens.

        A request that ends after `stop` tokens also stores the windows of its last token, and the
        states after that token. The windows may begin before token `stored`.
        """
        return min(stored, *(int(seen.first(stop)) for seen in self._windows), stop - 1)

    def longest(self, chain: PrefixChain) -> int:
        """Return the number of tokens of the longest stored prefix, to pass to `chain.keys`."""
        return self.search(chain).tokens

    def search(self, chain: PrefixChain) -> StoredPrefix:
        """Find the longest stored prefix of a request."""
        attention, groups = 0, self.tier.plan.groups
        if self.partial:
            until, found = time.monotonic() + _SECONDS, 0
            for rows in self._rows:
                asked = _Ends(self.tier, chain, rows)
                try:
                    farthest = self._farthest(asked, until)
                    if not rows and self._keeping is not None:
                        block = groups[self._keeping].block
                        attention = farthest // block * block
                    found = self._longest_end(asked, range(farthest, found, -1), until)
                except AtlasError:
                    if not found:
                        raise
            if found:
                return StoredPrefix(found, attention)
        # If nothing is found, this also makes a store count the reason.
        whole = chain.count // self.unit * self.unit
        found = self.tier.match(chain.keys(whole), whole) if whole else 0
        return StoredPrefix(found, max(attention, 0 if self.partial else found))

    def _longest_end(self, asked: _Ends, ends: range, until: float) -> int:
        """Return the first token count in `ends` at which a stored prefix of the request ends.

        `asked` contains the request's keys and selects the rows of one cache dtype. If there is no
        such token count, or none was found before the time `until`, return `ends.stop`.
        """
        for stop in self._ends(asked, ends, until):
            if self.tier.match(asked.chain.keys(stop), stop) == stop:
                return stop
        return ends.stop

    def _ends(self, asked: _Ends, ends: range, until: float) -> Iterator[int]:
        """Yield the token counts in `ends` at which a stored block of one group ends.

        Other groups may lack such a block, so the caller must check. The search stops at the time
        `until`, or after a few candidates.
        """
        tried, beyond = 0, ends.stop
        for last in ends[::_AT_ONCE]:
            stops = range(last, max(beyond, last - _AT_ONCE), -1)
            for stop in compress(stops, asked.kept(self._ending, stops)):
                if tried == _TRIES or time.monotonic() > until:
                    return
                tried += 1
                yield stop
            if time.monotonic() > until:
                return

    def _farthest(self, asked: _Ends, until: float) -> int:
        """Return an upper bound of the prefix length, from a group that stores every token."""
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
    """Looks up the token counts at which stored prefixes of a request end, for one cache dtype."""

    tier: AnyTier
    chain: PrefixChain
    rows: Mapping[str, bool]
    """Options of `StoreTier.kept_ends` that select the rows."""

    def kept(self, group: int, stops: range) -> list[bool]:
        """Return, for each token count in `stops`, whether a group has a block that ends there."""
        ends = [(stop, self.chain.key_at(stop)) for stop in stops]
        return self.tier.kept_ends(group, ends, **self.rows)
