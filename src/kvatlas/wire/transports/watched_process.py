"""A process of this host, and whether it has begun to end.

Looked at when a copy is over and somebody waits: so no other thread is let run meanwhile, from
which the interpreter comes back a tenth of a millisecond later.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

_FLAGS, _STARTED = 6, 19
"""Columns of a process's `stat`, counted behind its name."""
_NO_SIZE = b"0 "
"""How the `statm` of a process begins that has begun to end."""
_STATM_BYTES = 64

_ABSOLUTE = -100
"""Stands for no folder."""
_AS_KNOWN = 0x4000
"""Asks no server of a file system: the process that is looked at chose the file."""
_FILE_NUMBER = 0x100
"""Asks which file it is of its device."""
_STATX_BYTES = 256
_NUMBER, _DEVICE = slice(32, 40), slice(136, 144)
"""Where the kernel's `statx` says which file it is, and of which device."""


def _calls() -> Any:
    """The C library, for calls that wait for nobody: whoever makes them keeps the interpreter."""
    library = ctypes.PyDLL(None)
    size, number = ctypes.c_size_t, ctypes.c_int
    try:
        library.pread.argtypes = [number, ctypes.c_char_p, size, ctypes.c_int64]
        library.pread.restype = ctypes.c_ssize_t
        library.statx.argtypes = [number, ctypes.c_char_p, number, ctypes.c_uint, ctypes.c_char_p]
    except AttributeError as problem:  # an old library: nothing is looked at
        raise OSError(str(problem)) from problem
    return library


class WatchedProcess:
    """A process, and whether it has begun to end; another of the same number is another.

    >>> WatchedProcess(os.getpid()).alive
    True
    """

    _statm = -1

    def __init__(self, number: int, holds: Path | None = None) -> None:
        """`holds` is a file among those that it has open, as `/proc` shows them."""
        self._lock = threading.Lock()
        """Held while the descriptor is used: closed meanwhile, its number may be another's."""
        self._calls = _calls()
        self._said = ctypes.create_string_buffer(_STATX_BYTES)
        how = os.O_RDONLY | os.O_CLOEXEC
        folder = os.open(f"/proc/{number}", how | os.O_DIRECTORY)  # both files are of one process
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
        """When it was started; 0 where the kernel does not say."""
        # Every process has some flag: a kernel that tells none may tell no end either.
        self._is_told = len(columns) > _FLAGS and int(columns[_FLAGS]) != 0
        self._holds = None if holds is None else os.fsencode(holds)
        self._file = self._held_file()
        if self._holds is not None and self._file is None:
            self._is_told = False

    @property
    def alive(self) -> bool:
        """Whether it has not begun to end, where the kernel says so, and holds the file it held."""
        if not self._is_told:
            return False
        with self._lock:
            said = self._said
            read = self._calls.pread(self._statm, said, _STATM_BYTES, 0)
            if read <= 0 or said.raw.startswith(_NO_SIZE):
                return False
            return self._holds is None or self._held_file() == self._file

    def _held_file(self) -> bytes | None:
        """Which file it is that the process holds; None where there is none."""
        if self._holds is None:
            return None
        said = self._said
        if self._calls.statx(_ABSOLUTE, self._holds, _AS_KNOWN, _FILE_NUMBER, said):
            return None
        told = said.raw
        return told[_NUMBER] + told[_DEVICE]

    def close(self) -> None:
        """Look no more; a second call does nothing."""
        with self._lock:
            descriptor, self._statm = self._statm, -1
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self) -> None:
        self.close()
