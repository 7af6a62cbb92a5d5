"""The `memory` transport, which copies inside one process: the reference for other transports."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import msgspec

from kvatlas.copying.memory import Memory
from kvatlas.copying.memory_copy import as_bytes
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.access import Guarantees
from kvatlas.wire.transports.base import Link, OnePeerMemory, Separation, Shared, Transport
from kvatlas.wire.transports.handles import Handle, Stepwise, copy_steps

_open: WeakValueDictionary[str, MemoryTransport] = WeakValueDictionary()
"""The open transports of this process, by the name they publish."""


class _Published(msgspec.Struct, tag="memory", forbid_unknown_fields=True):
    name: str


class MemoryTransport(Transport):
    """Moves bytes between pools of one process.

    >>> import numpy as np
    >>> pools = [np.arange(4, dtype=np.uint8), np.zeros(4, np.uint8)]
    >>> ends = [MemoryTransport(), MemoryTransport()]
    >>> for end, pool in zip(ends, pools):
    ...     end.register({0: Memory(pool.ctypes.data, 4)})
    >>> link = ends[1].connect(ends[0].publish(), ends[0].memory)
    >>> link.read([Copy(0, 0, np.array([1]), np.array([0]), np.array([3]))]).wait(float("inf"))
    >>> pools[1].tolist()
    [1, 2, 3, 0]
    """

    name: ClassVar[str] = "memory"
    separation: ClassVar[Separation] = "segments"
    guarantees = Guarantees(
        confidentiality=True, integrity=True, authentication=True, authorisation=True
    )

    def __init__(self, *, shared: Shared = "all") -> None:
        super().__init__(shared=shared)
        self.token = secrets.token_hex(16)
        _open[self.token] = self

    def publish(self) -> bytes:
        """Return the name of this transport within the process."""
        return errors.write_metadata(_Published(self.token))

    def lend_to_one(self, nbytes: int) -> OnePeerMemory:
        """Return memory with a separate random name. Only a peer with that name can read it."""
        view = self.allocate(nbytes)
        region = Memory(view.ctypes.data, nbytes, owner=view)
        return OnePeerMemory.of(MemoryTransport(), view, region, lambda: view.fill(0))

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        token = errors.read_metadata(metadata, _Published).name
        peer = _open.get(token)
        if peer is None:
            hint = 'Keep the peer open; between processes, use the transport "shm" or "tcp"'
            got = "metadata of a transport that is closed, or of another process"
            raise errors.peer_lost(got, hint, "This process has no such transport")
        if any(peer.reachable.get(pool) != region for pool, region in memory.items()):
            raise errors.bad_metadata("regions that differ from those that the peer shares")
        return _MemoryLink(self, token, memory)

    def _close(self) -> None:
        """Make links to this transport fail from now on."""
        _open.pop(self.token, None)


class _MemoryLink(Link):
    prompt: ClassVar[bool] = True

    def __init__(
        self, owner: MemoryTransport, token: str, peer_memory: Mapping[int, Memory]
    ) -> None:
        super().__init__(owner, peer_memory)
        self._token = token

    def check(self) -> None:
        """Raise an error if this process's transport or the peer's transport is closed."""
        super().check()
        if self._token not in _open:
            raise errors.peer_lost("a closed transport")

    def _post(self, copies: Sequence[Copy]) -> Handle:
        # Look up the regions now, because the bounds were checked against these regions.
        far, near = self.peer_memory, self.own_memory
        ends = [
            (as_bytes(far[copy.source_pool]), as_bytes(near[copy.destination_pool]), copy)
            for copy in copies
        ]
        return Stepwise(copy_steps(ends, self.check))
