"""Transfers between memory and a file, for the disk tier.

A file has pools like a process, at offsets instead of addresses. One vectored read or write moves a
contiguous range of the file to or from up to 1,024 memory ranges, so runs should be in file order.
A disk error or a full disk raises an error; with a mapped file it would kill the process.
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
from kvatlas.errors import AtlasError
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

    A transport with a `name` stands for that file in `folder`. Its regions are offsets in the file,
    and registering them extends the file. A transport without a name has its regions in memory,
    and connects only to files in the same folder. With `sync`, a write is done only when the data
    is on disk.

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
            hint = "Use up to 200 letters, digits, '.', '_' and '-', and no '.' at the start"
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
                # Allocate disk space now, so that no later write fails on a full disk.
                os.posix_fallocate(self._own, 0, stop)
        except OSError as problem:
            what, hint = (
                "The file cannot be extended to the size of the pools",
                "Free disk space, or plan for less memory",
            )
            raise errors.no_room(what, stop, problem, hint) from problem

    def publish(self) -> bytes:
        """Return the file's name in its folder, and its inode."""
        inode = 0 if self._own < 0 else os.fstat(self._own).st_ino
        return errors.write_metadata(_Published(self._file or "", inode))

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """Return a link to a file in the same folder."""
        published = errors.read_metadata(metadata, _Published)
        if not _NAME.fullmatch(published.name):
            raise errors.bad_metadata(f"an invalid file name, {published.name[:64]!r}")
        try:
            descriptor = open_in(self._folder, published.name, 0)
        except FileNotFoundError as problem:
            hint = "Use the same folder at both ends, and connect before the file is removed"
            what = "The file is not in this transport's folder"
            raise errors.peer_lost(repr(published.name), hint, what) from problem
        except OSError as problem:
            hint = "Check the permissions of the file, and that it is a regular file"
            unopened = errors.bad_metadata(str(problem), hint, "The file cannot be opened")
            raise errors.own_limit(problem) or unopened from problem
        state = os.fstat(descriptor)
        stop = max((region.address + region.nbytes for region in memory.values()), default=0)
        starts = [region.address for region in memory.values()]
        failure: AtlasError | None = None
        if state.st_ino != published.inode:
            hint = "Call publish() again, and pass the new result"
            what = "The file was replaced after it was published"
            got = f"inode {state.st_ino}, expected {published.inode}"
            failure = errors.bad_metadata(got, hint, what)
        elif min(starts, default=0) < 0 or stop > state.st_size:
            hint = "Pass the regions that the file's transport has registered"
            got = f"offsets {min(starts):,}..{stop - 1:,} in a file of {state.st_size:,} bytes"
            failure = errors.bad_metadata(got, hint, "A region is outside the file")
        if failure is not None:
            os.close(descriptor)
            raise failure
        return _FileLink(self, descriptor, memory, sync=self._sync)

    def _close(self) -> None:
        """Close the file without removing it. Links keep it open until they are closed."""
        os.close(self._folder)
        if self._own >= 0:
            os.close(self._own)
            self._own = -1


def open_in(folder: int, name: str, flags: int) -> int:
    """Return a descriptor of a regular file in a folder. Raise `OSError` for links and devices."""
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
            failure = errors.failed(problem.strerror, hint, "Reading or writing the file failed")
            raise errors.own_limit(problem) or failure from problem

    def check(self) -> None:
        """Raise an error if the link is closed or the file was removed."""
        super().check()
        if os.fstat(self._open_file).st_nlink == 0:
            hint = "Close this link, and create the file again"
            raise errors.peer_lost("a file without a directory entry", hint, "The file was removed")

    def _close(self) -> None:
        # Forget the descriptor first: a step in another thread must not use a reused number.
        descriptor, self._open_file = self._open_file, -1
        os.close(descriptor)
