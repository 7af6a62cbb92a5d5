"""Transfers between memory and a file, for the disk tier.

A file has pools like a process, at offsets instead of addresses. Vectored reads and writes move a
contiguous range of the file from or to a thousand memory ranges in one call, so runs are passed in
file order. A disk error or a full disk then raises an error; with a mapped file it would kill the
process.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from kvatlas.copying.file_runs import copy_file_runs
from kvatlas.copying.memory import Memory
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.access import Guarantees
from kvatlas.wire.transports.base import Handle, Link, Transport
from kvatlas.wire.transports.polled_copy import Stepwise

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class _Published(msgspec.Struct, tag="file", forbid_unknown_fields=True):
    name: str
    inode: int


class FileTransport(Transport):
    r"""Moves bytes between pools in memory and pools in a file.

    The end with a `name` is a file in `folder`. Its regions are offsets, and registering them makes
    the file large enough. The other end has its regions in memory and connects only to files in the
    same folder. With `sync`, a write is done only when the data is on disk.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> disk, host = FileTransport(folder.name, "tier"), FileTransport(folder.name)
    >>> disk.register({0: Memory(0, 4096)})
    >>> import numpy as np
    >>> pool = np.arange(16, dtype=np.uint8)
    >>> host.register({0: Memory(pool.ctypes.data, 16)})
    >>> link = host.connect(disk.publish(), disk.memory)
    >>> runs = Copy(0, 0, np.array([4]), np.array([1000]), np.array([3]))
    >>> link.write([runs]).wait(float("inf"))
    >>> (Path(folder.name) / "tier").read_bytes()[999:1004]
    b'\x00\x04\x05\x06\x00'
    >>> link.close(), host.close(), disk.close(), folder.cleanup()
    (None, None, None, None)
    """

    name: ClassVar[str] = "file"
    guarantees = Guarantees(confidentiality=True, integrity=True)

    def __init__(self, folder: str | Path, name: str | None = None, *, sync: bool = False) -> None:
        super().__init__()
        if name is not None and not _NAME.fullmatch(name):
            hint = "Use letters, digits, '.', '_' and '-'"
            raise errors.failed(f"name={name!r}", hint, "The file name is invalid")
        self._file, self._sync = name, sync
        self._own = -1
        try:
            self._folder = os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)
            if name is not None:
                self._own = open_in(self._folder, name, os.O_CREAT)
        except OSError as problem:
            got, hint = f"{folder}: {problem}", "Pass an existing folder with write access"
            failure = errors.failed(got, hint, "The folder or its file cannot be opened")
            raise errors.own_limit(problem) or failure from problem

    def _register(self, memory: Mapping[int, Memory]) -> None:
        if self._own < 0:
            return
        stop = max((region.address + region.nbytes for region in memory.values()), default=0)
        try:
            if stop > os.fstat(self._own).st_size:
                # Room now, so that no write finds the disk full.
                os.posix_fallocate(self._own, 0, stop)
        except OSError as problem:
            what, hint = (
                "The pools do not fit on the disk",
                "Free disk space, or plan for less memory",
            )
            raise errors.no_room(what, stop, problem, hint) from problem

    def publish(self) -> bytes:
        """Return the file's name in its folder, and its identity."""
        inode = 0 if self._own < 0 else os.fstat(self._own).st_ino
        return errors.write_metadata(_Published(self._file or "", inode))

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to a file of the same folder."""
        published = errors.read_metadata(metadata, _Published)
        if not _NAME.fullmatch(published.name):
            raise errors.bad_metadata(f"a file named {published.name[:64]!r}")
        try:
            descriptor = open_in(self._folder, published.name, 0)
        except FileNotFoundError as problem:
            raise errors.peer_lost(f"no file {published.name}") from problem
        except OSError as problem:
            raise errors.own_limit(problem) or errors.bad_metadata(f"{problem}") from problem
        state = os.fstat(descriptor)
        stop = max((region.address + region.nbytes for region in memory.values()), default=0)
        starts = [region.address for region in memory.values()]
        if state.st_ino != published.inode or min(starts, default=0) < 0 or stop > state.st_size:
            os.close(descriptor)
            raise errors.bad_metadata(f"a replaced file, or one with fewer than {stop:,} bytes")
        return _FileLink(self, descriptor, memory, sync=self._sync)

    def _close(self) -> None:
        """The file stays; a link keeps it open until it is closed itself."""
        os.close(self._folder)
        if self._own >= 0:
            os.close(self._own)
            self._own = -1


def open_in(folder: int, name: str, flags: int) -> int:
    """Open a regular file in a folder. Symbolic links and devices raise an error."""
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{name} is not a regular file")
    return descriptor


class _FileLink(Link):
    prompt: ClassVar[bool] = True

    def __init__(
        self, owner: FileTransport, file: int, theirs: Mapping[int, Memory], *, sync: bool
    ) -> None:
        super().__init__(owner, theirs)
        self._open_file, self._sync = file, sync

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        return Stepwise(self._steps(copies, write=write))

    def _steps(self, copies: Sequence[Copy], *, write: bool) -> Iterator[None]:
        runs = self._addresses(copies, write=write)
        self.check()
        try:
            for _ in copy_file_runs(lambda: self._open_file, *runs, write=write):
                yield
                self.check()
            if write and self._sync:
                yield
                self.check()
                os.fdatasync(self._open_file)
        except OSError as problem:
            hint = "Check the disk and its file system, or create the file again"
            failure = errors.failed(problem.strerror, hint)
            raise errors.own_limit(problem) or failure from problem

    def check(self) -> None:
        """Raise an error if the link is closed or the file was removed."""
        super().check()
        if os.fstat(self._open_file).st_nlink == 0:
            raise errors.peer_lost("a file that was removed")

    def _close(self) -> None:
        # A step that is still under way must not write to whatever gets the number next.
        descriptor, self._open_file = self._open_file, -1
        os.close(descriptor)
