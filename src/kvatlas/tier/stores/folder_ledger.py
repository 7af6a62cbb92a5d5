"""`FolderLedger`: how many bytes a folder has, counted by all processes that write to it."""

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
"""Seconds for which others may have the count, and between looks: who has it may be stopped."""


class HeldLedger:
    """The count, while nobody else may change it."""

    def __init__(self, file: int) -> None:
        self._file = file

    @property
    def used(self) -> int | None:
        """Bytes that are there; None where nobody has counted."""
        text = os.pread(self._file, _USED.size, 0)
        count: int = _USED.unpack(text)[0] if len(text) == _USED.size else -1
        return None if count < 0 else count

    @used.setter
    def used(self, nbytes: int) -> None:
        os.pwrite(self._file, _USED.pack(nbytes), 0)


class FolderLedger:
    """A file with a count, which one thread of one process has at a time.

    Who dies between counting and writing leaves it wrong by one object, until somebody who
    makes room counts anew.

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
        """Have the count until the end; raises `OSError` where there can be none."""
        patience = _PATIENCE if patience is None else patience
        while True:
            file = os.open(self._path, _OPENING, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(f"no file: {self._path}")
                _lock(file, patience)
                if self._is(file):
                    yield HeldLedger(file)
                    return
            finally:
                os.close(file)

    def _is(self, file: int) -> bool:
        """Whether an open file is still the ledger: others may have removed it meanwhile."""
        try:
            return os.path.samestat(os.fstat(file), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def remove_unless(self, needed: Callable[[], bool]) -> None:
        """Remove the count of what is no more, unless somebody has it now.

        Whoever waits for it makes a new one.
        """
        with suppress(OSError), self.held(patience=0.0):
            if not needed():
                self._path.unlink()


def _lock(file: int, patience: float) -> None:
    """Keep others from a file until it is closed: its other openings, so also threads."""
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, "Another process keeps the count") from None
            time.sleep(_PAUSE)
        else:
            return
