"""Whose caches these are: names under which objects lie, and what must be alike to share them.

    kv1/TENANT/NAMESPACE/KEY/GROUP.FIRST-STOP/INDEX    an object of a row
    kv1/TENANT/marks/DIGEST                            such caches are stored: why a miss is one

Words in capitals are digests in hexadecimal, or numbers, so that no name of a tenant and no key
leads out of its place.
A namespace is one tenant, model, weights, content (what each layer keeps, in which dtype) and
format (the plan of a row, and how it is cut). Who differs in any of them looks elsewhere.
"""

from __future__ import annotations

import re
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np

from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing import fingerprint
from kvatlas.tier.object_header import ObjectPlace, checksum, header
from kvatlas.tier.request_blocks import Cover
from kvatlas.tier.row_objects import RowObjects
from kvatlas.wire.run_bounds import Bytes

ROOT = "kv1"
_DIGEST = 16
_OBJECT = re.compile(
    rf"{ROOT}/([0-9a-f]{{32}})/([0-9a-f]{{32}})/([0-9a-f]{{32}}/([0-9]{{1,6}})\.[0-9]{{1,20}}-[0-9]{{1,20}})"
    r"/([0-9]{1,6})"
)
LEVELS = ("tenant", "model", "weights", "dtype", "format")
"""What must be alike, in this order: a miss says from which on nobody has stored."""


class RowName(NamedTuple):
    """A row of a namespace: a key of one group, and the tokens that the row has of it."""

    group: int
    key: bytes
    cover: Cover

    @property
    def place(self) -> str:
        """Where its objects are in the namespace, whatever tokens they have."""
        return _digest(self.group.to_bytes(4, "little") + self.key).hex()

    @property
    def name(self) -> str:
        """Where its objects are in the namespace."""
        return f"{self.place}/{self.group}.{self.cover.first}-{self.cover.stop}"

    @property
    def digest(self) -> bytes:
        """What the headers of its objects call it."""
        return row_digest(self.name)


class Namespace:
    """The names of one identity's objects, in one format.

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
        """The names of a row's objects."""
        begin = f"{self.prefix}{row.name}/"
        return [f"{begin}{index}" for index in range(len(self.cut.groups[row.group]))]

    def all_of(self, group: int, key: bytes) -> str:
        """What the names of all objects of a key begin with, whatever tokens they have."""
        return f"{self.prefix}{RowName(group, key, Cover(0, 0)).place}/"

    @cached_property
    def marks(self) -> list[str]:
        """One name for each of `LEVELS`, that is there once anybody has stored so far alike."""
        places = range(1, len(LEVELS) + 1)
        return [f"{self.tenant_prefix}marks/{self._up_to(n).hex()}" for n in places]

    def mark_objects(self) -> list[tuple[str, list[Bytes]]]:
        """The marks as objects; the last says what rows look like, and how they are cut."""
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
    """What all names of a tenant begin with, and nobody else's."""
    return f"{ROOT}/{_digest(tenant.encode()).hex()}/"


class ObjectName(NamedTuple):
    """What the name of an object says."""

    tenant: str
    namespace: str
    row: str
    group: int
    number: int

    @property
    def place(self) -> ObjectPlace:
        """What its header must say."""
        return ObjectPlace(bytes.fromhex(self.namespace), row_digest(self.row), self.number)


def parse_name(name: str) -> ObjectName | None:
    """What a name says; None for one that is of no row.

    >>> parse_name("kv1/" + "/".join(["0" * 32] * 3) + "/0.0-64/7").number
    7
    """
    found = _OBJECT.fullmatch(name)
    if found is None:
        return None
    tenant, namespace, row, group, number = found.groups()
    return ObjectName(tenant, namespace, row, int(group), int(number))


def row_digest(name: str) -> bytes:
    """What the headers of objects call a row, by its name within a namespace."""
    return _digest(name.encode())


def row_format(cut: RowObjects) -> str:
    """The same exactly where rows have the same bytes in the same places, cut alike."""
    plan = one_row(cut.plan)
    regions = msgspec.json.encode([plan.regions, [group.block for group in plan.groups]])
    about = [cut.shards, cut.stages, [pool.block_bytes for pool in plan.pools]]
    return _digest(regions + msgspec.json.encode(about)).hex()


def one_row(plan: Plan) -> Plan:
    """A tier's plan with one block in each pool: what its rows look like, whatever its size."""
    return with_rows(plan, dict.fromkeys((pool.index for pool in plan.pools), 1))


def with_rows(plan: Plan, rows: dict[int, int]) -> Plan:
    """A tier's plan with so many blocks in each pool."""
    pools = tuple(msgspec.structs.replace(p, blocks=rows[p.index]) for p in plan.pools)
    memory = sum(pool.nbytes for pool in pools)
    return msgspec.structs.replace(plan, pools=pools, memory=memory)


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=_DIGEST).digest()
