"""Ownership of a tier's file: one process owns it and serves it to others.

The owner holds an exclusive lock on the file, which the system releases when the process ends.
Clients of the owner hold a second, shared lock while they move bytes, and may still do so after
the owner has died. The next owner therefore first removes the previous owner's socket and then
waits for the shared lock. A client checks the socket after it has taken the lock, and moves no
bytes if the socket has changed. So either the next owner waits for the client, or the client
detects the new owner.
"""

from __future__ import annotations

import fcntl
import struct
import threading
import time
from pathlib import Path

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.unix_sockets import forget_path

_WAIT_SECONDS = 5.0
"""Seconds that a new owner waits for clients of the previous owner."""
_PAUSE_SECONDS = 0.01
_LOCK = struct.Struct("@hhqqi")
"""The system's `flock` struct: kind, whence, first byte, length, process (0)."""


def socket_beside(path: Path) -> Path:
    """Return the path of the socket on which the owner of a tier's file listens."""
    real = path.resolve()  # all links to a file lead to the same socket
    return real.with_name(f"{real.name}.sock")


def lock_file(fd: int, path: Path) -> None:
    """Become the owner of a file.

    Raises an error if another process owns the file or its clients still use it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        problem = "Another process has the tier's file open"
        hint = "Close it in that process, use another path, or call share_file in all processes"
        raise AtlasError(Code.TWICE, problem, got=path, hint=hint) from None
    forget_path(socket_beside(path))
    if not FileUse(fd).wait_for_others():
        problem = (
            "The process that served this tier's file has ended, but its clients still use the file"
        )
        hint = "Try again, or check which processes have the file open"
        raise AtlasError(Code.TWICE, problem, got=path, hint=hint)


def unlock_file(fd: int) -> None:
    """Release the ownership of a file, even if a forked process still has it open."""
    fcntl.flock(fd, fcntl.LOCK_UN)


class FileUse:
    """A client's shared lock on the tier's file, used as a context manager.

    The lock is held while at least one thread of this process is inside the context.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._users = fd, 0
        self._guard = threading.Lock()

    def __enter__(self) -> None:
        with self._guard:
            if not self._users and not _set(self._fd, fcntl.F_RDLCK):
                problem = "Another process is taking over the tier's file"
                got, hint = "a call to the file's previous owner", "Repeat the call"
                raise AtlasError(Code.PEER_LOST, problem, got=got, hint=hint)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._users -= 1
            if not self._users:
                _set(self._fd, fcntl.F_UNLCK)

    def wait_for_others(self) -> bool:
        """Wait a few seconds for other processes to release the lock. Return whether they did."""
        until = time.monotonic() + _WAIT_SECONDS
        while not _set(self._fd, fcntl.F_WRLCK):
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_SECONDS)
        _set(self._fd, fcntl.F_UNLCK)
        return True


def _set(fd: int, kind: int) -> bool:
    """Set a lock of the given kind on an open file. Return whether it was acquired."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, 0, 0, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True
