"""Number the prefixes of prompts from 0, in memory that grows with distinct prefixes only.

A prefix is a sequence of ids. It is identified by a 64-bit hash, which is a sum over the ids of the
prefix. Each term mixes an id and its position. Equal ids with different predecessors are therefore
different prefixes. If traces have 40 million distinct prefixes each, one trace in 20,000 contains
two prefixes with the same hash.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int32]

MOST_DISTINCT = (1 << 31) - 1
"""Maximum number of distinct prefixes, because numbers have 32 bits."""


def mixed(values: Hashes) -> Hashes:
    """Return the values of the splitmix64 generator at these positions.

    >>> [hex(value) for value in mixed(np.array([0], np.uint64)).tolist()]
    ['0xe220a8397b1dcdaf']
    """
    found = values + np.uint64(0x9E3779B97F4A7C15)
    found ^= found >> np.uint64(30)
    found *= np.uint64(0xBF58476D1CE4E5B9)
    found ^= found >> np.uint64(27)
    found *= np.uint64(0x94D049BB133111EB)
    found ^= found >> np.uint64(31)
    return found


def prefix_hashes(ids: Hashes, counts: NDArray[np.int64], partial: NDArray[np.int64]) -> Hashes:
    """Return the hash of the prefix that ends at each id of several prompts.

    `counts` has the number of ids of each prompt. `partial` has the number of tokens in the last
    block of each prompt, or 0 if that block is full. Two prompts whose last blocks have the same id
    but different numbers of tokens get different hashes.
    """
    if not len(ids):
        return ids.copy()
    stops = np.cumsum(counts)
    begins = stops - counts
    places = np.arange(len(ids)) - np.repeat(begins, counts)
    terms = mixed(ids ^ mixed(places.astype(np.uint64)))
    some = counts > 0
    lasts = stops[some] - 1
    terms[lasts] ^= partial[some].astype(np.uint64) << np.uint64(43)
    sums = np.cumsum(terms)
    before = np.where(begins > 0, sums[begins - 1], np.uint64(0))
    return mixed(sums - np.repeat(before, counts))


class PrefixNumbers:
    """Assigns the numbers 0, 1, 2, ... to distinct prefixes, in order of first occurrence."""

    def __init__(self) -> None:
        self._known = np.empty(0, np.uint64)
        """The hashes of all prefixes, ascending."""
        self._numbers = np.empty(0, np.int32)
        """The number of each prefix of `_known`."""
        self._ids: list[Hashes] = []
        """The last id of each prefix, by number."""

    def __len__(self) -> int:
        return len(self._known)

    def number(self, hashes: Hashes, ids: Hashes) -> Numbers:
        """Return the numbers of prefixes. `ids` has the last id of each prefix.

        >>> numbers = PrefixNumbers()
        >>> hashes = np.array([7, 9, 7, 1], np.uint64)
        >>> numbers.number(hashes, hashes).tolist(), numbers.number(hashes[:2], hashes).tolist()
        ([0, 1, 0, 2], [0, 1])
        """
        distinct, first, which = np.unique(hashes, return_index=True, return_inverse=True)
        places = np.searchsorted(self._known, distinct)
        inside = np.minimum(places, max(len(self) - 1, 0))
        old = self._known[inside] == distinct if len(self) else np.zeros(len(distinct), bool)
        numbers = np.empty(len(distinct), np.int32)
        numbers[old] = self._numbers[places[old]]
        fresh = np.flatnonzero(~old)
        order = fresh[np.argsort(first[fresh])]
        numbers[order] = np.arange(len(self), len(self) + len(order), dtype=np.int32)
        self._ids.append(ids[first[order]])
        self._known = np.insert(self._known, places[fresh], distinct[fresh])
        self._numbers = np.insert(self._numbers, places[fresh], numbers[fresh])
        return numbers[which]

    def repeated_ids(self) -> int:
        """Return how many distinct prefixes end with an id that also ends another prefix.

        For each id, the first prefix that ends with it is not counted. The result is 0 if no two
        prefixes end with the same id.
        """
        ids = np.concatenate([*self._ids, np.empty(0, np.uint64)])
        return len(ids) - len(np.unique(ids))
