"""Keys for the blocks of a tier, from a request's tokens: equal prefixes have equal keys.

Hashes are chained at one granularity, the greatest that divides the blocks of all groups, so
a key stands for all tokens up to its block's end. The weights are no part of it: they are the
namespace's.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import gcd

import numpy as np

from kvatlas.planning import Plan
from kvatlas.pool import HashChain, PrefixIdentity

_DIGEST = 16


def prefix_keys(
    plan: Plan, tokens: Sequence[int], *, salt: bytes = b"", lora: str = ""
) -> dict[int, list[bytes | None]]:
    """A key for each block of each group of a tier's plan; the last stands for what it has.

    Requests of unlike `salt` or LoRA adapter share none.

    >>> from kvatlas.planning import plan
    >>> rows = plan("gpt-oss-20b", memory="1GiB", layout="BHLNC", block_size=64, max_len=256)
    >>> one, two = (prefix_keys(rows, [*range(128), last]) for last in (1, 2))
    >>> [len(keys) for keys in one.values()], one[0][:2] == two[0][:2], one[0][2] == two[0][2]
    ([3, 3], True, False)
    >>> one[0][0] == prefix_keys(rows, range(128), salt=b"mine")[0][0]
    False
    """
    grain = gcd(*(group.block for group in plan.groups))
    chain = HashChain(PrefixIdentity(salt=salt, lora=lora), grain)
    chain.extend(tokens)
    count = len(tokens)
    keys: dict[int, list[bytes | None]] = {}
    for index, group in enumerate(plan.groups):
        whole = count // group.block
        keys[index] = list(chain.ends(group.block, 0, whole))
        if count % group.block:
            tail = np.array(tokens[count // grain * grain :], np.int64).tobytes()
            last = chain.at(count)
            keys[index].append(blake2b(last + tail, digest_size=_DIGEST).digest() if tail else last)
    return keys
