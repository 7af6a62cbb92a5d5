"""`FolderLedger`: the number of bytes in a folder, shared by all processes that write to it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_USED = struct.Struct("<q")
_OPENING = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK_TIMEOUT, _PAUSE = 10.0, 1e-3
"""Seconds to wait for the lock, whose holder may be suspended, and seconds between attempts."""


class HeldLedger:
    """Access to the byte count of a `FolderLedger` while this thread holds its lock.

    Reading and setting `used` reads and writes the ledger's file.
    """

    def __init__(self, file: int) -> None:
        self._file = file

    @property
    def used(self) -> int | None:
        """Number of bytes in the folder; None if they have not been counted."""
        text = os.pread(self._file, _USED.size, 0)
        count: int = _USED.unpack(text)[0] if len(text) == _USED.size else -1
        return None if count < 0 else count

    @used.setter
    def used(self, nbytes: int) -> None:
        os.pwrite(self._file, _USED.pack(nbytes), 0)


class FolderLedger:
    """A file with a byte count, locked by one thread of one process at a time.

    A process that dies between counting and writing leaves the count wrong by one object, until
    a process that needs space recounts.

    >>> import tempfile
    >>> with FolderLedger(Path(tempfile.mkdtemp()) / "used").held() as ledger:
    ...     ledger.used = 7
    ...     ledger.used
    7
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def held(self, timeout: float | None = None) -> Iterator[HeldLedger]:
        """Lock the ledger during the context, after waiting up to `timeout` seconds.

        Raises `OSError` if the ledger cannot be opened or locked.
        """
        timeout = _LOCK_TIMEOUT if timeout is None else timeout
        while True:
            file = os.open(self._path, _OPENING, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(f"not a regular file: {self._path}")
                _lock(file, timeout)
                if self._is(file):
                    yield HeldLedger(file)
                    return
            finally:
                os.close(file)

    def _is(self, file: int) -> bool:
        """Return whether the open file is still the ledger. Another process may have removed it."""
        try:
            return os.path.samestat(os.fstat(file), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def remove_unless(self, needed: Callable[[], bool]) -> None:
        """Lock the ledger and remove it, unless `needed` returns true. A locked ledger is kept.

        A process that waits for the lock then creates a new ledger.
        """
        with suppress(OSError), self.held(timeout=0.0):
            if not needed():
                self._path.unlink()


def _lock(file: int, timeout: float) -> None:
    """Lock an open file until it is closed. Raises `TimeoutError` after `timeout` seconds.

    Other descriptors of the same file cannot lock it meanwhile, not even in this process.
    """
    until = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                problem = "Another process or thread holds the lock of the ledger"
                raise TimeoutError(errno.ETIMEDOUT, problem) from None
            time.sleep(_PAUSE)
        else:
            return
