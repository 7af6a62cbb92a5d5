"""Between processes of one host: pools in shared memory that the peer maps.

Each end listens on a socket of the host that nobody else can take, and that the kernel
removes when the process ends. A link is a connection to it: notes travel along it, and
its end says that the peer is gone, although what it had shared can still be read.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from os import getuid
from typing import ClassVar

import msgspec
import numpy as np

from kvatlas.routing import Copy
from kvatlas.wire.memory_copy import Bytes, Stepwise, as_bytes, copied
from kvatlas.wire.transports.base import Handle, Link, Memory, Transport
from kvatlas.wire.transports.errors import (
    bad_metadata,
    check_note,
    closed,
    failed,
    peer_lost,
    read_metadata,
    write_metadata,
)
from kvatlas.wire.transports.shared_memory import allocate, attach, containing, sweep

__all__ = ["ShmTransport", "allocate", "sweep"]

_BACKLOG = 4096
_CREDENTIALS = struct.Struct("3i")


class _Region(msgspec.Struct, forbid_unknown_fields=True):
    segment: str
    start: int
    nbytes: int


class _Published(msgspec.Struct, tag="shm", forbid_unknown_fields=True):
    door: str
    regions: dict[int, _Region]


class ShmTransport(Transport):
    """Moves bytes between pools of two processes of one host.

    Memory that peers shall reach is made with `allocate`; other memory can be registered
    too, and is then reached from this end alone.

    >>> ends, pools = [ShmTransport(), ShmTransport()], [allocate(64), allocate(64)]
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
        self._door = f"kvatlas-{secrets.token_hex(16)}"
        self._listener: socket.socket | None = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        )
        self._listener.bind(f"\0{self._door}")
        self._listener.listen(_BACKLOG)
        self._callers: list[socket.socket] = []
        self._regions: dict[int, _Region] = {}
        sweep()

    def _register(self, memory: Mapping[int, Memory]) -> None:
        if self._listener is None:
            raise closed("transport")
        for pool, region in memory.items():
            found = containing(region)
            if found is not None:
                segment, start = found
                self._regions[pool] = _Region(segment.name, start, region.nbytes)

    def allocate(self, nbytes: int) -> Bytes:
        """Shared memory; it goes when the last view of it does."""
        return np.frombuffer(allocate(nbytes), dtype=np.uint8)

    def publish(self) -> bytes:
        """Its door, and where its regions are in shared memory."""
        return write_metadata(_Published(self._door, self._regions))

    def connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """Map a peer's regions; those outside shared memory stay out of reach."""
        if self._listener is None:
            raise closed("transport")
        published = read_metadata(metadata, _Published)
        for pool, region in published.regions.items():
            if pool in memory and region.nbytes != memory[pool].nbytes:
                raise bad_metadata(f"pool {pool} of {region.nbytes} bytes")
        line = _call(published.door)
        try:
            mapped = {
                pool: _mapped(region)
                for pool, region in published.regions.items()
                if pool in memory
            }
        except BaseException:
            line.close()
            raise
        return _ShmLink(self, line, mapped, memory)

    @property
    def open(self) -> bool:
        """Whether it has not been closed."""
        return self._listener is not None

    def notes(self) -> list[bytes]:
        """Notes since the last call."""
        if self._listener is None:
            return []
        with suppress(BlockingIOError):
            while True:
                caller, _ = self._listener.accept()
                caller.setblocking(False)
                if _user(caller) == getuid():
                    self._callers.append(caller)
                else:
                    caller.close()
        found: list[bytes] = []
        for caller in list(self._callers):
            if not _drain(caller, found):
                caller.close()
                self._callers.remove(caller)
        return found

    def close(self) -> None:
        """Its peers notice; segments stay with whoever allocated them."""
        for connection in (*self._callers, *([self._listener] if self._listener else [])):
            connection.close()
        self._callers, self._listener = [], None
        self._regions.clear()
        super().close()


def _call(door: str) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        line.connect(f"\0{door}")
    except (OSError, ValueError) as problem:
        line.close()
        if isinstance(problem, BlockingIOError):
            raise failed("a peer with too many calls that it has not answered") from problem
        if isinstance(problem, ConnectionRefusedError):
            raise peer_lost("no such process on this host") from problem
        raise bad_metadata(f"{problem}") from problem
    if _user(line) != getuid():
        line.close()
        raise bad_metadata("a process of another user")
    return line


def _mapped(region: _Region) -> Bytes:
    found = attach(region.segment, region.start, region.nbytes)
    if found is None:
        raise bad_metadata(f"segment {region.segment[:64]!r} that is not there, or too small")
    return np.frombuffer(found, np.uint8)[region.start :]


def _user(connection: socket.socket) -> int:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def _drain(caller: socket.socket, found: list[bytes]) -> bool:
    """Take what a caller has sent; False once it has hung up."""
    try:
        while note := caller.recv(1 << 16):
            found.append(note)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class _ShmLink(Link):
    def __init__(
        self,
        owner: ShmTransport,
        line: socket.socket,
        mapped: dict[int, Bytes],
        theirs: Mapping[int, Memory],
    ) -> None:
        super().__init__(owner.memory, theirs)
        self._owner, self._line, self._mapped = owner, line, mapped

    def _read(self, copies: Sequence[Copy], note: bytes) -> Handle:
        ends = [
            (self._far(copy.src_pool), as_bytes(self.mine[copy.dst_pool]), copy) for copy in copies
        ]
        return self._start(ends, note)

    def _write(self, copies: Sequence[Copy], note: bytes) -> Handle:
        ends = [
            (as_bytes(self.mine[copy.src_pool]), self._far(copy.dst_pool), copy) for copy in copies
        ]
        return self._start(ends, note)

    def _far(self, pool: int) -> Bytes:
        self._check()
        if pool not in self._mapped:
            raise failed(
                f"pool {pool}, which the peer has not put in shared memory",
                hint="Allocate the peer's pools with kvatlas.wire.transports.shm.allocate",
            )
        return self._mapped[pool]

    def _start(self, ends: list[tuple[Bytes, Bytes, Copy]], note: bytes) -> Handle:
        check_note(note)
        self._check()
        return Stepwise(self._steps(ends, note))

    def _steps(self, ends: list[tuple[Bytes, Bytes, Copy]], note: bytes) -> Iterator[bool]:
        for source, target, copy in ends:
            for step in copied(source, target, copy):
                yield step
                self._check()
        self._check()
        while note:
            try:
                self._line.send(note)
                return
            except BlockingIOError:
                yield False
                self._check()
            except OSError as problem:
                raise peer_lost(f"a process that has ended: {problem}") from problem

    def _check(self) -> None:
        """Refuse once the link is closed or the peer is gone."""
        if self._line.fileno() < 0 or not self._owner.open:
            raise closed("link")
        look = select.poll()
        look.register(self._line, select.POLLHUP)
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in look.poll(0)):
            sweep()
            raise peer_lost("a process that has ended")

    def close(self) -> None:
        """Hang up and unmap."""
        self._line.close()
        self._mapped.clear()
