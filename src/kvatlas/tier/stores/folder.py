"""`FolderStore`: one file per object, in a folder that several hosts may share.

A file is written under a temporary name and linked to its final name when it is complete. An object
is therefore complete or absent, and the first of two writers wins. Files are not flushed to disk:
after a power failure, objects may be missing or damaged. Damage is detected by an object's
checksum, and a damaged object counts as a miss. Symbolic links below the folder are not followed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import natural
from kvatlas.tier.stores.base import ABSENT, ObjectStore, Parts, StoreRoom, joined_size
from kvatlas.tier.stores.folder_files import (
    is_name,
    is_object,
    is_there,
    leads_away,
    network_file_system,
    objects_below,
    opened,
    read,
    remove_abandoned,
    remove_file,
    set_used,
    write_object,
)
from kvatlas.tier.stores.folder_index import FolderIndex
from kvatlas.tier.stores.folder_space import FolderSpace

_TOLERATED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ETIMEDOUT)
"""Errors of the index with which a folder opens: it is read-only, or the index is locked."""


class FolderStore(ObjectStore):
    """Objects as files below a folder, up to `capacity` bytes, with LRU eviction.

    All processes of a host that share the folder and specify a `capacity` share one count of its
    bytes. With a `quota`, each tenant has at most this many bytes, and only objects of the same
    tenant are evicted to make space for a new object. Both limits need a local file system. A
    missing folder is created, unless `create` is false. Objects are not flushed to disk and may be
    lost in a power failure. Objects of a read-only folder can be read.

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
        self._bounded = bool(natural(quota, "the quota of a tenant") or capacity)
        if not create and not self._root.is_dir():
            problem, hint = "The folder of the store does not exist", "Check the store's address"
            raise AtlasError(Code.UNREADABLE, problem, got=str(self._root), hint=hint)
        self._index = FolderIndex(self._root)
        self._space = FolderSpace(self._root, self._index, capacity, quota)
        with _refusals(self._root):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._network = network_file_system(self._root)
            if self._bounded:
                self._check_local()
                self._open_index()

    def _check_local(self) -> None:
        """Raise an error if SQLite's locks are not safe on the file system of the folder."""
        if self._network:
            problem = "A folder with a capacity or quota must be on a local file system"
            hint = "Omit capacity= and quota=, or share a store such as s3:// or mooncake://"
            got = f"{self._root} on {self._network}"
            raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)

    def _open_index(self) -> None:
        """Open the index, or build it if it is missing. Remove abandoned files."""
        try:
            remove_abandoned(self._root)
            self._space.usage()
        except OSError as fault:
            if fault.errno not in _TOLERATED:
                raise

    @property
    def _indexed(self) -> bool:
        """Whether writes must be recorded in the index, for this or for another process."""
        return not self._network and (self._bounded or self._index.exists())

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that do not exist yet. Return, for each, whether it exists now."""
        paths = {name: self._path(name) for name, _ in objects}
        new = {name: parts for name, parts in objects if not self._touch(paths[name])}
        sizes = [(name, joined_size(parts)) for name, parts in new.items()]
        with suppress(OSError):  # the index cannot be locked or written: the objects stay absent
            indexed = bool(new) and self._indexed
            fits = self._space.reserve(sizes) if indexed else [True] * len(new)
            try:
                for (name, parts), fit in zip(new.items(), fits, strict=True):
                    with suppress(OSError):  # no space or no write permission
                        if fit and not leads_away(self._root, paths[name]):
                            write_object(self._root, paths[name], parts)
            finally:
                if indexed:
                    reserved = zip(sizes, fits, strict=True)
                    self._space.finish([about for about, fit in reserved if fit])
        return [self._is_object(path) for path in map(paths.__getitem__, (n for n, _ in objects))]

    def _is_object(self, path: Path) -> bool:
        return is_object(path) and not leads_away(self._root, path)

    def _touch(self, path: Path) -> bool:
        """Return whether an object exists, and record its use."""
        there = self._is_object(path)
        if there:
            self._use(path)
        return there

    def _use(self, file: int | Path) -> None:
        """Record that an object was used, if objects can be evicted."""
        if self._bounded:
            with suppress(OSError):  # a file of another user, for example, is evicted by its age
                set_used(file)

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects. Return the size of each in bytes, or `ABSENT`."""
        return [self._get(self._path(name), parts) for name, parts in objects]

    def _get(self, path: Path, parts: Parts) -> int:
        with _refusals(path), self._opened(path) as found:
            if found is None:
                return ABSENT
            size = os.fstat(found).st_size
            self._use(found)
            return read(found, parts) if size == joined_size(parts) else size

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
            paths = {name: self._path(name) for name in names}
            inside = [name for name, path in paths.items() if not leads_away(self._root, path)]
            if inside and self._indexed:
                return self._space.remove(inside)
            return sum(remove_file(self._root, paths[name]) for name in inside)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that start with a prefix."""
        folder = self._root / prefix.rpartition("/")[0]
        for name, _ in objects_below(self._root, folder):
            if name.startswith(prefix):
                yield name

    def size(self, name: str) -> int:
        """Return the size of an object in bytes, or `ABSENT`."""
        path = self._path(name)
        with suppress(OSError):
            if self._is_object(path):
                return path.lstat().st_size
        return ABSENT

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def sweep(self) -> int:
        """Remove unfinished files without recent writes. Return their total size in bytes.

        The index is built again, so that it counts objects that other programs have written.
        """
        with _refusals(self._root):
            swept = remove_abandoned(self._root, everywhere=True)
            if self._indexed:
                self._index.rebuild()
            return swept

    def capacity(self) -> StoreRoom:
        """Return the used and total bytes and the number of objects of the store."""
        with _refusals(self._root):
            used, objects = self._usage()
            free = os.statvfs(self._root)
        return StoreRoom(used, self._capacity or used + free.f_bavail * free.f_frsize, objects)

    def _usage(self) -> tuple[int, int]:
        if self._bounded:
            with suppress(OSError):  # the folder is read-only, for example
                return self._space.usage()
        sizes = [about.st_size for _, about in objects_below(self._root, self._root)]
        return sum(sizes), len(sizes)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int | None]:
        """Open an object for reading; yield None if it does not exist."""
        if leads_away(self._root, path):
            yield None
        else:
            with opened(path) as found:
                yield found

    def _path(self, name: str) -> Path:
        """Return the path of an object. Names that could lead out of the folder are rejected."""
        if not is_name(name):
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
