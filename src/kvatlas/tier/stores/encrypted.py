"""`EncryptedStore`: objects that are encrypted with AES-256-GCM before they reach a store.

    version, 1 byte | nonce, 12 random bytes | ciphertext, as long as the object | tag, 16 bytes

Each tenant has a key. Each object has a key that is derived from its tenant's key and its name. The
number of objects of a tenant is therefore not limited by random nonces, and no object can take the
place of another. The version and the name are also authenticated as associated data. A tenant's
objects cannot be read without the tenant's key, so deleting the key has the effect of deleting the
objects. Names, sizes and times stay visible.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.tier.stores.base import (
    ABSENT,
    ObjectStore,
    Parts,
    StoreRoom,
    joined_size,
    scatter,
    tenant_of,
)
from kvatlas.tier.stores.key_folder import KEY, KeyFolder

_NONCE, _TAG = 12, 16
_VERSION, _PURPOSE = b"\x01", b"kvatlas row key"
OVERHEAD = len(_VERSION) + _NONCE + _TAG
"""Bytes that encryption adds to an object."""


class EncryptedStore(ObjectStore):
    """A store whose objects are encrypted with the key of their tenant.

    Objects of a tenant without a key count as absent in lookups. Reading or writing them raises an
    error. An object that was encrypted with another key or changed afterwards is damaged: reading
    it returns size 0 and none of its bytes, so that the tier removes and stores it again.
    """

    def __init__(self, store: ObjectStore, keys: KeyFolder) -> None:
        """Encrypt the objects of `store`, which this object owns and closes."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            problem, got = "Encryption requires the package cryptography", "no such package"
            hint = "Install the package: pip install 'kvatlas[wire]'"
            raise AtlasError(Code.MISSING_EXTRA, problem, got=got, hint=hint) from None
        self.store, self.keys = store, keys
        self._cipher, self._invalid = AESGCM, InvalidTag

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Encrypt and store objects that do not exist yet. Return whether each exists now."""
        return self.store.put([(name, [self._encrypted(name, parts)]) for name, parts in objects])

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read and decrypt whole objects. Return the size of each in bytes, or `ABSENT`."""
        into = [np.empty(joined_size(parts) + OVERHEAD, np.uint8) for _, parts in objects]
        asked = [(name, [raw]) for (name, _), raw in zip(objects, into, strict=True)]
        sizes = []
        for (name, parts), raw, size in zip(objects, into, self.store.get(asked), strict=True):
            plain = self._decrypted(name, raw) if size == raw.nbytes else None
            if plain is not None:
                scatter(plain, parts)
                sizes.append(plain.nbytes)
            else:
                sizes.append(ABSENT if size == ABSENT else _damaged_size(size, raw.nbytes))
        return sizes

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether the object exists and its tenant has a key."""
        readable = {digest: self.keys.has(digest) for digest in {_tenant(name) for name in names}}
        found = self.store.exists(names)
        return [one and readable[_tenant(name)] for name, one in zip(names, found, strict=True)]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects and return how many existed. This needs no key."""
        return self.store.remove(names)

    def remove_all(self, prefix: str) -> int:
        """Remove every object whose name starts with a prefix. This needs no key."""
        return self.store.remove_all(prefix)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that start with a prefix. They are not encrypted."""
        return self.store.names(prefix)

    def size(self, name: str) -> int:
        """Return the size of an object before encryption, or `ABSENT`."""
        size = self.store.size(name)
        return size if size == ABSENT else max(size - OVERHEAD, 0)

    def sweep(self) -> int:
        """Remove unfinished objects of dead writers and return how many bytes they had."""
        return self.store.sweep()

    def capacity(self) -> StoreRoom:
        """Return the used and total bytes and the number of objects of the store."""
        return self.store.capacity()

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def _encrypted(self, name: str, parts: Parts) -> Bytes:
        nonce, plain = os.urandom(_NONCE), b"".join(part.tobytes() for part in parts)
        sealed = self._cipher(self._key(name)).encrypt(nonce, plain, _VERSION + name.encode())
        return np.frombuffer(_VERSION + nonce + sealed, np.uint8)

    def _decrypted(self, name: str, raw: Bytes) -> Bytes | None:
        """Return the decrypted bytes of an object, or None if it is damaged."""
        cipher, content = self._cipher(self._key(name)), raw.tobytes()
        version, rest = content[: len(_VERSION)], content[len(_VERSION) :]
        if version != _VERSION or len(content) < OVERHEAD:
            return None
        try:
            plain = cipher.decrypt(rest[:_NONCE], rest[_NONCE:], version + name.encode())
        except self._invalid:
            return None
        return np.frombuffer(plain, np.uint8)

    def _key(self, name: str) -> bytes:
        """Return the key of an object, derived from its name and the key of its tenant."""
        key = self.keys.key(_tenant(name))
        return blake2b(name.encode(), key=key, digest_size=KEY, person=_PURPOSE).digest()


def _tenant(name: str) -> str:
    """Return the tenant's digest in the name of an object; empty if it has none."""
    return tenant_of(name).rpartition("/")[2]


def _damaged_size(size: int, expected: int) -> int:
    """Return the size to report for an object of `size` stored bytes that cannot be decrypted.

    If the object has the expected number of stored bytes, return 0, which marks it as damaged.
    Otherwise return its size without the bytes that encryption adds.
    """
    return 0 if size == expected else max(size - OVERHEAD, 0)
