"""Shared memory that nobody can take away, and that goes with the last process that has it.

A segment is a sealed memfd: a file without a name, whose pages all exist from the start
and whose size can never change again, whoever has its descriptor. So no peer can make
reading or writing it fail, and a killed owner leaves nothing behind. Descriptors reach
peers through a socket (`shm_sockets`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.transports.base import Memory
from kvatlas.wire.transports.errors import bad_metadata, no_room

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_HOST = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup/memory.max")

_mine: WeakSet[Segment] = WeakSet()
"""The segments that this process has created and that are in use."""
_guard = threading.Lock()


class Segment(mmap.mmap):
    """Shared memory as a writable buffer, for `kvatlas.cache.bind` and for registration.

    Made by `create_segment`. Its bytes are freed once it is closed or collected, and no
    transport or peer has it any more.
    """

    address: int
    nbytes: int
    descriptor: int = -1

    @property
    def memory(self) -> Memory:
        """What to register; it keeps the segment alive."""
        return Memory(self.address, self.nbytes, owner=self)

    def close(self) -> None:
        """Let go of it; views of its bytes stay valid."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        with suppress(BufferError):
            super().close()

    def __del__(self) -> None:
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
    descriptor = -1
    try:
        if nbytes > _most_bytes():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        descriptor = os.memfd_create("kvatlas", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Every page exists before anyone writes: a host that runs out of memory says so
        # here, and not by killing whoever touches a page too many.
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        segment = Segment(descriptor, nbytes)
    except OSError as fault:
        if descriptor >= 0:
            os.close(descriptor)
        hint = "Plan for less, make room on the host, or raise the container's limit"
        raise no_room("The host cannot hold the segment", nbytes, fault, hint) from fault
    segment.address = ctypes.addressof(ctypes.c_uint8.from_buffer(segment))
    segment.nbytes, segment.descriptor = nbytes, descriptor
    with _guard:
        _mine.add(segment)
    return segment


def _most_bytes() -> int:
    """More than this cannot be had; the system would find out by killing processes."""
    host = dict(line.split(":") for line in _HOST.read_text().splitlines())
    free = sum(int(host[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    limit = _CONTAINER.read_text().strip() if _CONTAINER.exists() else "max"
    return min(free, int(limit)) if limit.isdigit() else free


def containing(memory: Memory) -> tuple[Segment, int] | None:
    """The open segment of this process that holds a region, and where it starts there."""
    with _guard:
        segments = list(_mine)
    for segment in segments:
        start = memory.address - segment.address
        if segment.descriptor >= 0 and 0 <= start <= segment.nbytes - memory.nbytes:
            return segment, start
    return None


def map_segment(descriptor: int) -> mmap.mmap:
    """A peer's segment, mapped whole; what is not sealed is refused."""
    try:
        # Only a memfd has seals, so this refuses all other kinds of files as well.
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS:
            return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    except (OSError, ValueError) as problem:
        raise bad_metadata(f"a descriptor that cannot be mapped: {problem}") from problem
    raise bad_metadata("shared memory that the peer could take away: it is not sealed")
