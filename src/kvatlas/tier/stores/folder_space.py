"""`FolderSpace`: admit objects to a folder within its capacity and quota, and evict old ones."""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvatlas.tier.stores.base import tenant_of
from kvatlas.tier.stores.folder_files import (
    is_name,
    last_use,
    leads_away,
    remove_abandoned,
    remove_file,
)
from kvatlas.tier.stores.folder_index import ALL, DamagedIndexError, FolderIndex

_RESERVED = 600 * 10**9
"""Nanoseconds after which an object that is being written counts as abandoned."""
_FEW, _MOST = 8, 256
"""Numbers of candidates for eviction: in one query, and in one call."""


class Candidate(NamedTuple):
    """An object that may be evicted; see the schema of `FolderIndex`."""

    name: str
    size: int
    used: int
    writing: int


class FolderSpace:
    """Limits the bytes of a folder: to a capacity, and to a quota for each tenant.

    Space is reserved before an object is written. Reads record the time of use only in the file,
    not in the index. Objects that were used after the time in the index move to the end of the
    queue when they are considered for eviction. At most 256 objects are considered in one call, so
    that its cost does not grow with the folder.
    """

    def __init__(self, root: Path, index: FolderIndex, capacity: int, quota: int) -> None:
        self._root, self._index, self._capacity, self._quota = root, index, capacity, quota

    def reserve(self, objects: Sequence[tuple[str, int]]) -> list[bool]:
        """Reserve space for objects of given names and sizes. Return for each whether it fits."""
        return self._index.write(
            lambda database: [self._reserve(database, name, size) for name, size in objects]
        )

    def _reserve(self, database: sqlite3.Connection, name: str, size: int) -> bool:
        tenant, now = tenant_of(name), time.time_ns()
        bounds = [(owner, most) for owner, most in self._bounds(tenant) if most]
        if any(size > most for _, most in bounds):
            return False  # evicting other objects cannot help
        for owner, most in bounds:
            used, _ = self._index.usage(database, owner)
            if used + size > most and not self._evict(database, owner, used + size - most):
                return False
        database.execute("DELETE FROM objects WHERE name = ?", (name,))
        about = (name, tenant, size, now, now)
        database.execute("INSERT INTO objects VALUES (?, ?, ?, ?, ?)", about)
        return True

    def _bounds(self, tenant: str) -> Iterator[tuple[str, int]]:
        """Yield (owner, limit in bytes): first for the tenant, then for the whole folder."""
        if tenant:
            yield tenant, self._quota
        yield ALL, self._capacity

    def finish(self, objects: Sequence[tuple[str, int]]) -> None:
        """Record which objects have been written, and release the space of the others."""

        def act(database: sqlite3.Connection) -> None:
            for name, size in objects:
                used = self._last_use(name)
                if not used:
                    database.execute("DELETE FROM objects WHERE name = ?", (name,))
                    continue
                database.execute(
                    "INSERT INTO objects VALUES (?, ?, ?, ?, 0)"
                    " ON CONFLICT (name) DO UPDATE SET used = excluded.used, writing = 0",
                    (name, tenant_of(name), size, used),
                )

        self._index.write(act)

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects and return how many existed."""
        removed: set[str] = set()

        def act(database: sqlite3.Connection) -> None:
            for name in names:
                if remove_file(self._root, self._root / name):
                    removed.add(name)
                database.execute("DELETE FROM objects WHERE name = ?", (name,))

        self._index.write(act)
        return len(removed)

    def usage(self) -> tuple[int, int]:
        """Return the bytes and the number of all objects, including those being written."""
        return self._index.write(self._index.usage)

    def _evict(self, database: sqlite3.Connection, owner: str, nbytes: int) -> bool:
        """Evict the least recently used objects of `owner`. Return whether `nbytes` were freed."""
        used_since: dict[str, Candidate] = {}
        considered = 0
        while nbytes > 0 and considered < _MOST:
            some = self._oldest(database, owner)
            if not some:
                return False
            for candidate in some:
                considered += 1
                freed, used = self._consider(database, candidate)
                nbytes -= freed
                if used:
                    used_since[candidate.name] = candidate._replace(used=used)
                if nbytes <= 0 or 0 < used < some[-1].used:
                    break  # there is enough space, or the order has changed
        for candidate in sorted(used_since.values(), key=lambda one: one.used):
            if nbytes <= 0:
                break
            nbytes -= self._remove(database, candidate)
        return nbytes <= 0

    def _oldest(self, database: sqlite3.Connection, owner: str) -> list[Candidate]:
        where, values = ("", ()) if owner == ALL else ("WHERE tenant = ?", (owner,))
        query = f"SELECT name, size, used, writing FROM objects {where} ORDER BY used LIMIT {_FEW}"  # noqa: S608
        found = [Candidate(*row) for row in database.execute(query, values)]
        if not all(isinstance(number, int) for one in found for number in one[1:]):
            raise DamagedIndexError
        return found

    def _consider(self, database: sqlite3.Connection, one: Candidate) -> tuple[int, int]:
        """Evict an object, unless it is being written or was used after the time in the index.

        Returns (freed bytes, time). The time is that of the last use if the object was kept because
        of that use, otherwise 0.
        """
        # Another program may have written the index: delete nothing outside the folder.
        if not is_name(str(one.name)) or leads_away(self._root, self._root / one.name):
            raise DamagedIndexError
        now = time.time_ns()
        if one.writing and now - one.writing < _RESERVED:
            self._requeue(database, one.name, now)
            return 0, 0
        if one.writing:
            remove_abandoned(self._root)
        used = self._last_use(one.name)
        if used > one.used:
            self._requeue(database, one.name, used)
            return 0, used
        return self._remove(database, one), 0

    def _last_use(self, name: str) -> int:
        """Return the time at which an object was last used, or 0 if it does not exist."""
        try:
            about = (self._root / name).lstat()
        except OSError:
            return 0
        return last_use(about) if stat.S_ISREG(about.st_mode) else 0

    def _requeue(self, database: sqlite3.Connection, name: str, used: int) -> None:
        database.execute("UPDATE objects SET used = ? WHERE name = ?", (used, name))

    def _remove(self, database: sqlite3.Connection, one: Candidate) -> int:
        """Remove an object and its entry. Return the size in its entry, or 0 if it has none."""
        remove_file(self._root, self._root / one.name)
        found = database.execute("DELETE FROM objects WHERE name = ?", (one.name,)).rowcount
        return one.size if found else 0
