"""`FolderStore`: a file for each object, in a folder that processes of several hosts may share.

A file is written beside its place and linked there when all of its bytes are in it, so that
an object is whole or absent, and the first of two writers wins.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvatlas.errors import AtlasError, Code
from kvatlas.tier.stores.base import ABSENT, ObjectStore, Parts, StoreRoom, joined_size
from kvatlas.wire import Bytes

_NAME = re.compile(r"[a-z0-9_.-]+(/[a-z0-9_.-]+)*")
_UNFINISHED = ".new"
_ABANDONED = 600.0
"""Seconds after which nobody goes on with a file that is not finished."""
_MOST_PARTS = 512
"""Stretches of memory that one call of the system takes."""


class FolderStore(ObjectStore):
    """Objects as files below a folder, up to so many bytes; the oldest go first.

    >>> import tempfile, numpy as np
    >>> store = FolderStore(tempfile.mkdtemp())
    >>> store.put([("kv1/a", [np.arange(4, dtype=np.uint8)])]), store.size("kv1/a")
    ([True], 4)
    >>> store.exists(["kv1/a", "kv1/b"]), list(store.names("kv1/"))
    ([True, False], ['kv1/a'])
    """

    def __init__(self, path: str | Path, capacity: int = 0) -> None:
        self._root, self._capacity = Path(path), capacity
        with _refusals(self._root):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._used = self.capacity().used if capacity else 0

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that are not there yet."""
        return [self._put(self._path(name), parts) for name, parts in objects]

    def _put(self, path: Path, parts: Parts) -> bool:
        if path.exists():
            return True
        size = joined_size(parts)
        if self._capacity and self._used + size > self._capacity:
            self._make_room(size)
            if self._used + size > self._capacity:
                return False
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_UNFINISHED}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _write(descriptor, parts)
            finally:
                os.close(descriptor)
            with suppress(FileExistsError):
                os.link(unfinished, path)
                self._used += size
        except OSError:
            return False  # no room, or no right to write: the object is absent
        finally:
            unfinished.unlink(missing_ok=True)
        return True

    def _make_room(self, size: int) -> None:
        """Remove the oldest objects until a tenth of the room is free, and `size` bytes."""
        self.sweep()
        files = []
        for path in self._files(self._root):
            with suppress(FileNotFoundError):  # others make room too
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        self._used = sum(nbytes for _, nbytes, _ in files)
        for _, _, path in sorted(files):
            if self._used + size <= self._capacity * 9 // 10:
                return
            self._used -= self._remove(path)

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects."""
        return [self._get(self._path(name), parts) for name, parts in objects]

    def _get(self, path: Path, parts: Parts) -> int:
        with _refusals(path):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            except FileNotFoundError:
                return ABSENT
            try:
                size = os.fstat(descriptor).st_size
                return _read(descriptor, parts) if size == joined_size(parts) else size
            finally:
                os.close(descriptor)

    def ranges(self, name: str, wanted: Sequence[tuple[int, Bytes]]) -> int:
        """Read parts of an object."""
        path = self._path(name)
        with _refusals(path):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            except FileNotFoundError:
                return ABSENT
            try:
                return sum(os.preadv(descriptor, [into.data], at) for at, into in wanted)
            finally:
                os.close(descriptor)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which objects are there."""
        return [self._path(name).exists() for name in names]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects."""
        sizes = [self._remove(self._path(name)) for name in names]
        self._used -= sum(sizes)
        return sum(size > 0 for size in sizes)

    def _remove(self, path: Path) -> int:
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            return size
        return 0

    def remove_all(self, prefix: str) -> int:
        """Remove all whose names begin so."""
        return self.remove(list(self.names(prefix)))

    def names(self, prefix: str = "") -> Iterator[str]:
        """The names that begin so."""
        folder = self._root / prefix.rpartition("/")[0]
        for path in self._files(folder):
            name = path.relative_to(self._root).as_posix()
            if name.startswith(prefix):
                yield name

    def size(self, name: str) -> int:
        """The bytes of an object."""
        try:
            return self._path(name).stat().st_size
        except OSError:
            return ABSENT

    def register(self, memory: Bytes) -> None:
        """Any memory will do."""

    def close(self) -> None:
        """Nothing is held open."""

    def sweep(self) -> int:
        """Remove files that nobody has written to for a while, and that were never finished."""
        before, swept = time.time() - _ABANDONED, 0
        for where, _, files in os.walk(self._root):
            for path in (Path(where, one) for one in files if one.endswith(_UNFINISHED)):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < before:
                        swept += self._remove(path)
        return swept

    def capacity(self) -> StoreRoom:
        """What there is and what could be."""
        sizes = []
        for path in self._files(self._root):
            with suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        if not self._capacity:
            free = os.statvfs(self._root)
            return StoreRoom(sum(sizes), sum(sizes) + free.f_bavail * free.f_frsize, len(sizes))
        return StoreRoom(sum(sizes), self._capacity, len(sizes))

    def _files(self, folder: Path) -> Iterator[Path]:
        for where, _, files in os.walk(folder):
            yield from (Path(where, one) for one in files if not one.endswith(_UNFINISHED))

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
