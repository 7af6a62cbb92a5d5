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
_PATIENCE, _PAUSE = 10.0, 1e-3
"""Seconds to wait for the lock, whose holder may be stopped, and between attempts."""


class HeldLedger:
    """The count, while this thread holds its lock."""

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
    def held(self, patience: float | None = None) -> Iterator[HeldLedger]:
        """Lock the count for the duration of the context; raises `OSError` if that fails."""
        patience = _PATIENCE if patience is None else patience
        while True:
            file = os.open(self._path, _OPENING, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(f"not a regular file: {self._path}")
                _lock(file, patience)
                if self._is(file):
                    yield HeldLedger(file)
                    return
            finally:
                os.close(file)

    def _is(self, file: int) -> bool:
        """Return whether an open file is still the ledger, which others may have removed."""
        try:
            return os.path.samestat(os.fstat(file), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def remove_unless(self, needed: Callable[[], bool]) -> None:
        """Remove the ledger of a folder that no longer exists, unless it is locked.

        A process that waits for the lock creates a new ledger.
        """
        with suppress(OSError), self.held(patience=0.0):
            if not needed():
                self._path.unlink()


def _lock(file: int, patience: float) -> None:
    """Lock a file against all other open descriptions, also of this process, until it is closed."""
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, "Another process holds the ledger") from None
            time.sleep(_PAUSE)
        else:
            return
