"""Keys for the blocks of a tier, from a request's tokens: equal prefixes have equal keys.

Hashes are chained at one granularity, the greatest that divides the blocks of all groups, so
a key stands for all tokens up to its block's end. The weights are no part of it: they are the
namespace's. The chain is part of a format that others implement
(docs/reference/tier_format.md), so pools may hash differently.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from math import gcd

import msgspec
import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan

_DIGEST = 16
_TOKEN = 8
"""Bytes of a token."""

BlockKeys = dict[int, list[bytes | None]]
"""A key for each block of a tier, by its groups."""


class PrefixChain:
    """The keys of a request's tokens in a tier of some plan, and of every prefix of them.

    Requests of unlike `salt` or LoRA adapter share none. An image or a sound must be told
    apart by its tokens, or by the salt.

    >>> from kvatlas.planning import plan
    >>> rows = plan("Qwen3-8B", memory="1GiB", layout="BHLNC", block_size=64, max_len=256)
    >>> chain = PrefixChain(rows, range(200))
    >>> chain.keys(100) == PrefixChain(rows, range(100)).keys()
    True
    >>> chain.keys(100)[0] == [chain.key_at(64), chain.key_at(100)]
    True
    """

    def __init__(
        self,
        plan: Plan,
        tokens: Sequence[int],
        *,
        salt: bytes = b"",
        lora: str = "",
        identity: bytes = b"",
    ) -> None:
        """`identity` goes before the salt, where the tier's names say nothing of the weights."""
        self._blocks = [group.block for group in plan.groups]
        self._grain = grain = gcd(*self._blocks)
        self._text, self.count = _as_bytes(tokens), len(tokens)
        self.salt, self.lora = salt, lora
        if not isinstance(salt, bytes) or not isinstance(lora, str):
            problem, hint = (
                "A salt is not bytes, or an adapter's name no text",
                "Leave out what is none",
            )
            raise AtlasError(Code.BAD_CONFIG, problem, got=f"{salt!r:.80}, {lora!r:.80}", hint=hint)
        self._links = [_root(identity + salt, lora)]
        for start in range(0, self.count - grain + 1, grain):
            self._links.append(_digest(self._links[-1] + self._between(start, start + grain)))

    def keys(self, stop: int | None = None) -> BlockKeys:
        """A key for each block of each group, where a request has its first `stop` tokens."""
        stop = self.count if stop is None else stop
        return {
            group: [self.key_at(min(end, stop)) for end in range(block, stop + block, block)]
            for group, block in enumerate(self._blocks)
        }

    def key_at(self, stop: int) -> bytes:
        """The key of the block that a request of so many tokens ends in, in any group."""
        if not 0 <= stop <= self.count:
            problem, hint = "The request has fewer tokens", f"It has {self.count}"
            raise AtlasError(Code.BAD_TOKENS, problem, got=stop, hint=hint)
        whole = stop // self._grain
        tail = self._between(whole * self._grain, stop)
        return _digest(self._links[whole] + tail) if tail else self._links[whole]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Some of the tokens."""
        found: list[int] = np.frombuffer(self._between(start, stop), "<i8").tolist()
        return found

    def _between(self, start: int, stop: int) -> bytes:
        return self._text[_TOKEN * start : _TOKEN * stop]


def prefix_keys(
    plan: Plan, tokens: Sequence[int], *, salt: bytes = b"", lora: str = ""
) -> BlockKeys:
    """A key for each block of each group of a tier's plan; the last stands for what it has.

    >>> from kvatlas.planning import plan
    >>> rows = plan("gpt-oss-20b", memory="1GiB", layout="BHLNC", block_size=64, max_len=256)
    >>> one, two = (prefix_keys(rows, [*range(128), last]) for last in (1, 2))
    >>> [len(keys) for keys in one.values()], one[0][:2] == two[0][:2], one[0][2] == two[0][2]
    ([3, 3], True, False)
    >>> one[0][0] == prefix_keys(rows, range(128), salt=b"mine")[0][0]
    False
    """
    return PrefixChain(plan, tokens, salt=salt, lora=lora).keys()


def _root(salt: bytes, lora: str) -> bytes:
    """The key of no tokens."""
    try:
        return _digest(msgspec.msgpack.encode([salt, lora]))
    except UnicodeEncodeError:
        hint = "Half a surrogate pair cannot be written as UTF-8"
        problem = "The name of an adapter is no text"
        raise AtlasError(Code.BAD_CONFIG, problem, got=repr(lora), hint=hint) from None


def _as_bytes(tokens: Sequence[int]) -> bytes:
    try:
        return np.asarray(array("q", tokens), "<i8").tobytes()
    except (OverflowError, TypeError, ValueError):
        hint = "Tokens are whole numbers below 2^63"
        raise AtlasError(Code.NOT_AN_INTEGER, got=repr(tokens)[:80], hint=hint) from None


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=_DIGEST).digest()
