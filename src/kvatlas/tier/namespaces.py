"""Object names, and the identities that must match to share objects.

    kv1/TENANT/NAMESPACE/KEY/GROUP.FIRST-STOP/INDEX    an object of a row
    kv1/TENANT/marks/DIGEST                            a mark, which explains misses

Words in capitals are hexadecimal digests or numbers, so that the name of a tenant or a key cannot
lead to objects of another tenant. A row is one block of the tier. Each namespace has a mark for
every level of its identity: tenant, model, weights, content and format. A mark is a small object
that is equal for all engines that agree in this and all earlier levels. It exists once one of them
has stored something.

A namespace is one combination of tenant, model, weights, content (the fields of each layer and
their dtypes) and format (the plan of a row and how it is cut). Engines that differ in any of them
use different namespaces.
"""

from __future__ import annotations

import re
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np

from kvatlas.copying.run_bounds import Bytes
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing import fingerprint
from kvatlas.tier.object_header import ObjectPlace, checksum, header
from kvatlas.tier.request_blocks import Cover
from kvatlas.tier.row_objects import RowObjects

ROOT = "kv1"
_DIGEST = 16
_OBJECT = re.compile(
    rf"{ROOT}/([0-9a-f]{{32}})/([0-9a-f]{{32}})/([0-9a-f]{{32}}/([0-9]{{1,6}})\.[0-9]{{1,20}}-[0-9]{{1,20}})"
    r"/([0-9]{1,6})"
)
LEVELS = ("tenant", "model", "weights", "dtype", "format")
"""The properties that must match. A miss reports the first for which there are no objects."""


class RowName(NamedTuple):
    """The name of a row, which is one block of a tier in an object store.

    It consists of the group, the key and the tokens that the row contains.
    """

    group: int
    key: bytes
    cover: Cover

    @property
    def place(self) -> str:
        """The digest of group and key, in hex. In object names it follows the namespace."""
        return _digest(self.group.to_bytes(4, "little") + self.key).hex()

    @property
    def name(self) -> str:
        """The part of object names, after the namespace, that all objects of this row share."""
        return f"{self.place}/{self.group}.{self.cover.first}-{self.cover.stop}"

    @property
    def digest(self) -> bytes:
        """The row's digest in the headers of its objects."""
        return row_digest(self.name)


class Namespace:
    """Makes the names of objects that have one identity and one row format.

    >>> from kvatlas.planning import plan
    >>> made = plan("Qwen3-8B", memory="1GiB", layout="BHLNC", block_size=64, max_len=64)
    >>> ours, theirs = (
    ...     Namespace(CacheIdentity(weights="w", tenant=who), RowObjects(made)) for who in "ab"
    ... )
    >>> row = RowName(0, b"a digest of the tokens", Cover(0, 64))
    >>> len(ours.objects(row)), ours.objects(row)[3].startswith(ours.prefix)
    (8, True)
    >>> set(ours.objects(row)) & set(theirs.objects(row))
    set()
    """

    def __init__(self, identity: CacheIdentity, cut: RowObjects) -> None:
        self.identity, self.cut = identity, cut
        about = {
            "tenant": identity.tenant,
            "model": ",".join(sorted(cut.plan.layers)),
            "weights": identity.computed_with,
            "dtype": fingerprint(cut.plan),
            "format": row_format(cut),
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
        """Return the prefix that the names of all objects of one group and key share."""
        return f"{self.prefix}{RowName(group, key, Cover(0, 0)).place}/"

    @cached_property
    def marks(self) -> list[str]:
        """The names of the marks, one for each of `LEVELS` (tenant, model, weights, dtype, format).

        The mark of a level exists once an engine that matches this namespace in that and all
        earlier levels has stored something.
        """
        places = range(1, len(LEVELS) + 1)
        return [f"{self.tenant_prefix}marks/{self._up_to(n).hex()}" for n in places]

    def mark_objects(self) -> list[tuple[str, list[Bytes]]]:
        """Return (name, content) of each mark. The last mark records the row format."""
        cut = self.cut
        about = {"plan": msgspec.Raw(one_row(cut.plan).to_json()),
                 "shards": cut.shards, "stages": cut.stages}  # fmt: skip
        made = []
        for level, name in enumerate(self.marks):
            says = {"level": LEVELS[level]} | (about if LEVELS[level] == "format" else {})
            payload = np.frombuffer(msgspec.json.encode(says), np.uint8)
            digest = bytes.fromhex(name.rpartition("/")[2])
            place = ObjectPlace(digest, row_digest("mark"), level)
            made.append((name, [header(place, payload.nbytes, checksum([payload])), payload]))
        return made

    def _up_to(self, levels: int) -> bytes:
        return _digest(msgspec.json.encode(self._levels[:levels]))


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

    >>> parse_name("kv1/" + "/".join(["0" * 32] * 3) + "/0.0-64/7").number
    7
    """
    found = _OBJECT.fullmatch(name)
    if found is None:
        return None
    tenant, namespace, row, group, number = found.groups()
    return ObjectName(tenant, namespace, row, int(group), int(number))


def row_digest(name: str) -> bytes:
    """Return the digest of a row name, which the header of each of its objects contains."""
    return _digest(name.encode())


def row_format(cut: RowObjects) -> str:
    """Return a digest of the row format: how rows are laid out and cut into objects."""
    plan = one_row(cut.plan)
    regions = msgspec.json.encode([plan.regions, [group.block for group in plan.groups]])
    about = [cut.shards, cut.stages, [pool.block_bytes for pool in plan.pools]]
    return _digest(regions + msgspec.json.encode(about)).hex()


def one_row(plan: Plan) -> Plan:
    """Return a tier's plan with one block per pool: the format of its rows, but not its size."""
    return with_rows(plan, dict.fromkeys((pool.index for pool in plan.pools), 1))


def with_rows(plan: Plan, rows: dict[int, int]) -> Plan:
    """Return a tier's plan with a given number of blocks in each pool."""
    pools = tuple(msgspec.structs.replace(p, blocks=rows[p.index]) for p in plan.pools)
    memory = sum(pool.nbytes for pool in pools)
    return msgspec.structs.replace(plan, pools=pools, memory=memory)


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=_DIGEST).digest()
