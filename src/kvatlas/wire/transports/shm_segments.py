"""Shared memory that nobody can take away, and that goes with the last process that has it.

A segment is a sealed memfd: a file without a name, whose pages all exist from the start
and whose size can never change again, whoever has its descriptor. So no peer can make
reading or writing it fail, and a killed owner leaves nothing behind. Descriptors reach
peers through a socket (`shm_sockets`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress
from weakref import WeakSet

from kvatlas.wire.transports.base import Memory
from kvatlas.wire.transports.sealed_memory import make_sealed, no_segment

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
    """The open segment of this process that holds a region, and where it starts there."""
    with _guard:
        segments = list(_mine)
    for segment in segments:
        start = memory.address - segment.address
        if segment.descriptor >= 0 and 0 <= start <= segment.nbytes - memory.nbytes:
            return segment, start
    return None
