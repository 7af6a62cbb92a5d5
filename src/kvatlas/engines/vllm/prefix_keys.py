"""Keys under which prefixes lie in a tier: digests of all tokens up to a place.

A block of the tier is found by the tokens up to its end. Windows and recurrent states are
of use only where a request has stopped, anywhere in a block; the key of such a stop says where
it is and what comes before, so that the stops of a prefix can be found from its whole blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from math import gcd

from kvatlas.planning import Plan

Rows = dict[int, list[bytes | None]]
"""A key for each block of a tier, by its groups."""

_DIGEST = 24
_BLOCK, _STOP = b"b", b"s"
_PLACE = 8
"""Bytes of the number of tokens in the key of a stop."""


class PrefixKeys:
    """Keys for the blocks of one tier's plan, under one identity of a model and its weights."""

    def __init__(self, plan: Plan, identity: bytes) -> None:
        self._blocks = [group.block for group in plan.groups]
        self._identity = identity
        self.unit = gcd(*self._blocks)
        """Tokens between two digests: blocks of all groups are multiples of it."""

    def of(self, tokens: Sequence[int], salt: str = "") -> RequestKeys:
        """The keys of a request's tokens; requests of unlike salts share none."""
        seed = _digest(self._identity, salt.encode())
        return RequestKeys(self._blocks, self.unit, seed, tokens)


class RequestKeys:
    """The keys of one request's tokens, or of any prefix of them.

    >>> keys = RequestKeys([2, 4], 2, b"seed", [1, 2, 3, 4, 5])
    >>> rows = keys.rows(5)
    >>> len(rows[0]), len(rows[1]), rows[0][-1] == rows[1][-1], stops_at(rows[0][-1])
    (3, 2, True, 5)
    >>> RequestKeys([2, 4], 2, b"seed", [1, 2, 3, 4, 9, 9]).rows(4) == keys.rows(4)
    True
    """

    def __init__(
        self, blocks: Sequence[int], unit: int, seed: bytes, tokens: Sequence[int]
    ) -> None:
        self._blocks, self._unit = blocks, unit
        self._tokens = array("q", tokens).tobytes()
        self.count = len(tokens)
        self._digests = [seed]
        for begin in range(0, self.count - unit + 1, unit):
            chunk = self._bytes(begin, begin + unit)
            self._digests.append(_digest(self._digests[-1], chunk))

    def rows(self, stop: int) -> Rows:
        """A key for each block of each group, where a request has its first `stop` tokens."""
        rows: Rows = {}
        for group, block in enumerate(self._blocks):
            places = range(block, stop + 1, block)
            row: list[bytes | None] = [_BLOCK + self.before(place) for place in places]
            rows[group] = [*row, self.at_stop(stop)] if stop % block else row
        return rows

    def before(self, stop: int) -> bytes:
        """The digest of all tokens up to the last whole unit before `stop`."""
        return self._digests[stop // self._unit]

    def at_stop(self, stop: int) -> bytes:
        """The key of a stop within a block."""
        before = self.before(stop)
        tail = self._bytes(stop // self._unit * self._unit, stop)
        return _STOP + before + stop.to_bytes(_PLACE, "little") + _digest(before, tail)

    def _bytes(self, start: int, stop: int) -> bytes:
        return self._tokens[8 * start : 8 * stop]


def comes_after(key: bytes) -> bytes | None:
    """What `RequestKeys.before` is at a stop; None for a key that is not of a stop."""
    return key[1 : 1 + _DIGEST] if key.startswith(_STOP) else None


def stops_at(key: bytes) -> int:
    """After how many tokens a stop is."""
    return int.from_bytes(key[1 + _DIGEST : 1 + _DIGEST + _PLACE], "little")


def _digest(before: bytes, more: bytes) -> bytes:
    return blake2b(before + more, digest_size=_DIGEST).digest()
