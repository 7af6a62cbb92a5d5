"""`FolderStore`: one file per object, in a folder that several hosts may share.

A file is written under a temporary name and linked to its final name when it is complete. An
object is therefore complete or absent, and the first of two writers wins. Files are not flushed to
disk: after a power failure, objects may be missing or damaged. The checksum of an object detects
damage, and it counts as a miss. Symbolic links below the folder are not followed.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import natural
from kvatlas.tier.stores.base import ABSENT, ObjectStore, Parts, StoreRoom, joined_size
from kvatlas.tier.stores.folder_room import (
    UNFINISHED,
    FolderRoom,
    is_object,
    is_there,
    leads_away,
)

_NAME = re.compile(r"[a-z0-9_.-]+(/[a-z0-9_.-]+)*")
_MOST_PARTS = 512
"""Maximum number of memory ranges in one system call."""


class FolderStore(ObjectStore):
    """Objects as files below a folder, up to `capacity` bytes, with LRU eviction.

    All processes that share the folder and specify a `capacity` share one count of its bytes.
    With a `quota`, each tenant has at most this many bytes, and only its own objects are evicted
    to make space for it. A missing folder is created, unless `create` is false. Objects are not
    flushed to disk and may be lost in a power failure. A folder that is read-only can be read.

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
            problem, hint = "The folder of the store does not exist", "Check the store's address"
            raise AtlasError(Code.UNREADABLE, problem, got=str(self._root), hint=hint)
        with _refusals(self._root):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _refusals(self._root):
            self._room = FolderRoom(self._root, capacity, quota)

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that do not exist yet. Return, for each, whether it exists now."""
        return [self._put(self._path(name), parts) for name, parts in objects]

    def _put(self, path: Path, parts: Parts) -> bool:
        if leads_away(self._root, path):
            return False
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
            return False  # no space or no write permission: the object stays absent
        return linked or is_object(path)

    def _use(self, file: int | Path) -> None:
        """Record that an object was used, if objects can be evicted."""
        if self._room.bounded:
            with suppress(OSError):  # a file of another user, for example, is evicted by its age
                os.utime(file)

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects. Return the size of each in bytes, or `ABSENT`."""
        return [self._get(self._path(name), parts) for name, parts in objects]

    def _get(self, path: Path, parts: Parts) -> int:
        with _refusals(path), self._opened(path) as found:
            if found is None:
                return ABSENT
            size = os.fstat(found).st_size
            self._use(found)
            return _read(found, parts) if size == joined_size(parts) else size

    def ranges(self, name: str, wanted: Sequence[tuple[int, Bytes]]) -> int:
        """Read parts of an object and return the number of bytes read, or `ABSENT`."""
        path = self._path(name)
        with _refusals(path), self._opened(path) as found:
            if found is None:
                return ABSENT
            self._use(found)
            return sum(os.preadv(found, [into.data], at) for at, into in wanted)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether the object exists."""
        with _refusals(self._root):
            return [
                is_there(path) and not leads_away(self._root, path)
                for path in map(self._path, names)
            ]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects and return how many existed."""
        with _refusals(self._root):
            paths = map(self._path, names)
            sizes = self._room.remove_all(p for p in paths if not leads_away(self._root, p))
        return sum(size > 0 for size in sizes)

    def remove_all(self, prefix: str) -> int:
        """Remove all objects whose names start with a prefix and return their number."""
        return self.remove(list(self.names(prefix)))

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that start with a prefix."""
        folder = self._root / prefix.rpartition("/")[0]
        for path in self._room.files(folder):
            name = path.relative_to(self._root).as_posix()
            if name.startswith(prefix):
                yield name

    def size(self, name: str) -> int:
        """Return the size of an object in bytes, or `ABSENT`."""
        path = self._path(name)
        with suppress(OSError):
            if is_object(path) and not leads_away(self._root, path):
                return path.lstat().st_size
        return ABSENT

    def register(self, memory: Bytes) -> None:
        """Do nothing: memory needs no registration."""

    def close(self) -> None:
        """Do nothing: the store holds no resources."""

    def sweep(self) -> int:
        """Remove unfinished files without recent writes. Return their total size in bytes."""
        with _refusals(self._root):
            swept = sum(self._room.remove_all(self._room.abandoned(self._root)))
            self._room.forget_empty_tenants()
            return swept

    def capacity(self) -> StoreRoom:
        """Return the used and total bytes and the number of objects of the store."""
        sizes = []
        for path in self._room.files(self._root):
            with suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        if not self._capacity:
            free = os.statvfs(self._root)
            return StoreRoom(sum(sizes), sum(sizes) + free.f_bavail * free.f_frsize, len(sizes))
        return StoreRoom(sum(sizes), self._capacity, len(sizes))

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int | None]:
        """Open an object for reading; yield None if it does not exist."""
        if leads_away(self._root, path):
            yield None
        else:
            with _opened(path) as found:
                yield found

    def _path(self, name: str) -> Path:
        """Return the path of an object. Names that could lead out of the folder are rejected."""
        if not _NAME.fullmatch(name) or any(part.startswith(".") for part in name.split("/")):
            hint = "Use a-z, 0-9, _, - and dots, and start no word with a dot"
            problem = "An object's name must consist of words that are separated by slashes"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=repr(name)[:80], hint=hint)
        return self._root / name


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Raise each `OSError` of the context as an `AtlasError` that contains the path."""
    try:
        yield
    except OSError as fault:
        problem = "A folder or file of the store cannot be accessed"
        hint = "Check the disk and the permissions of the folder"
        raise AtlasError(Code.UNREADABLE, problem, got=f"{path}: {fault}", hint=hint) from None


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """Open a file for reading; yield None if it does not exist or is not a regular file."""
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
    """Write a file and link it to its name. Return False if the object already exists.

    A pipe, a symbolic link or an empty folder under this name is replaced.
    """
    _write(descriptor, parts)
    try:
        os.link(unfinished, path)
    except FileExistsError:
        if is_object(path):
            return False
        with suppress(OSError):
            path.rmdir()
        unfinished.rename(path)
    return True


def _write(descriptor: int, parts: Parts) -> None:
    views = [part.data for part in parts]
    while views:
        done = os.writev(descriptor, views[:_MOST_PARTS])
        views = _remaining(views, done)


def _read(descriptor: int, parts: Parts) -> int:
    views, read = [part.data for part in parts], 0
    while views:
        done = os.readv(descriptor, views[:_MOST_PARTS])
        if not done:
            break
        views, read = _remaining(views, done), read + done
    return read


def _remaining(views: list[memoryview], done: int) -> list[memoryview]:
    """Return the memory ranges that remain after the first `done` bytes."""
    for place, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[place + 1 :]]
        done -= view.nbytes
    return []
