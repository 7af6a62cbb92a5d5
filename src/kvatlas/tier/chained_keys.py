"""Keys for the blocks of a tier, from a request's tokens: equal prefixes have equal keys.

Hashes are chained at one granularity, the greatest that divides the blocks of all groups, so
a key stands for all tokens up to its block's end. The weights are no part of it: they are the
namespace's. The chain is part of a format that others implement (docs/tier_format.md), so it
is nobody else's: pools may hash as they like.
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


def prefix_keys(
    plan: Plan, tokens: Sequence[int], *, salt: bytes = b"", lora: str = ""
) -> dict[int, list[bytes | None]]:
    """A key for each block of each group of a tier's plan; the last stands for what it has.

    Requests of unlike `salt` or LoRA adapter share none. An image or a sound must be told
    apart by its tokens, or by the salt.

    >>> from kvatlas.planning import plan
    >>> rows = plan("gpt-oss-20b", memory="1GiB", layout="BHLNC", block_size=64, max_len=256)
    >>> one, two = (prefix_keys(rows, [*range(128), last]) for last in (1, 2))
    >>> [len(keys) for keys in one.values()], one[0][:2] == two[0][:2], one[0][2] == two[0][2]
    ([3, 3], True, False)
    >>> one[0][0] == prefix_keys(rows, range(128), salt=b"mine")[0][0]
    False
    """
    text, count = _as_bytes(tokens), len(tokens)
    grain = gcd(*(group.block for group in plan.groups))
    links = [_digest(msgspec.msgpack.encode([salt, lora]))]
    for start in range(0, count // grain * grain, grain):
        links.append(_digest(links[-1] + text[_TOKEN * start : _TOKEN * (start + grain)]))
    tail = text[_TOKEN * (count // grain * grain) :]
    end = _digest(links[-1] + tail) if tail else links[-1]
    keys: dict[int, list[bytes | None]] = {}
    for index, group in enumerate(plan.groups):
        step = group.block // grain
        begun = [end] if count % group.block else []
        keys[index] = [*links[step::step], *begun]
    return keys


def _as_bytes(tokens: Sequence[int]) -> bytes:
    try:
        return np.asarray(array("q", tokens), "<i8").tobytes()
    except (OverflowError, TypeError, ValueError):
        hint = "Tokens are whole numbers below 2^63"
        raise AtlasError(Code.NOT_AN_INTEGER, got=repr(tokens)[:80], hint=hint) from None


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=_DIGEST).digest()
