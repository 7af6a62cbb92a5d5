"""`FolderRoom`: space accounting and eviction for a folder of objects.

A capacity limits the bytes of all objects, and a quota those of each tenant. A writer that finds
no space evicts the least recently used objects: of all objects, or of its tenant only.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from kvatlas.tier.stores.base import tenant_of
from kvatlas.tier.stores.folder_ledger import FolderLedger

UNFINISHED = ".new"
_LEDGER = ".used"
"""Name of the ledger file. No object can have this name."""
_OF_TENANT = ".used-"
"""Prefix of the name of a tenant's ledger."""
_ABANDONED = 600.0
"""Seconds after which an unfinished file counts as abandoned."""
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Error numbers of a folder to which this process must not write."""
_FOLDER_TRIES = 8
"""Number of attempts to create a folder that other processes remove concurrently."""


class BoundedFolder(NamedTuple):
    """A folder, the maximum number of bytes in it, and the ledger that counts them."""

    path: Path
    most: int
    ledger: FolderLedger


class FolderRoom:
    """Creates, counts and removes the files below a folder, within its limits."""

    def __init__(self, root: Path, capacity: int, quota: int) -> None:
        self._root, self._capacity, self._quota = root, capacity, quota
        self.ledger = FolderLedger(root / _LEDGER)
        """Counts the bytes of all objects."""
        self._known_tenants: set[str] = set()
        """Tenants whose bytes have been counted by this object."""
        if capacity:
            self._count_all()
        if quota:
            self.forget_empty_tenants()

    def _count_all(self) -> None:
        """Count the bytes of all objects, unless this process can only read the folder."""
        try:
            with self.ledger.held() as ledger:
                ledger.used = self._counted(self._root)
        except OSError as fault:
            if fault.errno not in _READ_ONLY:
                raise

    @property
    def bounded(self) -> bool:
        """Whether there is a limit, so that objects may be evicted."""
        return bool(self._capacity or self._quota)

    def _bounds(self, path: Path) -> list[BoundedFolder]:
        """Return the limits for an object: the tenant's quota, then the folder's capacity.

        All processes lock the ledgers in this order.
        """
        bounds = []
        tenant = tenant_of(path.relative_to(self._root).as_posix())
        if self._quota and tenant:
            ledger = FolderLedger(self._root / (_OF_TENANT + Path(tenant).name))
            bounds.append(BoundedFolder(self._root / tenant, self._quota, ledger))
            if tenant not in self._known_tenants:  # other processes may write without a quota
                with ledger.held() as held:
                    held.used = self._counted(self._root / tenant)
                self._known_tenants.add(tenant)
        if self._capacity:
            bounds.append(BoundedFolder(self._root, self._capacity, self.ledger))
        return bounds

    def forget_empty_tenants(self) -> None:
        """Remove the ledgers of tenants without objects."""
        above = [path for path in self._root.iterdir() if path.is_dir()]
        for path in self._root.glob(f"{_OF_TENANT}*"):
            tenant = path.name.removeprefix(_OF_TENANT)
            _forget_if_empty(FolderLedger(path), [one / tenant for one in above])

    def create(self, path: Path, size: int) -> int | None:
        """Create a file of `size` bytes and return its descriptor, or None if there is no space."""
        bounds = self._bounds(path)
        if any(size > bound.most for bound in bounds):
            return None  # evicting other objects cannot help
        return self._create_within(path, size, bounds)

    def _create_within(self, path: Path, size: int, bounds: Sequence[BoundedFolder]) -> int | None:
        """Create a file within the limits and add its size to the ledgers.

        Returns its descriptor, or None if there is no space.
        """
        if not bounds:
            return _create(path, size)
        bound, *others = bounds
        with bound.ledger.held() as ledger:
            used = ledger.used
            if used is None or used + size > bound.most:
                used = ledger.used = self._make_room(size, bound, others)
            if used + size > bound.most:
                return None
            ledger.used = used + size
            made = None
            try:
                made = self._create_within(path, size, others)
            finally:
                if made is None:
                    ledger.used = used
            return made

    def remove_all(self, paths: Iterable[Path]) -> list[int]:
        """Remove files and return, for each, how many bytes were freed."""
        freed: list[int] = []
        tenants: dict[Path, FolderLedger] = {}
        for path in paths:
            bounds = self._bounds(path)
            freed.append(self._remove_counted(path, bounds))
            tenants |= {one.path: one.ledger for one in bounds if one.path != self._root}
        for folder, ledger in tenants.items():
            _forget_if_empty(ledger, [folder])
        return freed

    def _remove_counted(self, path: Path, bounds: Iterable[BoundedFolder]) -> int:
        """Remove a file and subtract its size from the ledgers, holding their locks meanwhile.

        Without the locks, a process that recounts in between would already leave out the file, and
        its size would be subtracted twice. Returns the freed bytes.
        """
        with ExitStack() as held:
            ledgers = [held.enter_context(bound.ledger.held()) for bound in bounds]
            size = self._remove(path)
            for ledger in ledgers:
                if ledger.used is not None:
                    ledger.used = max(0, ledger.used - size)
            return size

    def _remove(self, path: Path) -> int:
        """Remove a file, and its parent folders if they become empty. Return the freed bytes."""
        with suppress(FileNotFoundError):
            size = path.lstat().st_size
            path.unlink()
            with suppress(OSError):  # a folder that is not empty is kept
                while (path := path.parent) != self._root:
                    path.rmdir()
            return size
        return 0

    def _make_room(self, size: int, bound: BoundedFolder, others: Iterable[BoundedFolder]) -> int:
        """Remove the oldest files until `size` more bytes would fill at most 90% of the limit.

        Returns the number of bytes still used, including objects that are being written. Removed
        files are subtracted from the ledgers in `others`. Removals for the whole folder leave the
        ledgers of tenants unchanged until they are recounted.
        """
        for path in self.abandoned(bound.path):
            self._remove_counted(path, others)
        files = []
        for path in self.files(bound.path):
            with suppress(FileNotFoundError):  # others remove objects too
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        used = self._counted(bound.path)
        for _, _, path in sorted(files):
            if used + size <= bound.most * 9 // 10:
                break
            used -= self._remove_counted(path, others)
        return used

    def _counted(self, folder: Path) -> int:
        """Count the bytes of all objects below a folder, including those being written."""
        sizes = 0
        # A file that is finished meanwhile is counted twice rather than not at all.
        for path in chain(self._unfinished(folder), self.files(folder)):
            with suppress(FileNotFoundError):
                sizes += path.stat().st_size
        return sizes

    def abandoned(self, folder: Path) -> Iterator[Path]:
        """Yield unfinished files below a folder that have not been written to for a while."""
        before = time.time() - _ABANDONED
        for path in self._unfinished(folder):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    yield path

    def files(self, folder: Path) -> Iterator[Path]:
        """Yield the objects below a folder."""
        for where, _, files in self._walk(folder):
            whole = (Path(where, one) for one in files if not one.endswith(UNFINISHED))
            yield from (p for p in whole if not p.name.startswith(_LEDGER) and is_object(p))

    def _walk(self, folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        """Walk a folder, but follow no symbolic link to another folder."""
        if not leads_away(self._root, folder / "x"):
            yield from os.walk(folder)

    def _unfinished(self, folder: Path) -> Iterator[Path]:
        for where, _, files in self._walk(folder):
            yield from (Path(where, one) for one in files if one.endswith(UNFINISHED))


def _forget_if_empty(ledger: FolderLedger, folders: Sequence[Path]) -> None:
    """Remove the ledger of a tenant if its folders no longer exist."""

    def has_some() -> bool:
        return any(folder.exists() for folder in folders)

    if not has_some():
        ledger.remove_unless(has_some)


def leads_away(root: Path, path: Path) -> bool:
    """Return whether a folder between `root` and `path` is a symbolic link.

    Such a link could lead to files of other programs, or to objects of another tenant.
    """
    at = str(root)
    for word in path.relative_to(root).parts[:-1]:
        at = f"{at}/{word}"
        if Path(at).is_symlink():
            return True
    return False


def is_object(path: Path) -> bool:
    """Return whether a path is a regular file. Opening a pipe, for example, could block forever."""
    try:
        return is_there(path)
    except OSError:
        return False


def is_there(path: Path) -> bool:
    """Like `is_object`, but raises `OSError` if the disk fails."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _create(path: Path, size: int) -> int:
    """Create a file of `size` bytes and return its descriptor for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for tries_left in reversed(range(_FOLDER_TRIES)):
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
            break
        except FileNotFoundError:  # another process has removed the folder, which was empty
            if not tries_left:
                raise
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return descriptor
