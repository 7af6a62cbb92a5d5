"""What is in a store: listed, verified, cleaned up, carried elsewhere in a file.

Nothing here knows which model or weights an object is of, or needs to: a name says where an object
belongs, its header says the same, and its checksum that no byte has changed.
"""

from __future__ import annotations

import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.tier.namespaces import LEVELS, ROOT, parse_name, row_digest
from kvatlas.tier.object_header import HEADER, ObjectPlace, is_sound
from kvatlas.tier.row_objects import RowObjects
from kvatlas.tier.stores import ABSENT, ObjectStore
from kvatlas.wire.run_bounds import Bytes

LARGEST = 1 << 32
"""Bytes of the largest object that is read."""
_NO_ARCHIVE = (OSError, tarfile.TarError, ValueError, OverflowError, MemoryError)
"""What reading one ends in whose numbers are none, or too large."""
_MARK = f"{ROOT}/{{}}/marks/{{}}"
_MARK_NAME = re.compile(_MARK.format("[0-9a-f]{32}", "([0-9a-f]{32})"))


class NamespaceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one namespace has in a store."""

    tenant: str
    namespace: str
    model: str
    rows: int
    incomplete: int
    objects: int
    nbytes: int


class Verdict(NamedTuple):
    """How many objects were sound, and the names of those that were not."""

    sound: int
    damaged: list[str]


class _RowFormat(msgspec.Struct, frozen=True):
    """What the mark of a namespace says of its rows."""

    level: str
    plan: msgspec.Raw
    shards: int
    stages: int


def summaries(store: ObjectStore) -> list[NamespaceSummary]:
    """Every namespace that a store has objects of."""
    found = []
    for (tenant, namespace), rows in sorted(_rows(store).items()):
        cut = _cut(store, tenant, namespace)
        names = [name for own in rows.values() for name in own]
        found.append(
            NamespaceSummary(
                tenant=tenant,
                namespace=namespace,
                model=cut.plan.model if cut else "",
                rows=len(rows),
                incomplete=sum(not _complete(own, cut) for own in rows.values()),
                objects=len(names),
                nbytes=sum(max(0, store.size(name)) for name in names),
            )
        )
    return found


def verify(store: ObjectStore, *, remove: bool = False) -> Verdict:
    """Read every object and hold it against its name and its checksum."""
    sound, damaged = 0, []
    for name in store.names(f"{ROOT}/"):
        found = _read(store, name)
        if found is None:
            continue  # evicted meanwhile
        if _is_sound(name, found):
            sound += 1
        else:
            damaged.append(name)
    if remove:
        store.remove(damaged)
    return Verdict(sound, damaged)


def collect_garbage(
    store: ObjectStore, *, tenant: str = "", namespace: str = ""
) -> tuple[int, int]:
    """Remove rows that nobody can find, or all of one tenant or namespace.

    How many objects that were, and the bytes that writers who died had left. Rows that are
    being written now are taken for such rows too: their writers store them again.
    """
    if tenant or namespace:
        return sum(_remove_all(store, tenant, namespace)), 0
    removed = 0
    for (owner, place), rows in _rows(store).items():
        cut = _cut(store, owner, place)
        for names in rows.values():
            if not _complete(names, cut):
                removed += store.remove(names)
    return removed, store.sweep()


def export_objects(store: ObjectStore, path: Path) -> int:
    """Write every sound object of a store into a tar file; how many."""
    count = 0
    with tarfile.open(path, "w") as archive:
        for name in store.names(f"{ROOT}/"):
            found = _read(store, name)
            if found is not None and _is_sound(name, found):
                about = tarfile.TarInfo(name)
                about.size = found.nbytes
                archive.addfile(about, BytesIO(found.tobytes()))
                count += 1
    return count


def import_objects(store: ObjectStore, path: Path) -> Verdict:
    """Put the objects of a tar file into a store: those that are what their names say."""
    sound, refused, path = 0, [], Path(path)
    try:
        with tarfile.open(path, "r:") as archive:
            for about in archive:
                content = archive.extractfile(about) if about.isfile() else None
                # A sparse file says that it is as large as it likes.
                if content is None or about.size > min(LARGEST, path.stat().st_size):
                    refused.append(about.name)
                    continue
                found = np.frombuffer(content.read(), np.uint8)
                if _is_sound(about.name, found) and store.put([(about.name, [found])]) == [True]:
                    sound += 1
                else:
                    refused.append(about.name)
    except AtlasError:  # the store's
        raise
    except _NO_ARCHIVE as problem:
        hint = "Use a file that `kvatlas tier export` has written"
        why = str(problem) or type(problem).__name__
        raise AtlasError(Code.UNREADABLE, got=f"{path}: {why}", hint=hint) from None
    return Verdict(sound, refused)


def _rows(store: ObjectStore) -> dict[tuple[str, str], dict[str, list[str]]]:
    """The names of objects by namespace and row."""
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in store.names(f"{ROOT}/"):
        about = parse_name(name)
        if about is not None:
            found[about.tenant, about.namespace][about.row].append(name)
    return found


def _complete(names: list[str], cut: RowObjects | None) -> bool:
    """Whether a row has all of its objects; a row of which nothing is known is left alone."""
    if cut is None:
        return True
    parsed = [about for about in map(parse_name, names) if about is not None]
    group = parsed[0].group
    if group >= len(cut.groups):
        return False
    return {about.number for about in parsed} == set(range(len(cut.groups[group])))


def _cut(store: ObjectStore, tenant: str, namespace: str) -> RowObjects | None:
    """How the rows of a namespace are cut, where its mark is there and sound."""
    found = _read(store, name := _MARK.format(tenant, namespace))
    if found is None or not _is_sound(name, found):
        return None
    try:
        said = msgspec.json.decode(found[HEADER:].tobytes(), type=_RowFormat)
        return RowObjects(Plan.from_json(bytes(said.plan)), said.shards, said.stages)
    except (msgspec.DecodeError, AtlasError, RecursionError):  # by whoever may write there
        return None


def _read(store: ObjectStore, name: str) -> Bytes | None:
    """All bytes of an object; None where it is not there, or is none."""
    size = store.size(name)
    if size == ABSENT or not HEADER <= size <= LARGEST:
        return None if size == ABSENT else np.empty(0, np.uint8)
    into = np.empty(size, np.uint8)
    return into if store.get([(name, [into])]) == [size] else None


def _is_sound(name: str, found: Bytes) -> bool:
    """Whether an object is what its name says, and no byte of it has changed."""
    places = [about.place] if (about := parse_name(name)) else list(_mark_places(name))
    parts = found[:HEADER], [found[HEADER:]]
    return found.nbytes >= HEADER and any(is_sound(parts[0], one, parts[1]) for one in places)


def _mark_places(name: str) -> Iterator[ObjectPlace]:
    """What the header of a mark may say: which level it is of is not in its name."""
    found = _MARK_NAME.fullmatch(name)
    if found is not None:
        for level in range(len(LEVELS)):
            yield ObjectPlace(bytes.fromhex(found[1]), row_digest("mark"), level)


def _is_digest(text: str) -> bool:
    return len(text) == 32 and set(text) <= set("0123456789abcdef")


def _remove_all(store: ObjectStore, tenant: str, namespace: str) -> Iterator[int]:
    """Remove what belongs to a tenant, or to a namespace, by their digests as `ls` shows them."""
    for owner, place in list(_rows(store)):
        if tenant in ("", owner) and namespace in ("", place):
            yield store.remove_all(f"{ROOT}/{owner}/{place}/")
    if tenant and not namespace and _is_digest(tenant):
        yield store.remove_all(f"{ROOT}/{tenant}/")
