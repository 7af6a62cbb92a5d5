"""Chained hashes: equal exactly where everything up to the end of a block is equal.

The first link is what requests must share beside their tokens: a salt (tenants that must not
see each other's hits), the LoRA adapter and the identity of the weights. An image or a sound
is no token: its own digest joins the block in which it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from kvatlas.errors import AtlasError, Code

DIGEST = 16
"""Bytes of a hash."""
_MOST = 2**63


class PrefixIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What two requests must share before equal tokens mean equal caches."""

    weights: str = ""
    """Which weights: a checkpoint's digest, say. Other weights write other caches."""
    salt: bytes = b""
    lora: str = ""
    media: tuple[tuple[int, bytes], ...] = ()
    """(position of its first token, digest) of each image or sound."""

    def root(self) -> bytes:
        """The link before the first block's."""
        parts = [self.weights, self.salt, self.lora]
        return blake2b(msgspec.msgpack.encode(parts), digest_size=DIGEST).digest()


class HashChain:
    """The hashes of a request at every `grain` tokens, made as tokens come.

    >>> one, two = HashChain(PrefixIdentity(), 4), HashChain(PrefixIdentity(salt=b"me"), 4)
    >>> one.extend([1, 2, 3, 4, 5]); one.extend([6, 7, 8]); two.extend(range(1, 9))
    >>> len(one), len(two), one.at(8) == two.at(8)
    (8, 8, False)
    """

    def __init__(self, identity: PrefixIdentity, grain: int) -> None:
        self.grain = grain
        self.identity = identity
        self._links = [identity.root()]
        self._open: list[int] = []
        self._media = sorted(identity.media)
        self._added = 0

    def __len__(self) -> int:
        """Tokens so far."""
        return (len(self._links) - 1) * self.grain + len(self._open)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        waiting = [*self._open, *tokens] if self._open else tokens
        whole = len(waiting) // self.grain
        try:
            rows = np.array(waiting[: whole * self.grain], np.int64).tobytes()
        except (OverflowError, TypeError, ValueError):
            hint = f"Tokens are whole numbers below {_MOST}"
            raise AtlasError(Code.NOT_AN_INTEGER, got=repr(waiting)[:80], hint=hint) from None
        link, size = self._links[-1], 8 * self.grain
        for start in range(0, len(rows), size):
            text = link + rows[start : start + size]
            if self._added < len(self._media):
                text += self._media_before(len(self._links) * self.grain)
            link = blake2b(text, digest_size=DIGEST).digest()
            self._links.append(link)
        self._open = list(waiting[whole * self.grain :])

    def _media_before(self, end: int) -> bytes:
        """Images and sounds that begin before a token, and have not joined a block yet."""
        joined = b""
        while self._added < len(self._media) and self._media[self._added][0] < end:
            joined += msgspec.msgpack.encode(self._media[self._added])
            self._added += 1
        return joined

    def ends(self, block: int, start: int, stop: int) -> list[bytes]:
        """The hashes at the ends of blocks `start` to `stop`, of so many tokens each."""
        step = block // self.grain
        return self._links[(start + 1) * step : stop * step + 1 : step]

    def at(self, tokens: int) -> bytes:
        """The hash of the first `tokens` tokens: a multiple of the grain."""
        return self._links[tokens // self.grain]

    def copy(self) -> HashChain:
        """The same, to go on with apart."""
        other = HashChain(self.identity, self.grain)
        other._links, other._open = list(self._links), list(self._open)
        other._added = self._added
        return other
