"""Prefixes of earlier requests, including those whose blocks have been evicted."""

from __future__ import annotations

from collections.abc import Sequence


class SeenPrefixes:
    """The hashes of the most recently requested prefixes, at most `most`.

    >>> seen = SeenPrefixes(3)
    >>> seen.count([b"a", b"b"]), seen.count([b"a", b"c"]), seen.count([b"b"])
    (0, 1, 1)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._hashes: dict[bytes, None] = {}
        """Known hashes, oldest first."""

    def count(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading hashes were seen before, and record all of them."""
        known = self._hashes
        count = next((n for n, one in enumerate(hashes) if one not in known), len(hashes))
        known.update(dict.fromkeys(hashes[count:]))
        while len(known) > self._most:
            del known[next(iter(known))]
        return count

    def clear(self) -> None:
        """Forget all prefixes."""
        self._hashes.clear()
