"""`FolderStore`: a file for each object, in a folder that processes of several hosts may share.

A file is written beside its place and linked there when all of its bytes are in it, so that
an object is whole or absent, and the first of two writers wins.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import natural
from kvatlas.tier.stores.base import ABSENT, ObjectStore, Parts, StoreRoom, joined_size
from kvatlas.tier.stores.folder_room import UNFINISHED, FolderRoom, is_object, is_there
from kvatlas.wire.run_bounds import Bytes

_NAME = re.compile(r"[a-z0-9_.-]+(/[a-z0-9_.-]+)*")
_MOST_PARTS = 512
"""Stretches of memory that one call of the system takes."""


class FolderStore(ObjectStore):
    """Objects as files below a folder, up to so many bytes; the least recently used go first.

    All who share the folder and give it a `capacity` count together what is in it. With a
    `quota` each tenant has so many bytes at most, and makes room among its own objects. A folder
    that is not there is made, unless `create` is false.

    >>> import tempfile, numpy as np
    >>> store = FolderStore(tempfile.mkdtemp())
    >>> store.put([("kv1/a", [np.arange(4, dtype=np.uint8)])]), store.size("kv1/a")
    ([True], 4)
    >>> store.exists(["kv1/a", "kv1/b"]), list(store.names("kv1/"))
    ([True, False], ['kv1/a'])
    """

    def __init__(
        self, path: str | Path, capacity: int = 0, quota: int = 0, *, create: bool = True
    ) -> None:
        self._root = Path(path)
        self._capacity = natural(capacity, "the capacity of a store")
        natural(quota, "the quota of a tenant")
        if not create and not self._root.is_dir():
            problem, hint = "There is no folder of a store", "Check the path"
            raise AtlasError(Code.UNREADABLE, problem, got=str(self._root), hint=hint)
        with _refusals(self._root):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _refusals(self._root):
            self._room = FolderRoom(self._root, capacity, quota)

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that are not there yet."""
        return [self._put(self._path(name), parts) for name, parts in objects]

    def _put(self, path: Path, parts: Parts) -> bool:
        if is_object(path):
            self._use(path)
            return True
        size, linked = joined_size(parts), False
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{UNFINISHED}")
        try:
            descriptor = self._room.create(unfinished, size)
            if descriptor is None:
                return False
            try:
                linked = _finish(descriptor, unfinished, path, parts)
            finally:
                os.close(descriptor)
                if linked:
                    unfinished.unlink(missing_ok=True)
                else:
                    self._room.remove_all([unfinished])
        except OSError:
            return False  # no room, or no right to write: the object is absent
        return linked or is_object(path)

    def _use(self, file: int | Path) -> None:
        """Note that an object was used, where the least recently used make room."""
        if self._room.bounded:
            with suppress(OSError):  # of another user, say: then it goes by its age
                os.utime(file)

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects."""
        return [self._get(self._path(name), parts) for name, parts in objects]

    def _get(self, path: Path, parts: Parts) -> int:
        with _refusals(path), _opened(path) as found:
            if found is None:
                return ABSENT
            size = os.fstat(found).st_size
            self._use(found)
            return _read(found, parts) if size == joined_size(parts) else size

    def ranges(self, name: str, wanted: Sequence[tuple[int, Bytes]]) -> int:
        """Read parts of an object."""
        path = self._path(name)
        with _refusals(path), _opened(path) as found:
            if found is None:
                return ABSENT
            self._use(found)
            return sum(os.preadv(found, [into.data], at) for at, into in wanted)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which objects are there."""
        with _refusals(self._root):
            return [is_there(self._path(name)) for name in names]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects."""
        with _refusals(self._root):
            sizes = self._room.remove_all(map(self._path, names))
        return sum(size > 0 for size in sizes)

    def remove_all(self, prefix: str) -> int:
        """Remove all whose names begin so."""
        return self.remove(list(self.names(prefix)))

    def names(self, prefix: str = "") -> Iterator[str]:
        """The names that begin so."""
        folder = self._root / prefix.rpartition("/")[0]
        for path in self._room.files(folder):
            name = path.relative_to(self._root).as_posix()
            if name.startswith(prefix):
                yield name

    def size(self, name: str) -> int:
        """The bytes of an object."""
        path = self._path(name)
        with suppress(OSError):
            return path.lstat().st_size if is_object(path) else ABSENT
        return ABSENT

    def register(self, memory: Bytes) -> None:
        """Any memory will do."""

    def close(self) -> None:
        """Nothing is held open."""

    def sweep(self) -> int:
        """Remove files that nobody has written to for a while, and that were never finished."""
        with _refusals(self._root):
            swept = sum(self._room.remove_all(self._room.abandoned(self._root)))
            self._room.forget_empty_tenants()
            return swept

    def capacity(self) -> StoreRoom:
        """What there is and what could be."""
        sizes = []
        for path in self._room.files(self._root):
            with suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        if not self._capacity:
            free = os.statvfs(self._root)
            return StoreRoom(sum(sizes), sum(sizes) + free.f_bavail * free.f_frsize, len(sizes))
        return StoreRoom(sum(sizes), self._capacity, len(sizes))

    def _path(self, name: str) -> Path:
        """Where an object is: below the folder, whatever its name says."""
        if not _NAME.fullmatch(name) or any(part.startswith(".") for part in name.split("/")):
            hint = "Names are words of a-z, 0-9, _, - and dots, with slashes between"
            problem = "An object cannot have this name"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=repr(name)[:80], hint=hint)
        return self._root / name


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Say what a disk that fails means."""
    try:
        yield
    except OSError as problem:
        hint = "Look at the disk, and at who may read the folder"
        raise AtlasError(Code.UNREADABLE, got=f"{path}: {problem}", hint=hint) from None


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A file to read from; None where there is none, or something else."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        found = None
    except OSError:
        if is_object(path):
            raise
        found = None
    if found is None:
        yield None
        return
    try:
        yield found if stat.S_ISREG(os.fstat(found).st_mode) else None
    finally:
        os.close(found)


def _finish(descriptor: int, unfinished: Path, path: Path, parts: Parts) -> bool:
    """Fill a file and give it its name; False where another has it already."""
    _write(descriptor, parts)
    try:
        os.link(unfinished, path)
    except FileExistsError:
        return False
    return True


def _write(descriptor: int, parts: Parts) -> None:
    views = [part.data for part in parts]
    while views:
        done = os.writev(descriptor, views[:_MOST_PARTS])
        views = _behind(views, done)


def _read(descriptor: int, parts: Parts) -> int:
    views, read = [part.data for part in parts], 0
    while views:
        done = os.readv(descriptor, views[:_MOST_PARTS])
        if not done:
            break
        views, read = _behind(views, done), read + done
    return read


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of stretches of memory behind their first bytes."""
    for place, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[place + 1 :]]
        done -= view.nbytes
    return []
