"""Shared memory between processes of one host: each end maps the pools of the other.

Each end publishes the name of a socket and the positions of its regions in segments. A peer that
connects to the socket receives the segments' descriptors. The segments are sealed, so they cannot
shrink. The connection stays open, so each end notices at once if the other has closed its transport
or exited. The shared memory would not show this, because it stays readable.
"""

from __future__ import annotations

import math
import os
import socket
import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from kvatlas.copying.memory import Memory
from kvatlas.copying.memory_copy import as_bytes
from kvatlas.copying.run_bounds import Bytes
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.access import Access, Guarantees
from kvatlas.wire.transports.base import Link, OnePeerMemory, Separation, Shared, Transport
from kvatlas.wire.transports.handles import Handle, Stepwise, copy_steps
from kvatlas.wire.transports.nonblocking_sockets import hang_up
from kvatlas.wire.transports.shared_memory import Segment, containing, create_segment, map_sealed
from kvatlas.wire.transports.shm_sockets import (
    TOKEN_BYTES,
    SegmentServer,
    is_connected,
    receive_descriptors,
)


class _Region(msgspec.Struct, forbid_unknown_fields=True):
    segment: int
    start: int
    nbytes: int


class _Published(msgspec.Struct, tag="shm", forbid_unknown_fields=True):
    socket: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    regions: dict[int, _Region]


class ShmTransport(Transport):
    """Moves bytes between pools of two processes on one host.

    Use `allocate` or `create_segment` to allocate memory that peers access. Other memory can be
    registered too, but only this end can access it.

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
    separation: ClassVar[Separation] = "segments"
    guarantees = Guarantees(confidentiality=True, integrity=True, authentication=True)

    def __init__(self, *, shared: Shared = "all") -> None:
        super().__init__(shared=shared)
        try:
            self._server = SegmentServer()
        except (OSError, RuntimeError) as problem:
            hint = "Raise the limits of open files and threads (ulimit -n, -u)"
            failure = errors.failed(str(problem), hint, "The transport cannot open its socket")
            raise errors.own_limit(problem) or failure from problem
        self._regions: dict[int, _Region] = {}
        self._numbers: weakref.WeakKeyDictionary[Segment, int] = weakref.WeakKeyDictionary()
        weakref.finalize(self, self._server.close)

    def _register(self, memory: Mapping[int, Memory]) -> None:
        for pool, region in memory.items():
            if super().shares(pool) and (found := containing(region)):
                segment, start = found
                if segment not in self._numbers:
                    self._numbers[segment] = self._server.add(segment.descriptor)
                self._regions[pool] = _Region(self._numbers[segment], start, region.nbytes)

    def shares(self, pool: int) -> bool:
        """Whether a region is in shared memory, and peers may access it."""
        return super().shares(pool) and pool in self._regions

    def allocate(self, nbytes: int) -> Bytes:
        """Allocate shared memory, which is freed once no view of it exists."""
        if nbytes == 0:
            return np.zeros(0, np.uint8)
        return np.frombuffer(create_segment(nbytes), dtype=np.uint8)

    def lend_to_one(self, nbytes: int) -> OnePeerMemory:
        """Return a segment with a separate socket and token, which only one peer receives.

        The peer's descriptor is read-only.
        """
        segment, alone = create_segment(nbytes), ShmTransport()
        view = np.frombuffer(segment, dtype=np.uint8)
        lent = OnePeerMemory.of(alone, view, segment.memory, segment.wipe)
        alone._server.give_read_only()
        return lent

    def publish(self) -> bytes:
        """Return the name of the socket, and the positions of the regions in their segments."""
        self.check()
        server = self._server
        return errors.write_metadata(_Published(server.name, server.token, self._regions))

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        return _ShmLink(self, metadata, memory)

    def _close(self) -> None:
        """Disconnect all peers. Segments stay open until their owners close them."""
        self._server.close()
        self._regions.clear()


def map_published(
    metadata: bytes, sizes: Mapping[int, int], deadline: float = math.inf
) -> tuple[socket.socket, dict[int, Bytes]]:
    """Connect to the transport that published `metadata` and map its regions in shared memory.

    Return the connection, and the mapped regions by pool index. `sizes` are the expected sizes of
    the regions. The mappings stay valid while a view of them exists, even after the connection
    ends.
    """
    published = errors.read_metadata(metadata, _Published)
    regions = {pool: at for pool, at in published.regions.items() if pool in sizes}
    for pool, region in regions.items():
        if region.nbytes != sizes[pool]:
            got = f"pool {pool} of {region.nbytes:,} bytes, expected {sizes[pool]:,}"
            raise errors.bad_metadata(got)
    connection, descriptors = receive_descriptors(published.socket, published.token, deadline)
    try:
        return connection, _mapped(regions, descriptors)
    except BaseException:
        hang_up(connection)
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _mapped(regions: Mapping[int, _Region], descriptors: Sequence[int]) -> dict[int, Bytes]:
    """Return a peer's regions as bytes, by pool index. Each segment is mapped once."""
    segments: dict[int, Bytes] = {}
    mapped = {}
    for pool, region in regions.items():
        number = region.segment
        if not 0 <= number < len(descriptors):
            raise errors.bad_metadata(f"pool {pool} in a segment that the peer did not send")
        if number not in segments:
            segments[number] = np.frombuffer(map_sealed(descriptors[number]), np.uint8)
        segment = segments[number]
        if region.nbytes < 1 or not 0 <= region.start <= segment.size - region.nbytes:
            raise errors.bad_metadata(
                f"pool {pool}, which is not inside its segment of {segment.size:,} bytes"
            )
        mapped[pool] = segment[region.start :][: region.nbytes]
    return mapped


class _ShmLink(Link):
    prompt: ClassVar[bool] = True

    def __init__(
        self, owner: ShmTransport, metadata: bytes, peer_memory: Mapping[int, Memory]
    ) -> None:
        super().__init__(owner, peer_memory)
        self._metadata = metadata
        self._connection: socket.socket | None = None
        self.mapped: dict[int, Bytes] = {}

    def sign_in(self, access: Access, deadline: float) -> None:
        """Connect to the peer and map its regions, except regions outside shared memory."""
        del access
        sizes = {pool: region.nbytes for pool, region in self.peer_memory.items()}
        self._connection, self.mapped = map_published(self._metadata, sizes, deadline)
        weakref.finalize(self, hang_up, self._connection)

    def check(self) -> None:
        """Raise an error if the link is closed or the peer is gone."""
        super().check()
        if self._connection is None or not is_connected(self._connection):
            raise errors.peer_lost("a peer that has exited or closed its transport")

    def reaches(self, pool: int) -> bool:
        """Whether the peer's pool is in shared memory, or empty."""
        return pool in self.mapped or (
            pool in self.peer_memory and not self.peer_memory[pool].nbytes
        )

    def _post(self, copies: Sequence[Copy]) -> Handle:
        ends = []
        for copy in copies:
            pool = copy.source_pool
            if pool not in self.mapped:
                raise errors.failed(
                    f"pool {pool}",
                    hint="Allocate the peer's pools with its transport, or with pools_for",
                    problem="The peer's pool is not in shared memory",
                )
            near = as_bytes(self.own_memory[copy.destination_pool])
            ends.append((self.mapped[pool], near, copy))
        return Stepwise(copy_steps(ends, self.check))

    def _close(self) -> None:
        """Disconnect from the peer, and unmap its pools."""
        if self._connection is not None:
            hang_up(self._connection)
        self.mapped.clear()
