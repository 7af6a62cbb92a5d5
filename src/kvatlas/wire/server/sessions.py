"""The sessions of a node with its peers, by key.

A session ends a few seconds after its last connection has ended, as when a process is killed or
restarted. A peer cannot end the session of another peer, even by using that peer's name. If there
are too many sessions, a new peer gets a `busy` error.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.encoding import BusyError
from kvatlas.wire.handshake_checks import Peer
from kvatlas.wire.protocol import Hello, new_key
from kvatlas.wire.rpc import Caller

_MAX_SESSIONS = 4096
_MAX_OF_ONE = _MAX_SESSIONS // 2
"""The maximum number of sessions of one host or certificate."""
_MAX_OF_CONNECTION = 32
"""The maximum number of sessions started on one connection; the least recently used is ended."""
_GRACE_SECONDS = 3.0
"""Seconds that a session outlives its last connection, so that the peer can reconnect."""


@dataclass(eq=False)
class _Welcomed:
    """One session: the peer, and its open connections that have used the session."""

    key: bytes
    peer: Peer
    said: bytes
    """A digest of the hello that started the session."""
    first: Caller
    callers: set[Caller] = field(default_factory=set)
    ends: float = float("inf")
    """When the session ends (monotonic clock); infinite while it has a connection."""


class Sessions:
    """All sessions of a node. Any thread may use them.

    `ended` is called with the keys of ended sessions, without holding a lock.
    """

    def __init__(self, ended: Callable[[set[bytes]], None]) -> None:
        self._ended = ended
        self._open: OrderedDict[bytes, _Welcomed] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def keys(self) -> set[bytes]:
        """Return the keys of all sessions."""
        with self._lock:
            return set(self._open)

    def begin(self, hello: Hello, peer: Peer, caller: Caller) -> bytes:
        """Begin a session with a peer, and return its key. A repeated hello gets the same key."""
        said = _digest(hello)
        with self._lock:
            gone = self._of_earlier_process(peer)
            known = [one for one in self._open.values() if one.first is caller]
            same = next((one for one in known if one.said == said), None)
            if same is None:
                if len(known) >= _MAX_OF_CONNECTION:
                    gone.add(known[0].key)
                self._forget(gone)
                self._check_room(caller)
                same = _Welcomed(new_key(), peer, said, caller)
                self._open[same.key] = same
            self._heard(same, caller)
            self._forget(gone)
        self._tell(gone)
        return same.key

    def find(self, key: bytes, caller: Caller) -> Peer:
        """Return a session's peer, and record that the caller's connection uses the session."""
        with self._lock:
            found = self._open.get(key)
            if found is not None and found.peer.names == caller.names:
                self._heard(found, caller)
                return found.peer
        raise AtlasError(
            Code.UNKNOWN_SESSION,
            got="an unknown session key",
            hint="Connect to the node again",
        )

    def disconnected(self, caller: Caller) -> None:
        """Record that a connection ended. Sessions without another connection end soon."""
        ends = time.monotonic() + _GRACE_SECONDS
        with self._lock:
            for one in self._open.values():
                if caller in one.callers:
                    one.callers.remove(caller)
                    one.ends = float("inf") if one.callers else ends

    def sweep(self) -> None:
        """End sessions whose connections have been gone for long enough."""
        now = time.monotonic()
        with self._lock:
            gone = {key for key, one in self._open.items() if one.ends <= now}
            self._forget(gone)
        self._tell(gone)

    def _heard(self, session: _Welcomed, caller: Caller) -> None:
        self._open.move_to_end(session.key)
        if caller.open:
            session.callers.add(caller)
            session.ends = float("inf")

    def _of_earlier_process(self, peer: Peer) -> set[bytes]:
        """Return the keys of unconnected sessions that an earlier process of this peer began."""
        return {
            key
            for key, one in self._open.items()
            if (one.peer.name, one.peer.rank) == (peer.name, peer.rank)
            and one.peer.incarnation != peer.incarnation
            and not one.callers
        }

    def _check_room(self, caller: Caller) -> None:
        of_one = sum(one.first.identity == caller.identity for one in self._open.values())
        if len(self._open) >= _MAX_SESSIONS or of_one >= _MAX_OF_ONE:
            raise BusyError(
                f"{of_one:,} sessions of this host or certificate (limit {_MAX_OF_ONE:,}), "
                f"{len(self._open):,} in total (limit {_MAX_SESSIONS:,})",
                _GRACE_SECONDS,
            )

    def _forget(self, keys: set[bytes]) -> None:
        for key in keys:
            self._open.pop(key, None)

    def _tell(self, gone: set[bytes]) -> None:
        if gone:
            self._ended(gone)


def _digest(hello: Hello) -> bytes:
    """Return a digest of a hello without its plan."""
    alone = msgspec.structs.replace(hello, plan=None)
    return hashlib.sha256(msgspec.msgpack.encode(alone)).digest()
