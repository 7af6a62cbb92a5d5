"""Between processes of one host: pools in shared memory that the peer maps.

Each end keeps a small segment of its own beside its pools. The lock on it, which the
kernel gives back when the process ends, tells a link whether the peer is still there,
although what it had shared can be read on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec
import numpy as np

from kvatlas.routing import Copy
from kvatlas.wire.memory_copy import Bytes, as_bytes
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.base import Handle, Link, Memory, Transport
from kvatlas.wire.transports.polled_copy import Stepwise, copy_steps
from kvatlas.wire.transports.shm_segments import (
    attach,
    containing,
    create_segment,
    has_owner,
    open_segment,
    sweep,
)


class _Region(msgspec.Struct, forbid_unknown_fields=True):
    segment: str
    start: int
    nbytes: int


class _Published(msgspec.Struct, tag="shm", forbid_unknown_fields=True):
    presence: str
    regions: dict[int, _Region]


class ShmTransport(Transport):
    """Moves bytes between pools of two processes of one host.

    Memory that peers shall reach is made with `create_segment`; other memory can be
    registered too, and is then reached from this end alone.

    >>> ends = [ShmTransport(), ShmTransport()]
    >>> pools = [create_segment(64), create_segment(64)]
    >>> for end, pool in zip(ends, pools):
    ...     end.register({0: pool.memory})
    >>> pools[0][:5] = b"hello"
    >>> link = ends[1].connect(ends[0].publish(), ends[0].memory)
    >>> link.read([Copy(0, 0, np.array([0]), np.array([8]), np.array([5]))]).wait(float("inf"))
    >>> pools[1][8:13]
    b'hello'
    >>> for end, pool in zip(ends, pools):
    ...     end.close()
    ...     pool.close()
    """

    name: ClassVar[str] = "shm"

    def __init__(self) -> None:
        super().__init__()
        self._presence = create_segment(1)
        self._regions: dict[int, _Region] = {}

    def _register(self, memory: Mapping[int, Memory]) -> None:
        for pool, region in memory.items():
            if shared := containing(region):
                segment, start = shared
                self._regions[pool] = _Region(segment.name, start, region.nbytes)

    def allocate(self, nbytes: int) -> Bytes:
        """Shared memory; it goes when the last view of it does."""
        return np.frombuffer(create_segment(nbytes), dtype=np.uint8)

    def publish(self) -> bytes:
        """The segment that shows its presence, and where its regions are in shared memory."""
        self.check()
        return errors.write_metadata(_Published(self._presence.name, self._regions))

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """Map a peer's regions; those outside shared memory stay out of reach."""
        published = errors.read_metadata(metadata, _Published)
        for pool, region in published.regions.items():
            if pool in memory and region.nbytes != memory[pool].nbytes:
                raise errors.bad_metadata(f"pool {pool} of {region.nbytes} bytes")
        presence = open_segment(published.presence)
        if presence is None:
            raise errors.peer_lost("no such process of this user on this host")
        link = _ShmLink(self, presence, memory)
        try:
            link.check()
            for pool, region in published.regions.items():
                if pool in memory:
                    link.mapped[pool] = _mapped(region)
        except BaseException:
            link.close()
            raise
        return link

    def _close(self) -> None:
        """Its peers notice; segments stay with whoever created them."""
        self._presence.close()
        self._regions.clear()


def _mapped(region: _Region) -> Bytes:
    mapping = attach(region.segment, region.start, region.nbytes)
    if mapping is None:
        raise errors.bad_metadata(f"a missing or too small segment {region.segment[:64]!r}")
    return np.frombuffer(mapping, np.uint8)[region.start :]


class _ShmLink(Link):
    def __init__(self, owner: ShmTransport, presence: int, theirs: Mapping[int, Memory]) -> None:
        super().__init__(owner, theirs)
        self._presence = os.fdopen(presence, "rb", buffering=0)
        self.mapped: dict[int, Bytes] = {}

    def check(self) -> None:
        """Refuse once the link is closed or the peer is gone."""
        super().check()
        if not has_owner(self._presence.fileno()):
            sweep()
            raise errors.peer_lost("a process that has ended, or closed its transport")

    def _post(self, copies: Sequence[Copy], *, write: bool) -> Handle:
        ends = []
        for copy in copies:
            pool, own = (copy.dst_pool, copy.src_pool) if write else (copy.src_pool, copy.dst_pool)
            if pool not in self.mapped:
                raise errors.failed(
                    f"pool {pool}, which the peer has not put in shared memory",
                    hint="Allocate the peer's pools with its transport, or pools_for",
                )
            near, far = as_bytes(self.mine[own]), self.mapped[pool]
            ends.append((near, far, copy) if write else (far, near, copy))
        return Stepwise(copy_steps(ends, self.check))

    def _close(self) -> None:
        """Unmap."""
        self._presence.close()
        self.mapped.clear()
