"""Prefixes that were asked for before, whether their blocks are still there or not."""

from __future__ import annotations

from collections.abc import Sequence


class SeenPrefixes:
    """The hashes of prefixes that were asked for last, so many of them.

    >>> seen = SeenPrefixes(3)
    >>> seen.count([b"a", b"b"]), seen.count([b"a", b"c"]), seen.count([b"b"])
    (0, 1, 1)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._hashes: dict[bytes, None] = {}
        """The oldest first."""

    def count(self, hashes: Sequence[bytes]) -> int:
        """How many of the first were asked for; from now on all of them were."""
        known = self._hashes
        count = next((n for n, one in enumerate(hashes) if one not in known), len(hashes))
        known.update(dict.fromkeys(hashes[count:]))
        while len(known) > self._most:
            del known[next(iter(known))]
        return count

    def clear(self) -> None:
        """Nothing was asked for."""
        self._hashes.clear()
