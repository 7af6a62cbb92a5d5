"""`FolderIndex`: an SQLite database with the size and the last use of each object of a folder.

Files decide which objects exist. The index only serves to limit their total size, so a wrong index
cannot lead to a wrong object. It is written before a file is created and after a file is removed: a
process that dies in between leaves an entry without a file. The entry is deleted when it is next
considered for eviction.

The symbolic link `.index` in the folder contains the name of the database. An index that is missing
or damaged is replaced by a new database under another name, built from the files. Meanwhile other
processes can read objects but not store any.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote
from weakref import WeakSet

from kvatlas.tier.stores.base import tenant_of
from kvatlas.tier.stores.folder_files import is_object, last_use, objects_below

T = TypeVar("T")
ALL = "*"
"""The key of the usage of all tenants together. No tenant can have this name."""
VERSION = 1
"""The version of the schema. A database with another version is replaced."""
LOCK_TIMEOUT = 10.0
"""Seconds to wait for another process, which may be suspended, to finish its transaction."""
_FORK_TIMEOUT = 60.0
"""Seconds that a fork waits for the transactions of other threads."""
_LINK, _LOCK, _NAME = ".index", ".index.lock", re.compile(r"\.index-[0-9a-f]{16}\.db")
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_NOT_WRITTEN = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
_SCHEMA = """
CREATE TABLE objects (
    name TEXT PRIMARY KEY, tenant TEXT, size INTEGER, used INTEGER, writing INTEGER
) WITHOUT ROWID;
CREATE INDEX oldest ON objects (used);
CREATE INDEX oldest_of_tenant ON objects (tenant, used);
CREATE TABLE usage (tenant TEXT PRIMARY KEY, nbytes INTEGER, objects INTEGER) WITHOUT ROWID;
CREATE TRIGGER added AFTER INSERT ON objects BEGIN
    INSERT INTO usage VALUES (new.tenant, new.size, 1), ('*', new.size, 1)
    ON CONFLICT (tenant) DO UPDATE SET nbytes = nbytes + new.size, objects = objects + 1;
END;
CREATE TRIGGER removed AFTER DELETE ON objects BEGIN
    UPDATE usage SET nbytes = nbytes - old.size, objects = objects - 1
    WHERE tenant IN (old.tenant, '*');
    DELETE FROM usage WHERE tenant = old.tenant AND objects = 0;
END;
"""
"""`used` is the time of the last known use and `writing` that of the reservation, 0 for a finished
object, both in nanoseconds since 1970."""


class DamagedIndexError(Exception):
    """The database cannot be used and must be replaced."""


class FolderIndex:
    """The index of one folder. Its transactions are safe between threads and processes.

    SQLite forbids the use of a connection after a fork. A fork therefore waits for transactions and
    closes the database, which parent and child open again when they next use it.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> (root / "object").write_bytes(bytes(100))
    100
    >>> index = FolderIndex(root)
    >>> index.write(lambda database: index.usage(database))
    (100, 1)
    >>> index.close()
    """

    def __init__(self, root: Path) -> None:
        self._root, self._link = root, root / _LINK
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._name = ""
        """The name of the open database."""
        with _forks.making:
            _forks.indexes.add(self)

    def exists(self) -> bool:
        """Return whether the folder has an index."""
        return bool(self._current())

    def write(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """Execute a function in a transaction. Other processes cannot write at the same time.

        Raises `OSError` if the database cannot be locked or written. If the database is damaged, it
        is replaced, and `act` is called a second time.
        """
        with self._lock:
            try:
                return self._transaction(act)
            except DamagedIndexError:
                with _unbuildable():
                    self._replace()
                    return self._transaction(act)

    def usage(self, database: sqlite3.Connection, tenant: str = ALL) -> tuple[int, int]:
        """Return the bytes and the number of objects of a tenant or of all tenants."""
        found = database.execute("SELECT nbytes, objects FROM usage WHERE tenant = ?", (tenant,))
        nbytes, objects = found.fetchone() or (0, 0)
        if not isinstance(nbytes, int) or not isinstance(objects, int):
            raise DamagedIndexError
        return nbytes, objects

    def rebuild(self) -> None:
        """Replace the index by one that is built from the files. Raises `OSError` if it fails."""
        self.close()
        with self._lock, _unbuildable():
            self._name = self._current()
            self._replace()

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._close()

    def before_fork(self, until: float) -> bool:
        """Acquire the lock and close the database. Return False if the lock is not free in time.

        `after_fork` releases the lock. `until` is a value of `time.monotonic`.
        """
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            return False
        self._close()
        return True

    def after_fork(self) -> None:
        """Release the lock in the parent."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Replace the lock: the old one may be held by a thread that exists only in the parent."""
        if self._database is not None:  # closing it could remove a file that the parent uses
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._database))
        self._lock, self._database = threading.Lock(), None

    def _close(self) -> None:
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
        self._database = None

    def _transaction(self, act: Callable[[sqlite3.Connection], T]) -> T:
        with _failures():
            database = self._connected()
            database.execute("BEGIN IMMEDIATE")
            try:
                result = act(database)
                database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
                raise
            return result

    def _connected(self) -> sqlite3.Connection:
        """Return the open database, after opening it if another process has replaced it."""
        name = self._current()
        if self._database is not None and name == self._name:
            return self._database
        self._close()
        self._name = name
        if not name or not is_object(self._root / name):
            raise DamagedIndexError
        database = _connect(self._root / name)
        if database.execute("PRAGMA user_version").fetchone() != (VERSION,):
            database.execute("BEGIN IMMEDIATE")  # wait for a process that builds the index
            built = database.execute("PRAGMA user_version").fetchone() == (VERSION,)
            database.execute("ROLLBACK")
            if not built:
                raise DamagedIndexError
        self._database = database
        return database

    def _current(self) -> str:
        """Return the name of the current database, or "" if there is none."""
        try:
            name = str(self._link.readlink())
        except OSError:
            return ""
        return name if _NAME.fullmatch(name) else ""

    def _replace(self) -> None:
        """Build a new index, unless another process has already replaced the damaged one."""
        self._close()
        name = f".index-{secrets.token_hex(8)}.db"
        with _failures(), _locked(self._root / _LOCK):
            if self._current() != self._name:
                return
            os.close(os.open(self._root / name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            database = _connect(self._root / name)
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(_SCHEMA)
            database.execute("BEGIN IMMEDIATE")  # other processes wait for the COMMIT
            unpublished = self._root / f"{name}.link"
            unpublished.symlink_to(name)
            unpublished.rename(self._link)
            self._remove_others(name)
        self._database, self._name = database, name
        with _failures():
            try:
                database.executemany("INSERT INTO objects VALUES (?, ?, ?, ?, 0)", self._objects())
                database.execute(f"PRAGMA user_version = {VERSION}")
                database.execute("COMMIT")
            except BaseException:
                self._close()  # without its version, the database counts as damaged
                raise

    def _objects(self) -> Iterator[tuple[str, str, int, int]]:
        for name, about in objects_below(self._root, self._root):
            yield name, tenant_of(name), about.st_size, last_use(about)

    def _remove_others(self, name: str) -> None:
        """Remove older databases, and the files in which older releases counted bytes."""
        for path in self._root.glob(".index-*"):
            if not path.name.startswith(name):
                path.unlink(missing_ok=True)
        for path in self._root.glob(".used*"):
            path.unlink(missing_ok=True)


class _Forks:
    """Closes the indexes of this process before a fork, and opens them again afterwards."""

    def __init__(self) -> None:
        self.indexes: WeakSet[FolderIndex] = WeakSet()
        self.making = threading.Lock()
        """Held while an index is added, and during a fork."""
        self._held: list[FolderIndex] = []

    def before(self) -> None:
        self.making.acquire()
        until = time.monotonic() + _FORK_TIMEOUT
        self._held = [index for index in list(self.indexes) if index.before_fork(until)]

    def after(self) -> None:
        for index in self._held:
            index.after_fork()
        self._held = []
        self.making.release()

    def after_in_child(self) -> None:
        self.making, self._held = threading.Lock(), []
        for index in list(self.indexes):
            index.after_fork_in_child()


_forks = _Forks()
os.register_at_fork(
    before=_forks.before, after_in_parent=_forks.after, after_in_child=_forks.after_in_child
)


def _connect(path: Path) -> sqlite3.Connection:
    address = f"file:{quote(str(path.absolute()))}?mode=rw"
    database = sqlite3.connect(
        address, LOCK_TIMEOUT, isolation_level=None, check_same_thread=False, uri=True
    )
    try:
        # Objects are not flushed to disk either. A database that a power failure damages is built
        # again.
        database.execute("PRAGMA synchronous = OFF")
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def _unbuildable() -> Iterator[None]:
    """Raise a `DamagedIndexError` as `OSError`, for contexts in which a new index is built."""
    try:
        yield
    except DamagedIndexError as fault:
        raise OSError(f"the index cannot be built: {fault.__cause__}") from None


@contextmanager
def _failures() -> Iterator[None]:
    """Raise errors of SQLite as `OSError`, or as `DamagedIndexError` if a new index is needed."""
    try:
        yield
    except sqlite3.Error as fault:
        code = getattr(fault, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _BUSY:
            problem = "another process or thread has locked the index"
            raise TimeoutError(errno.ETIMEDOUT, problem) from None
        if code in _NOT_WRITTEN:
            raise OSError(errno.ENOSPC, f"the index cannot be written: {fault}") from None
        raise DamagedIndexError from fault


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock in a file. Raises `TimeoutError` if another process does not release it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file, until = os.open(path, flags, 0o600), time.monotonic() + LOCK_TIMEOUT
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    problem = "another process is replacing the index"
                    raise TimeoutError(errno.ETIMEDOUT, problem) from None
                time.sleep(1e-3)
        yield
    finally:
        os.close(file)
