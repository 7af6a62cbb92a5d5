"""`ObjectStore`: what a tier asks of a store, whoever keeps the bytes.

An object is bytes under a name, written once and as a whole: it is there with all of its
bytes or not at all, and a second put of a name leaves the first as it is. A store may lose any
object at any time. Nothing that it answers is believed before it was checked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from kvatlas.wire.run_bounds import Bytes

ABSENT = -1
"""What `get` and `ranges` say of an object that is not there."""

Parts = Sequence[Bytes]
"""The bytes of an object, in several stretches of memory."""


class StoreRoom(NamedTuple):
    """How many bytes and objects a store has, and how many bytes it could have; 0 if unknown."""

    used: int
    total: int
    objects: int


def joined_size(parts: Parts) -> int:
    """Bytes of all parts together."""
    return sum(part.nbytes for part in parts)


def tenant_of(name: str) -> str:
    """What the names of all objects of one tenant begin with; empty for an object of nobody.

    >>> tenant_of("kv1/0f3a/marks/77"), tenant_of("kv1/77")
    ('kv1/0f3a', '')
    """
    words = name.split("/", 2)
    return "/".join(words[:2]) if len(words) > 2 else ""


class ObjectStore(ABC):
    """Objects by name. Any number of threads may use one; a failure is an `AtlasError`."""

    calls_at_once: ClassVar[int] = 4
    """Calls that are worth being made at once: more would wait for each other."""

    @abstractmethod
    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects; for each whether it is there now, by this put or an earlier one."""

    @abstractmethod
    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects into memory; the size of each, or `ABSENT`.

        Where the size is another than that of the parts, what is in them means nothing.
        """

    @abstractmethod
    def ranges(self, name: str, wanted: Sequence[tuple[int, Bytes]]) -> int:
        """Read parts of an object, from an offset each; the bytes that were read, or `ABSENT`."""

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which objects are there."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> int:
        """Remove objects; how many were there."""

    @abstractmethod
    def remove_all(self, prefix: str) -> int:
        """Remove every object whose name begins so; how many were there."""

    @abstractmethod
    def names(self, prefix: str = "") -> Iterator[str]:
        """The names that begin so, in no order."""

    @abstractmethod
    def size(self, name: str) -> int:
        """The bytes of an object, or `ABSENT`."""

    @abstractmethod
    def sweep(self) -> int:
        """Remove what writers that died have left behind; how many bytes that were."""

    @abstractmethod
    def capacity(self) -> StoreRoom:
        """What there is and what could be."""

    @abstractmethod
    def register(self, memory: Bytes) -> None:
        """Be told of memory that objects will be read from and written to."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the store holds open."""
