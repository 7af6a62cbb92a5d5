"""`FolderRoom`: the files of a folder of objects, and how many bytes they may take.

What bounds them is a capacity for all, and a quota for each tenant. Whoever has no room
left removes what was used the longest ago: of all, or of the tenant's own.
"""

from __future__ import annotations

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
"""A name that no object can have."""
_OF_TENANT = ".used-"
"""What the name of a tenant's ledger begins with."""
_ABANDONED = 600.0
"""Seconds after which nobody goes on with a file that is not finished."""
_FOLDER_TRIES = 8
"""How often a folder is made for a file that others remove meanwhile."""


class BoundedFolder(NamedTuple):
    """A folder whose objects take at most so many bytes, and who counts them."""

    path: Path
    most: int
    ledger: FolderLedger


class FolderRoom:
    """The files below a folder: made where there is room for them, counted, and removed."""

    def __init__(self, root: Path, capacity: int, quota: int) -> None:
        self._root, self._capacity, self._quota = root, capacity, quota
        self.ledger = FolderLedger(root / _LEDGER)
        """The count of all that is there."""
        self._known_tenants: set[str] = set()
        """Tenants whose bytes were counted since this was made."""
        if capacity:
            with self.ledger.held() as ledger:
                ledger.used = self._counted(root)
        if quota:
            self.forget_empty_tenants()

    @property
    def bounded(self) -> bool:
        """Whether objects make room for others."""
        return bool(self._capacity or self._quota)

    def _bounds(self, path: Path) -> list[BoundedFolder]:
        """What bounds the room for an object: the tenant's quota, and what the folder may have.

        Ledgers are held in this order, by everybody.
        """
        bounds = []
        tenant = tenant_of(path.relative_to(self._root).as_posix())
        if self._quota and tenant:
            ledger = FolderLedger(self._root / (_OF_TENANT + Path(tenant).name))
            bounds.append(BoundedFolder(self._root / tenant, self._quota, ledger))
            if tenant not in self._known_tenants:  # others may have written without a quota
                with ledger.held() as held:
                    held.used = self._counted(self._root / tenant)
                self._known_tenants.add(tenant)
        if self._capacity:
            bounds.append(BoundedFolder(self._root, self._capacity, self.ledger))
        return bounds

    def forget_empty_tenants(self) -> None:
        """Remove the counts of tenants that have nothing."""
        above = [path for path in self._root.iterdir() if path.is_dir()]
        for path in self._root.glob(f"{_OF_TENANT}*"):
            tenant = path.name.removeprefix(_OF_TENANT)
            _forget_if_empty(FolderLedger(path), [one / tenant for one in above])

    def create(self, path: Path, size: int) -> int | None:
        """A new file of a size, open to be written; None where no room can be made for it."""
        bounds = self._bounds(path)
        if any(size > bound.most for bound in bounds):
            return None  # nobody makes room for what cannot fit
        return self._create_within(path, size, bounds)

    def _create_within(self, path: Path, size: int, bounds: Sequence[BoundedFolder]) -> int | None:
        """The same; whoever counts what is there counts it from now on."""
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
        """Remove files; the bytes of each that are counted no more."""
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
        """Remove a file, at once with its bytes from what was counted.

        Otherwise who counts anew in between has them taken off twice.
        """
        with ExitStack() as held:
            ledgers = [held.enter_context(bound.ledger.held()) for bound in bounds]
            size = self._remove(path)
            for ledger in ledgers:
                if ledger.used is not None:
                    ledger.used = max(0, ledger.used - size)
            return size

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

    def _make_room(self, size: int, bound: BoundedFolder, others: Iterable[BoundedFolder]) -> int:
        """Remove objects of a folder until a tenth of its room is free, and `size` bytes.

        The bytes that are there then, also those of objects that others are writing. What the
        whole folder loses stays counted as its tenants', until they make room themselves.
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
        """The bytes of all objects below a folder, also of those that are being written."""
        sizes = 0
        # A file that is finished meanwhile is counted twice rather than not at all.
        for path in chain(self._unfinished(folder), self.files(folder)):
            with suppress(FileNotFoundError):
                sizes += path.stat().st_size
        return sizes

    def abandoned(self, folder: Path) -> Iterator[Path]:
        """Files below a folder that nobody has written to for a while, and never finished."""
        before = time.time() - _ABANDONED
        for path in self._unfinished(folder):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    yield path

    def files(self, folder: Path) -> Iterator[Path]:
        """The objects below a folder."""
        for where, _, files in os.walk(folder):
            whole = (Path(where, one) for one in files if not one.endswith(UNFINISHED))
            yield from (p for p in whole if not p.name.startswith(_LEDGER) and is_object(p))

    def _unfinished(self, folder: Path) -> Iterator[Path]:
        for where, _, files in os.walk(folder):
            yield from (Path(where, one) for one in files if one.endswith(UNFINISHED))


def _forget_if_empty(ledger: FolderLedger, folders: Sequence[Path]) -> None:
    """Remove the count of a tenant that has none of some folders: they go with its objects."""

    def has_some() -> bool:
        return any(folder.exists() for folder in folders)

    if not has_some():
        ledger.remove_unless(has_some)


def is_object(path: Path) -> bool:
    """Whether there is a file, and not something else that could be waited for for ever."""
    try:
        return is_there(path)
    except OSError:
        return False


def is_there(path: Path) -> bool:
    """The same; raises `OSError` where the disk does not say."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


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
