"""Whose a tier's file is: one process owns it, and those that it serves use it meanwhile.

The owner holds a lock of the file; it goes with the process, however that ends. Who uses the
file through it holds a second lock, shared, while bytes move: they may still do so when the
owner has gone. So the next owner first removes the socket by which the last one was found,
and then waits for that lock. Who takes the lock looks for the socket afterwards, and moves
nothing where it is not the same: either the next owner waits, or the user sees that it is there.
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
"""Seconds that the next owner waits for those who use the file through the last one."""
_PAUSE_SECONDS = 0.01
_LOCK = struct.Struct("@hhqqi")
"""Kind, whence, first byte, bytes, process (0): a lock of the system, as it takes it."""


def socket_beside(path: Path) -> Path:
    """Where the owner of a tier's file is found by other processes."""
    real = path.resolve()  # by whichever name a file is opened, its owner is found
    return real.with_name(f"{real.name}.sock")


def lock_file(fd: int, path: Path) -> None:
    """Become the owner of a file; refused where another process is, or its users go on."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        problem, hint = "The tier's file is open elsewhere", "Close it there, or use another path"
        raise AtlasError(Code.TWICE, problem, got=path, hint=hint) from None
    forget_path(socket_beside(path))
    if not FileUse(fd).wait_for_others():
        problem = "The tier's file is still being used through a process that has gone"
        hint = "Try again, or see which processes have the file open"
        raise AtlasError(Code.TWICE, problem, got=path, hint=hint)


def unlock_file(fd: int) -> None:
    """Let the next owner have a file, also where a forked process still has it open."""
    fcntl.flock(fd, fcntl.LOCK_UN)


class FileUse:
    """The shared lock of a file, held while anybody of this process is inside."""

    def __init__(self, fd: int) -> None:
        self._fd, self._users = fd, 0
        self._guard = threading.Lock()

    def __enter__(self) -> None:
        with self._guard:
            if not self._users and not _set(self._fd, fcntl.F_RDLCK):
                problem = "The tier's file is about to have another owner"
                raise AtlasError(Code.PEER_LOST, problem, got="a call", hint="Ask again")
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._users -= 1
            if not self._users:
                _set(self._fd, fcntl.F_UNLCK)

    def wait_for_others(self) -> bool:
        """Whether no other process is inside any more, within a few seconds."""
        until = time.monotonic() + _WAIT_SECONDS
        while not _set(self._fd, fcntl.F_WRLCK):
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_SECONDS)
        _set(self._fd, fcntl.F_UNLCK)
        return True


def _set(fd: int, kind: int) -> bool:
    """Set a lock of this open file, which no other opening of it shares; whether it could be."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, 0, 0, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True
