"""`FolderStore`: a file for each object, in a folder that processes of several hosts may share.

A file is written beside its place and linked there when all of its bytes are in it, so that
an object is whole or absent, and the first of two writers wins.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from kvatlas.errors import AtlasError, Code
from kvatlas.tier.stores.base import ABSENT, ObjectStore, Parts, StoreRoom, joined_size
from kvatlas.tier.stores.folder_ledger import FolderLedger
from kvatlas.wire import Bytes

_NAME = re.compile(r"[a-z0-9_.-]+(/[a-z0-9_.-]+)*")
_UNFINISHED = ".new"
_LEDGER = ".used"
"""A name that no object can have."""
_ABANDONED = 600.0
"""Seconds after which nobody goes on with a file that is not finished."""
_FOLDER_TRIES = 8
"""How often a folder is made for a file that others remove meanwhile."""
_MOST_PARTS = 512
"""Stretches of memory that one call of the system takes."""


class FolderStore(ObjectStore):
    """Objects as files below a folder, up to so many bytes; the least recently used go first.

    All who share the folder and give it a `capacity` count together what is in it.

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
        self._ledger = FolderLedger(self._root / _LEDGER)
        if capacity:
            with _refusals(self._root), self._ledger.held() as ledger:
                ledger.used = self._counted()

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that are not there yet."""
        return [self._put(self._path(name), parts) for name, parts in objects]

    def _put(self, path: Path, parts: Parts) -> bool:
        if _is_object(path):
            return True
        size, linked = joined_size(parts), False
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_UNFINISHED}")
        try:
            descriptor = self._create(unfinished, size)
            if descriptor is None:
                return False
            try:
                linked = _finish(descriptor, unfinished, path, parts)
            finally:
                os.close(descriptor)
                if linked:
                    unfinished.unlink(missing_ok=True)
                else:
                    self._remove_all([unfinished])
        except OSError:
            return False  # no room, or no right to write: the object is absent
        return linked or _is_object(path)

    def _create(self, path: Path, size: int) -> int | None:
        """A new file of a size, after making room where that is needed; None without room.

        Whoever counts what is there counts it from now on.
        """
        if not self._capacity:
            return _create(path, size)
        with self._ledger.held() as ledger:
            used = ledger.used
            if used is None or used + size > self._capacity:
                used = ledger.used = self._make_room(size)
            if used + size > self._capacity:
                return None
            ledger.used = used + size
            try:
                return _create(path, size)
            except BaseException:
                ledger.used = used
                raise

    def _remove_all(self, paths: Iterable[Path]) -> list[int]:
        """Remove files; the bytes of each that are counted no more."""
        if not self._capacity:
            return [self._remove(path) for path in paths]
        sizes = []
        for path in paths:
            # At once, or who counts anew in between has them taken off twice.
            with self._ledger.held() as ledger:
                sizes.append(self._remove(path))
                if ledger.used is not None:
                    ledger.used = max(0, ledger.used - sizes[-1])
        return sizes

    def _remove(self, path: Path) -> int:
        """Remove a file, and folders that are empty without it; how many bytes that frees."""
        with suppress(FileNotFoundError):
            size = path.lstat().st_size
            path.unlink()
            with suppress(OSError):  # others have something there
                while (path := path.parent) != self._root:
                    path.rmdir()
            return size
        return 0

    def _make_room(self, size: int) -> int:
        """Remove objects until a tenth of the room is free, and `size` bytes.

        The bytes that are there then, also those of objects that others are writing.
        """
        for path in self._abandoned():
            self._remove(path)
        files = []
        for path in self._files(self._root):
            with suppress(FileNotFoundError):  # others remove objects too
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        used = self._counted()
        for _, _, path in sorted(files):
            if used + size <= self._capacity * 9 // 10:
                break
            used -= self._remove(path)
        return used

    def _counted(self) -> int:
        """The bytes of all objects, also of those that are being written."""
        sizes = 0
        # A file that is finished meanwhile is counted twice rather than not at all.
        for path in chain(self._unfinished(), self._files(self._root)):
            with suppress(FileNotFoundError):
                sizes += path.stat().st_size
        return sizes

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects."""
        return [self._get(self._path(name), parts) for name, parts in objects]

    def _get(self, path: Path, parts: Parts) -> int:
        with _refusals(path), _opened(path) as found:
            if found is None:
                return ABSENT
            size = os.fstat(found).st_size
            if self._capacity:
                with suppress(OSError):  # of another user, say: then it goes by its age
                    os.utime(found)
            return _read(found, parts) if size == joined_size(parts) else size

    def ranges(self, name: str, wanted: Sequence[tuple[int, Bytes]]) -> int:
        """Read parts of an object."""
        path = self._path(name)
        with _refusals(path), _opened(path) as found:
            if found is None:
                return ABSENT
            return sum(os.preadv(found, [into.data], at) for at, into in wanted)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which objects are there."""
        with _refusals(self._root):
            return [_is_there(self._path(name)) for name in names]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects."""
        with _refusals(self._root):
            sizes = self._remove_all(map(self._path, names))
        return sum(size > 0 for size in sizes)

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
        path = self._path(name)
        with suppress(OSError):
            return path.lstat().st_size if _is_object(path) else ABSENT
        return ABSENT

    def register(self, memory: Bytes) -> None:
        """Any memory will do."""

    def close(self) -> None:
        """Nothing is held open."""

    def sweep(self) -> int:
        """Remove files that nobody has written to for a while, and that were never finished."""
        with _refusals(self._root):
            return sum(self._remove_all(self._abandoned()))

    def _abandoned(self) -> Iterator[Path]:
        before = time.time() - _ABANDONED
        for path in self._unfinished():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    yield path

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
            whole = (Path(where, one) for one in files if not one.endswith(_UNFINISHED))
            yield from (path for path in whole if path.name != _LEDGER and _is_object(path))

    def _unfinished(self) -> Iterator[Path]:
        for where, _, files in os.walk(self._root):
            yield from (Path(where, one) for one in files if one.endswith(_UNFINISHED))

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


def _is_object(path: Path) -> bool:
    """Whether there is a file, and not something else that could be waited for for ever."""
    try:
        return _is_there(path)
    except OSError:
        return False


def _is_there(path: Path) -> bool:
    """The same; raises `OSError` where the disk does not say."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A file to read from; None where there is none, or something else."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        found = None
    except OSError:
        if _is_object(path):
            raise
        found = None
    if found is None:
        yield None
        return
    try:
        yield found if stat.S_ISREG(os.fstat(found).st_mode) else None
    finally:
        os.close(found)


def _create(path: Path, size: int) -> int:
    """A new file of a size, open to be written."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for tries_left in reversed(range(_FOLDER_TRIES)):
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
            break
        except FileNotFoundError:  # others have removed the folder, which was empty
            if not tries_left:
                raise
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return descriptor


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
