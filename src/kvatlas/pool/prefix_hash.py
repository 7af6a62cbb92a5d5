"""Hashes of prefixes: equal exactly where everything up to the end of a block is equal.

Before the first token goes what requests must share beside their tokens: a salt (tenants that
must not see each other's hits), the LoRA adapter and the identity of the weights. An image or
a sound is no token: its own digest joins the block in which it begins.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from hashlib import sha256

import msgspec
import numpy as np

from kvatlas.errors import AtlasError, Code

TOKEN = 8
"""Bytes of a token where tokens are kept as bytes."""
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
        """The hash of no tokens."""
        parts = [self.weights, self.salt, self.lora]
        try:
            return sha256(msgspec.msgpack.encode(parts)).digest()
        except UnicodeEncodeError as error:
            problem = "The name of weights or of an adapter is no text"
            hint = "Half a surrogate pair cannot be written as UTF-8"
            raise AtlasError(Code.BAD_CONFIG, problem, got=repr(error.object), hint=hint) from None


class HashChain:
    """The tokens of a request and their hashes at every `grain` tokens, made as they come.

    One SHA-256 runs over all tokens, and is asked at every end of a block. Where an image
    begins it starts anew, from what it was and the image's digest: no tokens look like one.

    >>> one, two = HashChain(PrefixIdentity(), 4), HashChain(PrefixIdentity(salt=b"me"), 4)
    >>> one.extend([1, 2, 3, 4, 5]); one.extend([6, 7, 8]); two.extend(range(1, 9))
    >>> len(one), len(two), one.at(8) == two.at(8)
    (8, 8, False)
    """

    def __init__(self, identity: PrefixIdentity, grain: int) -> None:
        self.grain = grain
        self.identity = identity
        self._links = [identity.root()]
        self._running = sha256(self._links[0])
        self._rows: list[bytes] = []
        """The tokens between two hashes, as bytes."""
        self._open = b""
        """Tokens behind the last hash."""
        self._media = sorted(identity.media)
        self._added = 0

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._rows) * self.grain + len(self._open) // TOKEN

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        waiting = self._open + _as_bytes(tokens)
        size = TOKEN * self.grain
        whole = len(waiting) // size * size
        rows = np.frombuffer(waiting[:whole], f"V{size}").tolist() if whole else []
        self._rows += rows
        self._open = waiting[whole:]
        if self._added == len(self._media):
            update, digest = self._running.update, self._running.digest
            self._links += [digest() for row in rows if update(row) is None]  # it returns None
            return
        for row in rows:
            self._running.update(row)
            media = self._media_before(len(self._links) * self.grain)
            if media:
                joined = b"media" + self._running.digest() + media
                self._running = sha256(sha256(joined).digest())
            self._links.append(self._running.digest())

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

    def starts(self, block: int, start: int, stop: int) -> list[bytes]:
        """The hashes before blocks `start` to `stop`."""
        step = block // self.grain
        return self._links[start * step : stop * step : step]

    def at(self, tokens: int) -> bytes:
        """The hash of the first `tokens` tokens: a multiple of the grain."""
        return self._links[tokens // self.grain]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens by their position."""
        return list(struct.unpack(f"{stop - start}q", self._bytes(start, stop)))

    def rows(self, block: int, start: int, stop: int) -> list[bytes]:
        """The tokens of blocks `start` to `stop` as bytes, each up to its first image or sound."""
        if block == self.grain and not self._media:
            return self._rows[start:stop]
        return [self.row(n * block, (n + 1) * block) for n in range(start, stop)]

    def row(self, start: int, stop: int) -> bytes:
        """Tokens of a block as bytes, up to its first image or sound: these can be compared."""
        after = bisect_left(self._media, (start, b""))
        if after < len(self._media):
            stop = min(stop, self._media[after][0])
        return self._bytes(start, stop)

    def _bytes(self, start: int, stop: int) -> bytes:
        first, last = start // self.grain, stop // self.grain
        rows = b"".join(self._rows[first : last + 1])
        rows += self._open if last >= len(self._rows) else b""
        skipped = first * self.grain
        return rows[(start - skipped) * TOKEN : (stop - skipped) * TOKEN]

    def copy(self) -> HashChain:
        """The same, to go on with apart."""
        other = HashChain(self.identity, self.grain)
        other._links, other._rows, other._open = list(self._links), list(self._rows), self._open
        other._running, other._added = self._running.copy(), self._added
        return other


def _as_bytes(tokens: Sequence[int]) -> bytes:
    try:
        if not isinstance(tokens, np.ndarray):  # the quickest way from a list, and it checks
            return struct.pack(f"{len(tokens)}q", *tokens)
        if tokens.dtype.kind in "iu" and tokens.dtype != np.uint64:
            return tokens.astype(np.int64).tobytes()
    except (struct.error, TypeError):
        pass
    hint = f"Tokens are whole numbers below {_MOST}"
    raise AtlasError(Code.NOT_AN_INTEGER, got=repr(tokens)[:80], hint=hint)
