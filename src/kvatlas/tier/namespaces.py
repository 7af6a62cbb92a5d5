"""Object names, and the identities that must match to share objects.

    kv2/TENANT/NAMESPACE/KEY/KIND.FIRST-STOP/INDEX    an object of a row
    kv2/TENANT/marks/DIGEST                           a mark, which explains misses

Words in capitals are hexadecimal digests or numbers, so that the name of a tenant or a key cannot
lead to objects of another tenant. A row is one block of the tier. Each namespace has a mark for
every level of its identity: tenant, model, weights, content and format. A mark is a small object.
Engines have the same mark for a level if they agree in that level and in all earlier levels. The
mark exists once one of these engines has stored something.

A namespace is one combination of tenant, model, weights, content (the kinds of rows and their
dtypes) and format (tokens per row and how a row is cut). Engines that differ in any of them use
different namespaces. A namespace depends on no plan: see `row_kinds`. Format 1 hashed the regions
of a plan. Its objects have names that start with `kv1`; they are reported and removed, never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvatlas.copying.run_bounds import Bytes
from kvatlas.models import CacheIdentity
from kvatlas.tier.canonical_rows import kinds_of_rows
from kvatlas.tier.object_header import ObjectPlace, checksum, header
from kvatlas.tier.request_blocks import Cover
from kvatlas.tier.row_kinds import RowKind
from kvatlas.tier.row_objects import RowObjects

ROOT = "kv2"
"""The first word of all names. It changes with every change of the format."""
OLD_ROOTS = ("kv1",)
"""The first words of names in older formats, which this version does not read."""
_DIGEST = 16
_OBJECT = re.compile(
    rf"{ROOT}/([0-9a-f]{{32}})/([0-9a-f]{{32}})/([0-9a-f]{{32}}/([0-9]{{1,6}})\.[0-9]{{1,20}}-[0-9]{{1,20}})"
    r"/([0-9]{1,6})"
)
LEVELS = ("tenant", "model", "weights", "dtype", "format")
"""The properties that must match. A miss reports the first for which there are no objects."""


class RowName(NamedTuple):
    """The name of a row, which is one block of a tier in an object store.

    It consists of the group (the number of the row's kind), the key and the tokens that the row
    contains.
    """

    group: int
    key: bytes
    cover: Cover

    @property
    def place(self) -> str:
        """The digest of the group and the key, in hex; it follows the namespace in object names."""
        return _digest(self.group.to_bytes(4, "little") + self.key).hex()

    @property
    def name(self) -> str:
        """The part of the row's object names between the namespace and the object's index."""
        return f"{self.place}/{self.group}.{self.cover.first}-{self.cover.stop}"

    @property
    def digest(self) -> bytes:
        """The digest of the row, which the headers of the row's objects contain."""
        return row_digest(self.name)


class Namespace:
    """Makes the names of objects that have one identity and one row format.

    >>> from kvatlas.tier.canonical_rows import canonical_rows
    >>> rows = canonical_rows("Qwen3-8B", span=64)
    >>> ours, theirs = (
    ...     Namespace(CacheIdentity(weights="w", tenant=who), RowObjects(rows)) for who in "ab"
    ... )
    >>> row = RowName(0, b"a digest of the tokens", Cover(0, 64))
    >>> len(ours.objects(row)), ours.objects(row)[3].startswith(ours.prefix)
    (8, True)
    >>> set(ours.objects(row)) & set(theirs.objects(row))
    set()
    """

    def __init__(self, identity: CacheIdentity, cut: RowObjects) -> None:
        self.identity, self.cut = identity, cut
        kinds = kinds_of_rows(cut.plan)
        self._kinds = [kind.to_data() for kind in kinds]
        about = {
            "tenant": identity.tenant,
            "model": caches_of(kinds),
            "weights": identity.computed_with,
            "dtype": self._kinds,
            "format": [cut.plan.block_size, cut.shards, cut.stages],
        }
        self._levels = [about[level] for level in LEVELS]
        self.digest = self._up_to(len(LEVELS))
        self.tenant_prefix = tenant_prefix(identity.tenant)
        self.prefix = f"{self.tenant_prefix}{self.digest.hex()}/"

    def objects(self, row: RowName) -> list[str]:
        """Return the names of a row's objects by object index. A row is one block of the tier."""
        begin = f"{self.prefix}{row.name}/"
        return [f"{begin}{index}" for index in range(len(self.cut.groups[row.group]))]

    def all_of(self, group: int, key: bytes) -> str:
        """Return the common prefix of the names of all objects with this group and key."""
        return f"{self.prefix}{RowName(group, key, Cover(0, 0)).place}/"

    def names_with(self, group: int, key: bytes, covers: Iterable[Cover]) -> list[str]:
        """Return the names of the objects with this group, this key and one of these covers."""
        begin, indices = self.all_of(group, key), range(len(self.cut.groups[group]))
        return [f"{begin}{group}.{a}-{b}/{index}" for a, b in covers for index in indices]

    @cached_property
    def marks(self) -> list[str]:
        """The names of the marks, one for each of `LEVELS` (tenant, model, weights, dtype, format).

        The mark of a level exists once a matching engine has stored something. An engine matches if
        it agrees with this namespace in that level and in all earlier levels.
        """
        places = range(1, len(LEVELS) + 1)
        return [f"{self.tenant_prefix}marks/{self._up_to(n).hex()}" for n in places]

    def mark_objects(self) -> list[tuple[str, list[Bytes]]]:
        """Return (name, content) of each mark. The last mark describes the rows."""
        cut = self.cut
        about: dict[str, Any] = {
            "model": cut.plan.model,
            "kinds": self._kinds,
            "span": cut.plan.block_size,
            "shards": cut.shards,
            "stages": cut.stages,
            "objects": [objects.sizes for objects in cut.groups],
        }
        made = []
        for level, name in enumerate(self.marks):
            says = {"level": LEVELS[level]} | (about if LEVELS[level] == "format" else {})
            payload = np.frombuffer(msgspec.json.encode(says, order="sorted"), np.uint8)
            digest = bytes.fromhex(name.rpartition("/")[2])
            place = ObjectPlace(digest, row_digest("mark"), level)
            made.append((name, [header(place, payload.nbytes, checksum([payload])), payload]))
        return made

    @property
    def older_marks(self) -> list[str]:
        """The names of this tenant's marks in older formats."""
        tenant = self._up_to(1).hex()
        return [f"{root}{self.tenant_prefix[len(ROOT) :]}marks/{tenant}" for root in OLD_ROOTS]

    def _up_to(self, levels: int) -> bytes:
        return _digest(msgspec.json.encode(self._levels[:levels], order="sorted"))


def caches_of(kinds: Iterable[RowKind]) -> list[Any]:
    """Return the caches of a model, without dtypes: the second level of a namespace.

    Each is [layer, tokens per state, rules for the tokens that the cache keeps, heads]. The caches
    are in ascending order.
    """
    found = [
        [layer, kind.per_state, sorted(kind.keeps.items()), kind.heads]
        for kind in kinds
        for layer in kind.layers
    ]
    return sorted(found)


def tenant_prefix(tenant: str) -> str:
    """Return the prefix of all names of a tenant."""
    return f"{ROOT}/{_digest(tenant.encode()).hex()}/"


class ObjectName(NamedTuple):
    """The parts of an object's name."""

    tenant: str
    namespace: str
    row: str
    group: int
    number: int

    @property
    def place(self) -> ObjectPlace:
        """The identity that the object's header must contain."""
        return ObjectPlace(bytes.fromhex(self.namespace), row_digest(self.row), self.number)


def parse_name(name: str) -> ObjectName | None:
    """Parse the name of an object, or return None if it belongs to no row.

    >>> parse_name("kv2/" + "/".join(["0" * 32] * 3) + "/0.0-64/7").number
    7
    """
    found = _OBJECT.fullmatch(name)
    if found is None:
        return None
    tenant, namespace, row, group, number = found.groups()
    return ObjectName(tenant, namespace, row, int(group), int(number))


def row_digest(name: str) -> bytes:
    """Return the digest of a row name. The headers of all objects of the row contain it."""
    return _digest(name.encode())


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=_DIGEST).digest()
