"""Between memory and a file: the disk tier.

A file has pools as a process has, at offsets instead of addresses. The system's
scattering reads and gathering writes take a stretch of the file and a thousand pieces of
memory in one call, so runs are handed over in the order of the file. A disk that fails
or fills is then an error that can be reported, which a mapped file would turn into the
end of the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.arrays import Int64s
from kvatlas.route import Copy
from kvatlas.wire.copying import STEP, Stepwise
from kvatlas.wire.faults import (
    bad_metadata,
    check_note,
    closed,
    failed,
    peer_lost,
    read_metadata,
    write_metadata,
)
from kvatlas.wire.transport import Handle, Link, Memory, Transport, addresses

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_MOST_PIECES = 1024
"""What the system takes in one call."""

_system = ctypes.CDLL(None, use_errno=True)
for _call in (_system.preadv, _system.pwritev):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    _call.restype = ctypes.c_ssize_t


class _Published(msgspec.Struct, tag="file", forbid_unknown_fields=True):
    name: str
    inode: int


class FileTransport(Transport):
    r"""Moves bytes between pools in memory and pools in a file.

    The end with a `name` is a file in `folder`: its regions are offsets, and registering
    them makes the file as large as they need. The other end has its regions in memory
    and connects to files in the same folder, never to any other. With `sync`, a write is
    done only when the disk has it.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> disk, host = FileTransport(folder.name, "tier"), FileTransport(folder.name)
    >>> disk.register({0: Memory(0, 4096)})
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

    def __init__(self, folder: str | Path, name: str | None = None, *, sync: bool = False) -> None:
        super().__init__()
        if name is not None and not _NAME.fullmatch(name):
            raise failed(f"a file named {name!r}", hint="Use letters, digits, '.', '_' and '-'")
        self._file, self._sync = name, sync
        self._own = -1
        try:
            self._folder = os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)
            if name is not None:
                self._own = open_in(self._folder, name, os.O_CREAT)
        except OSError as problem:
            raise failed(f"{folder}: {problem}", hint="Name a folder that can be used") from problem

    def _register(self, memory: Mapping[int, Memory]) -> None:
        if self._folder < 0:
            raise closed("transport")
        if self._own < 0:
            return
        stop = max((region.address + region.nbytes for region in memory.values()), default=0)
        try:
            if stop > os.fstat(self._own).st_size:
                # Room now, so that no write finds the disk full.
                os.posix_fallocate(self._own, 0, stop)
        except OSError as problem:
            raise AtlasError(
                Code.NOT_ENOUGH_MEMORY
                if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                else Code.WIRE_FAILED,
                "The disk can hold the pools of a file",
                got=f"{stop:,} bytes: {problem}",
                hint="Make room, or plan for less",
            ) from problem

    def publish(self) -> bytes:
        """The file's name in its folder, and which file it is."""
        if self._own < 0 or self._file is None:
            return write_metadata(_Published("", 0))
        return write_metadata(_Published(self._file, os.fstat(self._own).st_ino))

    def connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to a file of the same folder."""
        published = read_metadata(metadata, _Published)
        if self._folder < 0:
            raise closed("transport")
        if not _NAME.fullmatch(published.name):
            raise bad_metadata(f"a file named {published.name[:64]!r}")
        try:
            found = open_in(self._folder, published.name, 0)
        except FileNotFoundError as problem:
            raise peer_lost(f"no file {published.name}") from problem
        except OSError as problem:
            raise bad_metadata(f"{problem}") from problem
        state = os.fstat(found)
        stop = max((region.address + region.nbytes for region in memory.values()), default=0)
        starts = [region.address for region in memory.values()]
        if state.st_ino != published.inode or min(starts, default=0) < 0 or stop > state.st_size:
            os.close(found)
            raise bad_metadata(f"another file, or one of less than {stop:,} bytes")
        return _FileLink(self, found, memory, sync=self._sync)

    @property
    def open(self) -> bool:
        """Whether it has not been closed."""
        return self._folder >= 0

    def close(self) -> None:
        """The file stays; a link keeps it open until it is closed itself."""
        for descriptor in (self._own, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._own = self._folder = -1
        super().close()


def open_in(folder: int, name: str, flags: int) -> int:
    """A plain file of a folder; never a link out of it, nor a device."""
    found = os.open(
        name,
        os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags,
        0o600,
        dir_fd=folder,
    )
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, f"{name} is not a plain file")
    return found


class _FileLink(Link):
    def __init__(
        self, owner: FileTransport, file: int, theirs: Mapping[int, Memory], *, sync: bool
    ) -> None:
        super().__init__(owner.memory, theirs)
        self._owner, self._open_file, self._sync = owner, file, sync

    def _read(self, copies: Sequence[Copy], note: bytes) -> Handle:
        return self._start(copies, note, _system.preadv, writes=False)

    def _write(self, copies: Sequence[Copy], note: bytes) -> Handle:
        return self._start(copies, note, _system.pwritev, writes=True)

    def _start(
        self, copies: Sequence[Copy], note: bytes, act: Callable[..., int], *, writes: bool
    ) -> Handle:
        check_note(note)
        self._check()
        if not copies:
            return Stepwise(iter(()))
        offsets = addresses(copies, self.mine if not writes else self.theirs, src=False)
        others = addresses(copies, self.theirs if not writes else self.mine, src=True)
        near, far = (others, offsets) if writes else (offsets, others)
        length = np.concatenate([copy.length for copy in copies])
        return Stepwise(self._steps(act, near, far, length, sync=writes and self._sync))

    def _steps(
        self, act: Callable[..., int], near: Int64s, far: Int64s, length: Int64s, *, sync: bool
    ) -> Iterator[bool]:
        done = 0
        for pieces, offset in stretches(near, far, length):
            for part, start in _bounded(pieces, offset):
                done += _carry_out(act, self._open_file, part, start)
                if done >= STEP:
                    yield True
                    self._check()
                    done = 0
        if sync:
            self._check()
            try:
                os.fdatasync(self._open_file)
            except OSError as problem:
                raise failed(f"{problem}") from problem

    def _check(self) -> None:
        if self._open_file < 0 or not self._owner.open:
            raise closed("link")
        if os.fstat(self._open_file).st_nlink == 0:
            raise peer_lost("a file that was removed")

    def close(self) -> None:
        """Close the file."""
        if self._open_file >= 0:
            os.close(self._open_file)
            self._open_file = -1


Pieces = NDArray[np.uint64]
"""Rows (address, length), as the system's vectored calls take them."""


def stretches(near: Int64s, far: Int64s, length: Int64s) -> Iterator[tuple[Pieces, int]]:
    """Pieces of memory that are neighbours in the file, and where they start there.

    >>> near, far, length = np.array([70, 50, 10]), np.array([4, 0, 90]), np.array([4, 4, 8])
    >>> [(pieces.tolist(), offset) for pieces, offset in stretches(near, far, length)]
    [([[50, 4], [70, 4]], 0), ([[10, 8]], 90)]
    """
    if len(far) > 1 and int(np.diff(far).min()) < 0:
        order = np.argsort(far, kind="stable")
        near, far, length = near[order], far[order], length[order]
    pieces = np.stack([near, length], axis=1).astype(np.uint64)
    first = np.flatnonzero(np.concatenate(([True], far[1:] != far[:-1] + length[:-1])))
    stops = [*first[1:].tolist(), len(far)]
    for start, stop in zip(first.tolist(), stops, strict=True):
        for part in range(start, stop, _MOST_PIECES):
            yield pieces[part : min(part + _MOST_PIECES, stop)], int(far[part])


def _bounded(pieces: Pieces, offset: int) -> Iterator[tuple[Pieces, int]]:
    """The same pieces, no more than a step's bytes at once."""
    lengths = pieces[:, 1].astype(np.int64)
    if int(lengths.sum()) <= STEP:
        yield pieces, offset
        return
    for (address, _), size in zip(pieces.tolist(), lengths.tolist(), strict=True):
        for start in range(0, size, STEP):
            part = [[address + start, min(STEP, size - start)]]
            yield np.array(part, dtype=np.uint64), offset + start
        offset += size


def _carry_out(act: Callable[..., int], file: int, pieces: Pieces, offset: int) -> int:
    """All of some pieces: a call may do less than it was asked, and is then repeated."""
    pieces, first = np.ascontiguousarray(pieces), offset
    while len(pieces):
        done = act(file, pieces.ctypes.data, len(pieces), offset)
        if done < 0:
            problem = ctypes.get_errno()
            if problem == errno.EINTR:
                continue
            raise failed(os.strerror(problem), hint="Look at the disk and its file system")
        if done == 0:
            raise failed(f"a file that ends at byte {offset}", hint="Make the file again")
        offset += done
        pieces = _after(pieces, done)
    return offset - first


def _after(pieces: Pieces, done: int) -> Pieces:
    ends = np.cumsum(pieces[:, 1].astype(np.int64))
    whole = int(np.searchsorted(ends, done, side="right"))
    rest = pieces[whole:].copy()
    if len(rest):
        into = np.uint64(done - (int(ends[whole - 1]) if whole else 0))
        rest[0, 0] += into
        rest[0, 1] -= into
    return rest
