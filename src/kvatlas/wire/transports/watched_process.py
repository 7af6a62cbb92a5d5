"""Watch a process on this host, and detect that it has begun to exit.

The check runs right after a copy, while a thread waits for the result. It therefore keeps the
interpreter lock: acquiring the lock again can take 0.1 ms if other threads run.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

_FLAGS, _STARTED = 6, 19
"""Columns of `/proc/PID/stat`. Column 0 is the column after the process's name."""
_NO_SIZE = b"0 "
"""The start of `/proc/PID/statm` once the process has begun to exit."""
_STATM_BYTES = 64

_ABSOLUTE = -100
"""`AT_FDCWD`: the path is not relative to a directory descriptor."""
_AS_KNOWN = 0x4000
"""`AT_STATX_DONT_SYNC`: do not wait for a file server. The watched process chose the file."""
_FILE_NUMBER = 0x100
"""`STATX_INO`: request the file's inode."""
_STATX_BYTES = 256
_NUMBER, _DEVICE = slice(32, 40), slice(136, 144)
"""The offsets of the inode and the device in the kernel's `statx`."""


def _calls() -> Any:
    """Return the C library for calls that do not block and keep the interpreter lock."""
    library = ctypes.PyDLL(None)
    size, number = ctypes.c_size_t, ctypes.c_int
    try:
        library.pread.argtypes = [number, ctypes.c_char_p, size, ctypes.c_int64]
        library.pread.restype = ctypes.c_ssize_t
        library.statx.argtypes = [number, ctypes.c_char_p, number, ctypes.c_uint, ctypes.c_char_p]
    except AttributeError as problem:  # an old C library without statx
        raise OSError(str(problem)) from problem
    return library


class WatchedProcess:
    """A process that is watched for its exit. A later process with the same pid does not count.

    >>> WatchedProcess(os.getpid()).alive
    True
    """

    _statm = -1

    def __init__(self, number: int, holds: Path | None = None) -> None:
        """Watch the process with pid `number`.

        `holds` is a path in `/proc` of a file that the process keeps open, if there is one.
        """
        self._lock = threading.Lock()
        """Held while the descriptor is used, because a closed descriptor's number may be reused."""
        self._calls = _calls()
        self._said = ctypes.create_string_buffer(_STATX_BYTES)
        how = os.O_RDONLY | os.O_CLOEXEC
        # One directory descriptor, so that both files belong to one process.
        folder = os.open(f"/proc/{number}", how | os.O_DIRECTORY)
        try:
            self._statm = os.open("statm", how, dir_fd=folder)
            stat = os.open("stat", how, dir_fd=folder)
            try:
                columns = os.pread(stat, 1024, 0).rpartition(b")")[2].split()
            finally:
                os.close(stat)
        finally:
            os.close(folder)
        self.started = int(columns[_STARTED]) if len(columns) > _STARTED else 0
        """The process's start time; 0 if the kernel does not report it."""
        # Every process has flags. A kernel that hides them may not report the exit either.
        self._is_told = len(columns) > _FLAGS and int(columns[_FLAGS]) != 0
        self._holds = None if holds is None else os.fsencode(holds)
        self._file = self._held_file()
        if self._holds is not None and self._file is None:
            self._is_told = False

    @property
    def alive(self) -> bool:
        """Whether the process has certainly not begun to exit, and still has the file open."""
        if not self._is_told:
            return False
        with self._lock:
            said = self._said
            read = self._calls.pread(self._statm, said, _STATM_BYTES, 0)
            if read <= 0 or said.raw.startswith(_NO_SIZE):
                return False
            return self._holds is None or self._held_file() == self._file

    def _held_file(self) -> bytes | None:
        """Return the inode and device of the watched file; None if the process has no such file."""
        if self._holds is None:
            return None
        said = self._said
        if self._calls.statx(_ABSOLUTE, self._holds, _AS_KNOWN, _FILE_NUMBER, said):
            return None
        told = said.raw
        return told[_NUMBER] + told[_DEVICE]

    def close(self) -> None:
        """Stop watching. A second call has no effect."""
        with self._lock:
            descriptor, self._statm = self._statm, -1
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self) -> None:
        self.close()
