"""Anonymous shared memory whose size can no longer be changed (sealed memfds)."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.transports.errors import bad_metadata, no_room, own_limit

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_HOST = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def make_sealed(nbytes: int) -> int:
    """Return the descriptor of `nbytes` of zeroed shared memory. The caller closes it."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        problem = "A shared memory segment must have at least 1 byte"
        raise AtlasError(Code.BAD_SIZE, problem, got=nbytes, hint="Pass the size of a pool")
    descriptor = -1
    try:
        if nbytes > _most_bytes():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        descriptor = os.memfd_create("kvatlas", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Every page exists before anyone writes: a host that runs out of memory says so
        # here, and not by killing whoever touches a page too many.
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError as fault:
        if descriptor >= 0:
            os.close(descriptor)
        raise no_segment(nbytes, fault) from fault
    return descriptor


def no_segment(nbytes: int, fault: OSError) -> AtlasError:
    """The error for a segment that the host has no memory for."""
    hint = "Plan for less memory, free host memory, or raise the container's limit"
    return no_room("The segment does not fit into host memory", nbytes, fault, hint)


def _most_bytes() -> int:
    """More than this cannot be had; the system would find out by killing processes."""
    host = dict(line.split(":") for line in _HOST.read_text().splitlines())
    free = sum(int(host[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    limit = _CONTAINER.read_text().strip() if _CONTAINER.exists() else "max"
    return min(free, int(limit)) if limit.isdigit() else free


def map_sealed(descriptor: int) -> mmap.mmap:
    """Map a peer's whole segment, for writing if the peer allows it. Raise if it is not sealed."""
    with _mapping(descriptor):
        access = mmap.PROT_READ
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            access |= mmap.PROT_WRITE
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=access)


def watch_sealed(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map `nbytes` of a peer's segment for reading, and fault in its pages now."""
    with _mapping(descriptor):
        if os.fstat(descriptor).st_size != nbytes:  # nobody can change it any more
            raise bad_metadata(f"shared memory that does not have {nbytes:,} bytes")
        return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)


@contextmanager
def _mapping(descriptor: int) -> Iterator[None]:
    """Around what maps a descriptor: refuses one whose size may change, or that is no memory."""
    try:
        # Only a memfd has seals, so this refuses all other kinds of files as well.
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise bad_metadata("shared memory that is not sealed, which the peer could shrink")
        yield
    except AtlasError:
        raise
    except (OSError, ValueError) as problem:
        raise own_limit(problem) or bad_metadata(
            f"a descriptor that cannot be mapped: {problem}"
        ) from problem
