"""Hashes of prefixes that end where a block ends.

Two hashes are equal if and only if everything that they cover is equal. In addition to tokens, a
hash covers everything that requests must have in common: a salt (for tenants that must not share
hits), the LoRA adapter and the identity of the weights. The digest of an image or audio clip is
added to the hash of the block in which it begins.
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
"""Number of bytes per token in packed form."""


class PrefixIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that two requests must share, besides tokens, to have equal caches."""

    weights: str = ""
    """The identity of the weights, such as a digest of the checkpoint."""
    salt: bytes = b""
    lora: str = ""
    media: tuple[tuple[int, bytes], ...] = ()
    """(position of its first token, digest) of each image or audio clip."""

    def root(self) -> bytes:
        """Return the hash of the empty prefix."""
        parts = [self.weights, self.salt, self.lora]
        try:
            return sha256(msgspec.msgpack.encode(parts)).digest()
        except UnicodeEncodeError as error:
            problem = "The names of the weights and the adapter must be encodable as UTF-8"
            hint = "Remove unpaired surrogates from the names"
            raise AtlasError(Code.BAD_CONFIG, problem, got=repr(error.object), hint=hint) from None


class HashChain:
    """The tokens of a request, and a hash of the prefix after every `grain` tokens.

    One SHA-256 runs over all tokens, and its digest is taken every `grain` tokens. Where an image
    begins, the SHA-256 is restarted from the previous hash and the image's digest, so that no
    sequence of tokens can have the same hash as an image.

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
        """For each hash, the tokens between the previous hash and this one, packed as bytes."""
        self._open = b""
        """The packed tokens after the last hash."""
        self._media = sorted(identity.media)
        self._added = 0

    def __len__(self) -> int:
        """Return the number of tokens that were added so far."""
        return len(self._rows) * self.grain + len(self._open) // TOKEN

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens and compute their hashes."""
        waiting = self._open + _as_bytes(tokens)
        size = TOKEN * self.grain
        whole = len(waiting) // size * size
        rows = np.frombuffer(waiting[:whole], f"V{size}").tolist() if whole else []
        self._rows += rows
        self._open = waiting[whole:]
        if self._added == len(self._media):
            update, digest = self._running.update, self._running.digest
            self._links += [digest() for row in rows if update(row) is None]  # always None
            return
        for row in rows:
            self._running.update(row)
            media = self._media_before(len(self._links) * self.grain)
            if media:
                joined = b"media" + self._running.digest() + media
                self._running = sha256(sha256(joined).digest())
            self._links.append(self._running.digest())

    def _media_before(self, end: int) -> bytes:
        """Return the digests of media that begin before token `end` and are not hashed yet."""
        joined = b""
        while self._added < len(self._media) and self._media[self._added][0] < end:
            joined += msgspec.msgpack.encode(self._media[self._added])
            self._added += 1
        return joined

    def ends(self, block: int, start: int, stop: int) -> list[bytes]:
        """Return the prefix hash at the end of each of blocks start .. stop - 1.

        Blocks have `block` tokens.
        """
        step = block // self.grain
        return self._links[(start + 1) * step : stop * step + 1 : step]

    def starts(self, block: int, start: int, stop: int) -> list[bytes]:
        """Return the prefix hash at the beginning of each of blocks start .. stop - 1.

        Blocks have `block` tokens.
        """
        step = block // self.grain
        return self._links[start * step : stop * step : step]

    def at(self, tokens: int) -> bytes:
        """Return the hash of the first `tokens` tokens. `tokens` must be a multiple of `grain`."""
        return self._links[tokens // self.grain]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the ids of tokens start .. stop - 1."""
        return list(struct.unpack(f"{stop - start}q", self._bytes(start, stop)))

    def rows(self, block: int, start: int, stop: int) -> list[bytes]:
        """Return the packed tokens of each of blocks start .. stop - 1; see `row`.

        Blocks have `block` tokens.
        """
        if block == self.grain and not self._media:
            return self._rows[start:stop]
        return [self.row(n * block, (n + 1) * block) for n in range(start, stop)]

    def row(self, start: int, stop: int) -> bytes:
        """Return tokens start .. stop - 1 as packed bytes, up to the first image or audio clip."""
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
        """Return a copy that can be extended independently."""
        other = HashChain(self.identity, self.grain)
        other._links, other._rows, other._open = list(self._links), list(self._rows), self._open
        other._running, other._added = self._running.copy(), self._added
        return other


def _as_bytes(tokens: Sequence[int]) -> bytes:
    try:
        if not isinstance(tokens, np.ndarray):  # fastest for lists, and validates the tokens
            return struct.pack(f"{len(tokens)}q", *tokens)
        if tokens.dtype.kind in "iu" and tokens.dtype != np.uint64:
            return tokens.astype(np.int64).tobytes()
    except (struct.error, TypeError):
        pass
    problem = "Tokens must be integers between -2^63 and 2^63 - 1"
    hint = "Pass token ids as a list of int, or as an array of a signed integer dtype"
    raise AtlasError(Code.NOT_AN_INTEGER, problem, got=repr(tokens)[:80], hint=hint)
