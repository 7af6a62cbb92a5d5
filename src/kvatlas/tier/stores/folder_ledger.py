"""`FolderLedger`: how many bytes a folder has, counted by all processes that write to it."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_USED = struct.Struct("<q")


class HeldLedger:
    """The count, while nobody else may change it."""

    def __init__(self, file: int) -> None:
        self._file = file

    @property
    def used(self) -> int:
        """Bytes that are there; 0 where nobody has counted."""
        text = os.pread(self._file, _USED.size, 0)
        return max(0, _USED.unpack(text)[0]) if len(text) == _USED.size else 0

    @used.setter
    def used(self, nbytes: int) -> None:
        os.pwrite(self._file, _USED.pack(nbytes), 0)


class FolderLedger:
    """A file with a count, which one thread of one process has at a time.

    Who dies between counting and writing leaves it wrong by one object, until somebody who
    makes room counts anew.

    >>> import tempfile
    >>> with FolderLedger(Path(tempfile.mkdtemp()) / "used").held() as ledger:
    ...     ledger.used += 7
    ...     ledger.used
    7
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def held(self) -> Iterator[HeldLedger]:
        """Have the count until the end; raises `OSError` where there can be none."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(f"no file: {self._path}")
            fcntl.flock(file, fcntl.LOCK_EX)  # of this opening, so also among threads
            yield HeldLedger(file)
        finally:
            os.close(file)
