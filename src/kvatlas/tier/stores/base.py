"""`ObjectStore`: the interface between a tier and an object store.

An object is a named byte string that is written once and atomically: it exists with all of its
bytes or not at all. A second put of the same name does not change it. A store may evict any object
at any time. The tier verifies everything that it reads from a store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from kvatlas.copying.run_bounds import Bytes

ABSENT = -1
"""The size that `get`, `ranges` and `size` return for an absent object."""

Parts = Sequence[Bytes]
"""The memory ranges that together hold the bytes of an object, in order."""


class StoreRoom(NamedTuple):
    """The used bytes, total bytes and number of objects of a store; 0 where unknown."""

    used: int
    total: int
    objects: int


def joined_size(parts: Parts) -> int:
    """Return the total number of bytes of all parts."""
    return sum(part.nbytes for part in parts)


def scatter(content: Bytes, parts: Parts) -> None:
    """Copy the bytes of an object into memory ranges that have the same total size."""
    at = 0
    for part in parts:
        part[:] = content[at : at + part.nbytes]
        at += part.nbytes


def read_into(parts: Parts, content: Bytes | None) -> int:
    """Copy an object's content into `parts` and return its size; `ABSENT` if there is no content.

    Nothing is copied if the content and the parts differ in size.
    """
    if content is None:
        return ABSENT
    if content.nbytes == joined_size(parts):
        scatter(content, parts)
    return content.nbytes


def fill(content: Bytes, wanted: Sequence[tuple[int, Bytes]]) -> int:
    """Copy ranges of an object, given as (offset, memory) pairs, and return the copied size."""
    copied = 0
    for offset, into in wanted:
        some = content[offset : offset + into.nbytes]
        into[: some.nbytes] = some
        copied += some.nbytes
    return copied


def tenant_of(name: str) -> str:
    """Return the part of an object name that identifies its tenant, or "" if it has no tenant.

    >>> tenant_of("kv1/0f3a/marks/77"), tenant_of("kv1/77")
    ('kv1/0f3a', '')
    """
    words = name.split("/", 2)
    return "/".join(words[:2]) if len(words) > 2 else ""


def key_of(name: str) -> str:
    """Return the part of a name that the objects of one key share, or "" if it is too short.

    >>> key_of("kv2/tenant/namespace/key/0.0-64/0"), key_of("kv2/tenant/")
    ('kv2/tenant/namespace/key/', '')
    """
    words = name.split("/", 4)
    return "/".join([*words[:4], ""]) if len(words) > 4 else ""


class ObjectStore(ABC):
    """A store of named objects. Methods are thread-safe and raise `AtlasError` on failure."""

    calls_at_once: ClassVar[int] = 4
    """Number of calls that are worth running in parallel. More would wait for each other."""

    removes_by_prefix: ClassVar[bool] = True
    """Whether `remove_all` takes time proportional to what it removes. If not, the tier lists the
    possible names of a row and calls `remove`."""

    @abstractmethod
    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that do not exist yet. Return, for each, whether it exists now."""

    @abstractmethod
    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects into memory. Return the size of each in bytes, or `ABSENT`.

        If the object has another size than the parts together, the content of the parts is
        undefined.
        """

    def ranges(self, name: str, wanted: Sequence[tuple[int, Bytes]]) -> int:
        """Read parts of an object, each given by its offset and the memory to fill.

        Returns the number of bytes read, or `ABSENT`. Unless a store overrides this method, the
        whole object is read, and nothing is filled if it is damaged.
        """
        size = self.size(name)
        whole = np.empty(max(size, 0), np.uint8)
        if size == ABSENT or (found := self.get([(name, [whole])])[0]) == ABSENT:
            return ABSENT
        return fill(whole, wanted) if found == size else 0

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether the object exists."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> int:
        """Remove objects and return how many existed."""

    def remove_all(self, prefix: str) -> int:
        """Remove every object whose name starts with a prefix and return their number."""
        return self.remove(list(self.names(prefix)))

    @abstractmethod
    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that start with a prefix, in any order."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of an object in bytes, or `ABSENT`."""

    def sweep(self) -> int:
        """Remove unfinished objects of dead writers and return how many bytes they had."""
        return 0

    @abstractmethod
    def capacity(self) -> StoreRoom:
        """Return the used and total bytes and the number of objects of the store."""

    def register(self, memory: Bytes) -> None:  # noqa: B027  # most stores need no registration
        """Register memory that objects will be read into and written from."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the store."""
