"""Keys for the blocks of a tier, computed from a request's tokens: equal prefixes have equal keys.

Each hash includes the one before it, so a key identifies all tokens up to the end of its block. The
number of tokens per hash is the greatest common divisor of all groups' block sizes. The model's
weights are identified by the namespace of a store, or by the keys if `identity` is passed. The
chain is part of a format that other programs implement (docs/reference/tier_format.md), so it is
independent of the hashes that pools use.
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
"""Number of bytes per token."""

BlockKeys = dict[int, list[bytes | None]]
"""A key or None for each block of a tier, by group."""


class PrefixChain:
    """The keys of a request's tokens, and of all their prefixes, in a tier with a given plan.

    Requests that differ in `salt` or LoRA adapter share no keys. Images and audio must be
    identified by their tokens or by the salt.

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
        plan: Plan | int,
        tokens: Sequence[int],
        *,
        salt: bytes = b"",
        lora: str = "",
        identity: bytes = b"",
    ) -> None:
        """Compute the hash chain of `tokens`. `plan` can also be the number of tokens per row.

        Pass a digest of the weights as `identity`, unless object names include this digest.
        """
        sizes = (group.block for group in plan.groups) if isinstance(plan, Plan) else (plan,)
        self._blocks = list(sizes)
        self._grain = grain = gcd(*self._blocks)
        self._text, self.count = _as_bytes(tokens), len(tokens)
        self.salt, self.lora = salt, lora
        if not isinstance(salt, bytes):
            problem = "A salt must be a bytes object"
            hint = "Encode the salt as bytes, or omit salt= for requests without a salt"
            raise AtlasError(Code.BAD_CONFIG, problem, got=f"{salt!r:.80}", hint=hint)
        if not isinstance(lora, str):
            problem = "An adapter's name must be a string"
            hint = "Pass the name as a string, or omit lora= for requests without an adapter"
            raise AtlasError(Code.BAD_CONFIG, problem, got=f"{lora!r:.80}", hint=hint)
        self._links = [_root(identity + salt, lora)]
        for start in range(0, self.count - grain + 1, grain):
            self._links.append(_digest(self._links[-1] + self._between(start, start + grain)))

    def keys(self, stop: int | None = None) -> BlockKeys:
        """Return the keys of the first `stop` tokens: one for each block of each group."""
        stop = self.count if stop is None else stop
        return {
            group: [self.key_at(min(end, stop)) for end in range(block, stop + block, block)]
            for group, block in enumerate(self._blocks)
        }

    def key_at(self, stop: int) -> bytes:
        """Return the key of the block that ends after `stop` tokens.

        This key is the same in all groups.
        """
        if not 0 <= stop <= self.count:
            problem = f"The number of tokens must be between 0 and {self.count}"
            hint = "Pass at most the number of tokens that the chain was built from"
            raise AtlasError(Code.BAD_TOKENS, problem, got=stop, hint=hint)
        whole = stop // self._grain
        tail = self._between(whole * self._grain, stop)
        return _digest(self._links[whole] + tail) if tail else self._links[whole]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the vocabulary ids of the request's tokens start .. stop - 1."""
        found: list[int] = np.frombuffer(self._between(start, stop), "<i8").tolist()
        return found

    def _between(self, start: int, stop: int) -> bytes:
        return self._text[_TOKEN * start : _TOKEN * stop]


def prefix_keys(
    plan: Plan, tokens: Sequence[int], *, salt: bytes = b"", lora: str = ""
) -> BlockKeys:
    """Return a key for each block of each group of a tier's plan.

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
    """Return the first link of the hash chain: the key of a prefix without tokens."""
    try:
        return _digest(msgspec.msgpack.encode([salt, lora]))
    except UnicodeEncodeError:
        hint = "Remove unpaired surrogates: they cannot be encoded as UTF-8"
        problem = "The name of an adapter is not valid Unicode text"
        raise AtlasError(Code.BAD_CONFIG, problem, got=repr(lora), hint=hint) from None


def _as_bytes(tokens: Sequence[int]) -> bytes:
    try:
        return np.asarray(array("q", tokens), "<i8").tobytes()
    except (OverflowError, TypeError, ValueError):
        problem = "Tokens must be integers between -2^63 and 2^63 - 1"
        got, hint = repr(tokens)[:80], "Pass a sequence of token ids"
        raise AtlasError(Code.NOT_AN_INTEGER, problem, got=got, hint=hint) from None


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=_DIGEST).digest()
