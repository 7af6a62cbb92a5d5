"""Shared memory segments that cannot shrink and are freed with the last process that uses them.

A segment is a sealed memfd: an anonymous file whose pages are all allocated at the start and whose
size can never change, whichever process has its descriptor. So no peer can make an access to it
fail, and a killed owner leaves nothing to clean up. Peers receive the descriptors through a socket
(`shm_sockets`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress
from weakref import WeakSet

from kvatlas.copying.memory import Memory
from kvatlas.wire.fork_safety import fresh_in_children
from kvatlas.wire.transports.sealed_memory import make_sealed, no_segment

_mine: WeakSet[Segment] = WeakSet()
"""The segments of this process that are in use."""
_guard = fresh_in_children(threading.Lock())


class Segment(mmap.mmap):
    """Shared memory as a writable buffer, for `kvatlas.cache.bind` and for registration.

    Made by `create_segment`. Its bytes are freed once it is closed or collected, and no transport
    or peer uses it anymore.
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
        """Free its pages, also for peers that have it mapped: from now on it reads as zeros."""
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
        raise no_segment(nbytes, fault) from fault
    segment.address = ctypes.addressof(ctypes.c_uint8.from_buffer(segment))
    segment.nbytes, segment.descriptor = nbytes, descriptor
    with _guard:
        _mine.add(segment)
    return segment


def containing(memory: Memory) -> tuple[Segment, int] | None:
    """Return the open segment that contains a region, and the region's offset in it."""
    with _guard:
        segments = list(_mine)
    for segment in segments:
        start = memory.address - segment.address
        if segment.descriptor >= 0 and 0 <= start <= segment.nbytes - memory.nbytes:
            return segment, start
    return None
