"""Between two transports of one process: the reference that the others are held to."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import msgspec

from kvatlas.routing import Copy
from kvatlas.wire.memory_copy import Steps, Stepwise, as_bytes, copied
from kvatlas.wire.transports.base import Handle, Link, Memory, Transport
from kvatlas.wire.transports.errors import (
    bad_metadata,
    check_note,
    closed,
    peer_lost,
    read_metadata,
    write_metadata,
)

_here: WeakValueDictionary[str, MemoryTransport] = WeakValueDictionary()
"""The transports of this process that are open, by the name they publish."""


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
    >>> runs = Copy(0, 0, np.array([1]), np.array([0]), np.array([3]))
    >>> link.read([runs], note=b"done").wait(float("inf"))
    >>> pools[1].tolist(), ends[0].notes()
    ([1, 2, 3, 0], [b'done'])
    """

    name: ClassVar[str] = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.token = secrets.token_hex(16)
        self.arrived: deque[bytes] = deque()
        _here[self.token] = self

    def _register(self, memory: Mapping[int, Memory]) -> None:  # noqa: ARG002
        if self.token not in _here:
            raise closed("transport")

    def publish(self) -> bytes:
        """The name under which this process knows it."""
        return write_metadata(_Published(self.token))

    def connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """A link to another transport of this process."""
        token = read_metadata(metadata, _Published).name
        if self.token not in _here:
            raise closed("transport")
        peer = _here.get(token)
        if peer is None:
            raise peer_lost("a transport that is closed, or of another process")
        if any(peer.memory.get(pool) != region for pool, region in memory.items()):
            raise bad_metadata("regions that the peer has not registered")
        return _MemoryLink(self, token, memory)

    def notes(self) -> list[bytes]:
        """Notes since the last call."""
        return [self.arrived.popleft() for _ in range(len(self.arrived))]

    def close(self) -> None:
        """Links to it are lost from now on."""
        _here.pop(self.token, None)
        super().close()


class _MemoryLink(Link):
    def __init__(self, owner: MemoryTransport, token: str, theirs: Mapping[int, Memory]) -> None:
        super().__init__(owner.memory, theirs)
        self._owner, self._token, self._open = owner, token, True

    def _peer(self) -> MemoryTransport:
        if not self._open or self._owner.token not in _here:
            raise closed("link")
        peer = _here.get(self._token)
        if peer is None:
            raise peer_lost("a transport that was closed")
        return peer

    def _read(self, copies: Sequence[Copy], note: bytes) -> Handle:
        return self._start(copies, self.theirs, self.mine, note)

    def _write(self, copies: Sequence[Copy], note: bytes) -> Handle:
        return self._start(copies, self.mine, self.theirs, note)

    def _start(
        self,
        copies: Sequence[Copy],
        src: Mapping[int, Memory],
        dst: Mapping[int, Memory],
        note: bytes,
    ) -> Handle:
        check_note(note)
        self._peer()
        # The regions are looked up now: the bounds were checked against these.
        ends = [(src[copy.src_pool], dst[copy.dst_pool], copy) for copy in copies]
        return Stepwise(self._steps(ends, note))

    def _steps(self, ends: list[tuple[Memory, Memory, Copy]], note: bytes) -> Iterator[bool]:
        for source, target, copy in ends:
            self._peer()
            steps: Steps = copied(as_bytes(source), as_bytes(target), copy)
            for step in steps:
                yield step
                self._peer()
        if note:
            self._peer().arrived.append(note)

    def close(self) -> None:
        """Forget the peer."""
        self._open = False
