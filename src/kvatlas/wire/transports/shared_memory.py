"""Shared memory segments, which cannot shrink and are freed when no process uses them.

A segment is a sealed memfd, which is an anonymous file. All of its pages are allocated when it is
created. Its size can never change, whichever process has its descriptor. So no peer can make an
access to the segment fail, and nothing needs to be cleaned up if the owner is killed. Peers receive
the descriptors through a socket (`shm_sockets`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

from kvatlas.copying.memory import Memory
from kvatlas.errors import AtlasError, Code
from kvatlas.wire.fork_safety import fresh_in_children
from kvatlas.wire.transports.errors import bad_metadata, own_limit

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_HOST = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup/memory.max")

_mine: WeakSet[Segment] = WeakSet()
"""The segments of this process that are in use."""
_guard = fresh_in_children(threading.Lock())


def make_sealed(nbytes: int) -> int:
    """Return the descriptor of `nbytes` of zeroed shared memory. The caller closes it."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        problem = "The size of a shared memory segment must be an integer of at least 1 byte"
        hint = "Pass the size in bytes, such as that of a pool"
        raise AtlasError(Code.BAD_SIZE, problem, got=f"nbytes={nbytes!r}", hint=hint)
    descriptor = -1
    try:
        if nbytes > _most_bytes():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        descriptor = os.memfd_create("kvatlas", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Allocate every page now: if memory runs out, this call fails, and no process is killed
        # later when it touches a page.
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError as fault:
        if descriptor >= 0:
            os.close(descriptor)
        raise _no_segment(nbytes, fault) from fault
    return descriptor


def _no_segment(nbytes: int, fault: OSError) -> AtlasError:
    """Return the error for a segment that cannot be allocated."""
    limit = own_limit(fault)
    if limit is not None and limit.code is Code.TOO_MANY_FILES:
        return limit
    code = Code.WIRE_FAILED if limit is None else limit.code
    hint = "Plan for less memory, free host memory, or raise the container's limit"
    problem, got = "The shared memory cannot be allocated", f"{nbytes:,} bytes: {fault}"
    return AtlasError(code, problem, got=got, hint=hint)


def _most_bytes() -> int:
    """Return the maximum size of a segment in bytes. Above it, the kernel might kill processes."""
    host = dict(line.split(":") for line in _HOST.read_text().splitlines())
    free = sum(int(host[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    limit = _CONTAINER.read_text().strip() if _CONTAINER.exists() else "max"
    return min(free, int(limit)) if limit.isdigit() else free


def map_sealed(descriptor: int) -> mmap.mmap:
    """Return a mapping of a whole segment, writable if the peer allows it.

    Raise `bad_handshake` if the segment is not sealed.
    """
    with _mapping(descriptor):
        access = mmap.PROT_READ
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            access |= mmap.PROT_WRITE
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=access)


def watch_sealed(descriptor: int, nbytes: int) -> mmap.mmap:
    """Return a read-only mapping of a peer's segment of `nbytes`, with its pages faulted in."""
    with _mapping(descriptor):
        if os.fstat(descriptor).st_size != nbytes:  # a sealed size is final
            size = os.fstat(descriptor).st_size
            raise bad_metadata(f"shared memory of {size:,} bytes, expected {nbytes:,}")
        return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)


@contextmanager
def _mapping(descriptor: int) -> Iterator[None]:
    """A context in which to map a descriptor. Raises `bad_handshake` if its file is not sealed."""
    try:
        # Only memfds have seals, so this call raises OSError for all other kinds of files.
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise bad_metadata("shared memory that is not sealed, which the peer could shrink")
        yield
    except AtlasError:
        raise
    except (OSError, ValueError) as problem:
        raise own_limit(problem) or bad_metadata(
            f"a descriptor that cannot be mapped: {problem}"
        ) from problem


class Segment(mmap.mmap):
    """Shared memory as a writable buffer, for `kvatlas.cache.bind` and for registration.

    Made by `create_segment`. Its memory is freed once two conditions are met: the segment is closed
    or garbage collected, and no transport or peer uses it any longer.
    """

    address: int
    nbytes: int
    descriptor: int = -1

    @property
    def memory(self) -> Memory:
        """The region to register. It keeps the segment alive."""
        return Memory(self.address, self.nbytes, owner=self)

    def close(self) -> None:
        """Release the segment. Views of its bytes stay valid."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        with suppress(BufferError):
            super().close()

    def wipe(self) -> None:
        """Free the pages, also for peers that have them mapped. The segment then reads as zeros."""
        self.madvise(mmap.MADV_REMOVE)

    def __del__(self) -> None:
        self.close()


def create_segment(nbytes: int) -> Segment:
    r"""Allocate zeroed shared memory that peers on the same host can map.

    >>> pool = create_segment(1 << 20)
    >>> len(pool), pool[:2]
    (1048576, b'\x00\x00')
    >>> pool.close()
    """
    descriptor = make_sealed(nbytes)
    try:
        segment = Segment(descriptor, nbytes)
    except OSError as fault:
        os.close(descriptor)
        raise _no_segment(nbytes, fault) from fault
    segment.address = ctypes.addressof(ctypes.c_uint8.from_buffer(segment))
    segment.nbytes, segment.descriptor = nbytes, descriptor
    with _guard:
        _mine.add(segment)
    return segment


def containing(memory: Memory) -> tuple[Segment, int] | None:
    """Return (open segment that contains a region, region's offset in it), or None."""
    with _guard:
        segments = list(_mine)
    for segment in segments:
        start = memory.address - segment.address
        if segment.descriptor >= 0 and 0 <= start <= segment.nbytes - memory.nbytes:
            return segment, start
    return None
