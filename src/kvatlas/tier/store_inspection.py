"""List, verify, clean up, copy, export and import the objects of a store.

These functions need no model: an object's name and header both specify where it belongs, and its
checksum verifies its bytes.
"""

from __future__ import annotations

import re
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.tier.chained_keys import PrefixChain
from kvatlas.tier.namespaces import LEVELS, OLD_ROOTS, ROOT, RowName, parse_name, row_digest
from kvatlas.tier.object_header import HEADER, ObjectPlace, is_sound
from kvatlas.tier.request_blocks import Cover
from kvatlas.tier.stores import ABSENT, ObjectStore

LARGEST = 1 << 32
"""Size limit of objects that are read, in bytes."""
_NO_ARCHIVE = (OSError, tarfile.TarError, ValueError, OverflowError, MemoryError)
"""Errors that are raised while an invalid archive is read."""
_MARK = f"{ROOT}/{{}}/marks/{{}}"
_MARK_NAME = re.compile(_MARK.format("[0-9a-f]{32}", "([0-9a-f]{32})"))


class NamespaceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the objects that a store has in one namespace."""

    tenant: str
    namespace: str
    model: str
    rows: int
    incomplete: int
    objects: int
    nbytes: int


class Verdict(NamedTuple):
    """The number of valid objects, and the names of invalid ones."""

    sound: int
    damaged: list[str]


class CopiedPrefix(NamedTuple):
    """The result of `copy_prefix`: how many objects were copied, and which were refused."""

    copied: int
    nbytes: int
    """Bytes of the copied objects."""
    existing: int
    """Objects that the destination already had."""
    refused: list[str]
    """Names of objects that failed verification, or for which the destination had no space."""


class _RowFormat(msgspec.Struct, frozen=True):
    """The row format that the mark of a namespace records."""

    level: Literal["format"]
    model: str
    span: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    """Tokens per row."""
    objects: list[list[int]]
    """The sizes of the objects of a row, for each kind of row."""


def summaries(store: ObjectStore) -> list[NamespaceSummary]:
    """Summarise every namespace that has objects in a store."""
    found = []
    for (tenant, namespace), rows in sorted(_rows(store).items()):
        known = _row_format(store, tenant, namespace)
        names = [name for own in rows.values() for name in own]
        found.append(
            NamespaceSummary(
                tenant=tenant,
                namespace=namespace,
                model=known.model if known else "",
                rows=len(rows),
                incomplete=sum(not _complete(own, known) for own in rows.values()),
                objects=len(names),
                nbytes=sum(max(0, store.size(name)) for name in names),
            )
        )
    return found


def older_objects(store: ObjectStore) -> tuple[int, int]:
    """Return the number and the bytes of objects in older formats, which are never read.

    >>> from kvatlas.tier import HostStore
    >>> store = HostStore()
    >>> store.put([("kv1/0f/marks/77", [np.zeros(64, np.uint8)])])
    [True]
    >>> older_objects(store)
    (1, 64)
    """
    sizes = [max(0, store.size(name)) for root in OLD_ROOTS for name in store.names(f"{root}/")]
    return len(sizes), sum(sizes)


def verify(store: ObjectStore, *, remove: bool = False) -> Verdict:
    """Read every object and check it against its name and checksum.

    With `remove`, invalid objects are removed.
    """
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
    store: ObjectStore, *, tenant: str = "", namespace: str = "", older: bool = False
) -> tuple[int, int]:
    """Remove incomplete rows, or all objects of one tenant, of one namespace or in older formats.

    Unless `tenant`, `namespace` or `older` is given, unfinished files that dead writers left are
    removed too. Returns the number of removed objects, and the bytes of these files. A row that is
    being written now is incomplete and may be removed too; it will be stored again.
    """
    if older:
        return sum(store.remove_all(f"{root}/") for root in OLD_ROOTS), 0
    if tenant or namespace:
        return sum(_remove_all(store, tenant, namespace)), 0
    removed = 0
    for (owner, place), rows in _rows(store).items():
        known = _row_format(store, owner, place)
        for names in rows.values():
            if not _complete(names, known):
                removed += store.remove(names)
    return removed, store.sweep()


def copy_prefix(
    store: ObjectStore,
    to: ObjectStore,
    tokens: Sequence[int],
    *,
    salt: bytes = b"",
    lora: str = "",
    tenant: str = "",
    namespace: str = "",
    progress: Callable[[float], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> CopiedPrefix:
    """Copy the rows of a request's prefixes to another store, before they are requested.

    A row is copied if it ends at a multiple of the row length or at the end of `tokens`, and
    belongs to requests with this salt and LoRA adapter. `tenant` and `namespace` are digests; by
    default, rows of all namespaces are copied. Each object is verified before it is stored. Rows
    are copied in the order of their tokens, and `progress` is called with the completed fraction.
    If `cancelled` returns true, the copy ends after the current object. A later call continues,
    because objects that exist are skipped.
    """
    known = [(tenant, namespace)] if tenant and namespace else sorted(_rows(store))
    places = [one for one in known if tenant in ("", one[0]) and namespace in ("", one[1])]
    names = []
    for one in places:
        for name in _names_of_prefix(store, one, tokens, salt=salt, lora=lora):
            if cancelled is not None and cancelled():
                return CopiedPrefix(0, 0, 0, [])
            names.append(name)
    copied, nbytes, existing, refused = 0, 0, 0, []
    for number, name in enumerate(names):
        if cancelled is not None and cancelled():
            break
        if to.exists([name]) == [True]:
            existing += 1
        elif (found := _read(store, name)) is not None:  # otherwise it was evicted meanwhile
            if _is_sound(name, found) and to.put([(name, [found])]) == [True]:
                copied, nbytes = copied + 1, nbytes + found.nbytes
            else:
                refused.append(name)
        if progress is not None:
            progress((number + 1) / len(names))
    return CopiedPrefix(copied, nbytes, existing, refused)


def _names_of_prefix(
    store: ObjectStore, place: tuple[str, str], tokens: Sequence[int], **about: Any
) -> Iterator[str]:
    """Yield the names of a tenant's marks, and of the objects of all prefixes of `tokens`.

    `place` is (tenant, namespace), both as digests.
    """
    tenant, namespace = place
    known = _row_format(store, tenant, namespace)
    if known is None:
        return
    yield from sorted(store.names(f"{ROOT}/{tenant}/marks/"))
    chain = PrefixChain(known.span, tokens, **about)
    for stop in dict.fromkeys([*range(known.span, chain.count + 1, known.span), chain.count]):
        for group in range(len(known.objects)):
            row = RowName(group, chain.key_at(stop), Cover(0, 0))
            yield from sorted(store.names(f"{ROOT}/{tenant}/{namespace}/{row.place}/"))


def export_objects(store: ObjectStore, path: Path) -> int:
    """Write every valid object of a store to a tar file and return their number."""
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
    """Put the objects of a tar file into a store.

    Returns the number of stored objects, and the names of objects that failed verification or found
    no space.
    """
    sound, refused, path = 0, [], Path(path)
    try:
        with tarfile.open(path, "r:") as archive:
            for about in archive:
                content = archive.extractfile(about) if about.isfile() else None
                # The header of a sparse member can claim any size.
                if content is None or about.size > min(LARGEST, path.stat().st_size):
                    refused.append(_printable(about.name))
                    continue
                found = np.frombuffer(content.read(), np.uint8)
                if _is_sound(about.name, found) and store.put([(about.name, [found])]) == [True]:
                    sound += 1
                else:
                    refused.append(_printable(about.name))
    except AtlasError:  # raised by the store
        raise
    except _NO_ARCHIVE as fault:
        problem, hint = "The archive cannot be read", "Use a file written by `kvatlas tier export`"
        why = str(fault) or type(fault).__name__
        raise AtlasError(Code.UNREADABLE, problem, got=f"{path}: {why}", hint=hint) from None
    return Verdict(sound, refused)


def _printable(name: str) -> str:
    """Return the name of a tar member, with bytes that are not UTF-8 as escape sequences."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _rows(store: ObjectStore) -> dict[tuple[str, str], dict[str, list[str]]]:
    """Return the names of a store's objects, grouped by (tenant, namespace), then by row."""
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in store.names(f"{ROOT}/"):
        about = parse_name(name)
        if about is not None:
            found[about.tenant, about.namespace][about.row].append(name)
    return found


def _complete(names: list[str], known: _RowFormat | None) -> bool:
    """Return whether a row has all of its objects; true if its format is unknown."""
    if known is None:
        return True
    parsed = [about for about in map(parse_name, names) if about is not None]
    kind = parsed[0].group
    if kind >= len(known.objects):
        return False
    return {about.number for about in parsed} == set(range(len(known.objects[kind])))


def _row_format(store: ObjectStore, tenant: str, namespace: str) -> _RowFormat | None:
    """Return the row format of a namespace, or None if it has no valid mark."""
    found = _read(store, name := _MARK.format(tenant, namespace))
    if found is None or not _is_sound(name, found):
        return None
    try:
        return msgspec.json.decode(found[HEADER:].tobytes(), type=_RowFormat)
    except (msgspec.DecodeError, RecursionError):  # written by another program
        return None


def _read(store: ObjectStore, name: str) -> Bytes | None:
    """Return the bytes of an object: None if it is absent, empty if the store cannot read it."""
    size = store.size(name)
    if size == ABSENT or not HEADER <= size <= LARGEST:
        return None if size == ABSENT else np.empty(0, np.uint8)
    into = np.empty(size, np.uint8)
    (found,) = store.get([(name, [into])])
    if found != size:
        return None if found == ABSENT else np.empty(0, np.uint8)
    return into


def _is_sound(name: str, found: Bytes) -> bool:
    """Return whether an object matches its name and its checksum."""
    places = [about.place] if (about := parse_name(name)) else list(_mark_places(name))
    parts = found[:HEADER], [found[HEADER:]]
    return found.nbytes >= HEADER and any(is_sound(parts[0], one, parts[1]) for one in places)


def _mark_places(name: str) -> Iterator[ObjectPlace]:
    """Yield the identities that the header of a mark may contain: one for each level.

    The name of a mark does not include its level.
    """
    found = _MARK_NAME.fullmatch(name)
    if found is not None:
        for level in range(len(LEVELS)):
            yield ObjectPlace(bytes.fromhex(found[1]), row_digest("mark"), level)


def _is_digest(text: str) -> bool:
    return len(text) == 32 and set(text) <= set("0123456789abcdef")


def _remove_all(store: ObjectStore, tenant: str, namespace: str) -> Iterator[int]:
    """Remove the objects of a tenant or a namespace, and yield how many each step removed.

    `tenant` and `namespace` are digests, as `kvatlas tier ls` prints them.
    """
    for owner, place in list(_rows(store)):
        if tenant in ("", owner) and namespace in ("", place):
            yield store.remove_all(f"{ROOT}/{owner}/{place}/")
    if tenant and not namespace and _is_digest(tenant):
        yield store.remove_all(f"{ROOT}/{tenant}/")
