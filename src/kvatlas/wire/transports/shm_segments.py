"""Shared memory that goes away with its owner.

A segment is a file in the host's shared memory, locked by the process that made it. It
gets its name only once it is locked and as large as it will be, so a name without a
lock is what a killed owner left behind: whoever next makes or maps a segment removes
it. Linux gives the lock back whatever way a process ends.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.transports.base import Memory
from kvatlas.wire.transports.errors import no_room

FOLDER = Path("/dev/shm")  # noqa: S108
_NAME = re.compile(r"kvatlas-[0-9a-f]{32}")
_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_mine: WeakSet[Segment] = WeakSet()
"""The segments that this process has created and not closed."""


class Segment(mmap.mmap):
    """Shared memory as a writable buffer, for `kvatlas.cache.bind` and for registration.

    Made by `create_segment`. It is removed when it is closed, collected, or its process ends.
    """

    name: str
    nbytes: int
    owner: int
    descriptor: int

    @property
    def memory(self) -> Memory:
        """What to register."""
        start = ctypes.c_uint8.from_buffer(self)
        return Memory(ctypes.addressof(start), self.nbytes)

    def close(self) -> None:
        """Remove its name now, and its bytes once no view of them is left."""
        if self.descriptor >= 0:
            if self.owner == os.getpid():
                (FOLDER / self.name).unlink(missing_ok=True)
            os.close(self.descriptor)
            self.descriptor = -1
        _mine.discard(self)
        with suppress(BufferError):
            super().close()

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            self.close()


def create_segment(nbytes: int) -> Segment:
    r"""Shared memory of this process, zeroed, that peers on the same host can map.

    >>> pool = create_segment(1 << 20)
    >>> len(pool), pool[:2]
    (1048576, b'\x00\x00')
    >>> pool.close()
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        problem = "Shared memory needs at least one byte"
        raise AtlasError(Code.BAD_SIZE, problem, got=nbytes, hint="Ask for the bytes of a pool")
    sweep()
    descriptor = -1
    try:
        descriptor = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK)
        # Every page exists before anyone writes: a host that runs out of shared memory
        # says so here, and not by killing whoever touches a page too many.
        os.posix_fallocate(descriptor, 0, nbytes)
        name = f"kvatlas-{secrets.token_hex(16)}"
        # Only linkat follows the link to a file without a name, and only a folder's
        # descriptor makes os.link call it; for a full path it can be any.
        os.link(f"/proc/self/fd/{descriptor}", FOLDER / name, src_dir_fd=descriptor)
        segment = Segment(descriptor, nbytes)
    except OSError as fault:
        if descriptor >= 0:
            os.close(descriptor)
        hint = "Enlarge it (in a container: --shm-size), or use another transport"
        raise no_room(f"{FOLDER} cannot hold the segment", nbytes, fault, hint) from fault
    segment.name, segment.nbytes = name, nbytes
    segment.owner, segment.descriptor = os.getpid(), descriptor
    _mine.add(segment)
    return segment


def containing(memory: Memory) -> tuple[Segment, int] | None:
    """The segment of this process that holds a region, and where it starts there."""
    for segment in _mine:
        whole = segment.memory
        start = memory.address - whole.address
        if start >= 0 and start + memory.nbytes <= whole.nbytes:
            return segment, start
    return None


def open_segment(name: str) -> int | None:
    """A descriptor of a segment of this user; None where there is no such thing."""
    if not _NAME.fullmatch(name):
        return None
    try:
        descriptor = os.open(FOLDER / name, _FLAGS)
    except OSError:
        return None
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid():
        return descriptor
    os.close(descriptor)
    return None


def has_owner(descriptor: int) -> bool:
    """Whether the process that created a segment still has it."""
    kind: int = struct.unpack_from("h", fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _LOCK))[0]
    return kind != fcntl.F_UNLCK


def attach(name: str, start: int, nbytes: int) -> mmap.mmap | None:
    """A peer's segment, mapped; None where there is no such thing, or not of this size."""
    descriptor = open_segment(name)
    if descriptor is None:
        return None
    try:
        if start < 0 or nbytes < 1 or start + nbytes > os.fstat(descriptor).st_size:
            return None
        return mmap.mmap(descriptor, start + nbytes)
    finally:
        os.close(descriptor)


def sweep() -> int:
    """Remove the segments of processes that have ended; how many there were."""
    swept = 0
    for path in FOLDER.glob("kvatlas-*"):
        descriptor = open_segment(path.name)
        if descriptor is not None:
            if not has_owner(descriptor):
                path.unlink(missing_ok=True)
                swept += 1
            os.close(descriptor)
    return swept


def _remove_all() -> None:
    for segment in list(_mine):
        segment.close()


atexit.register(_remove_all)
