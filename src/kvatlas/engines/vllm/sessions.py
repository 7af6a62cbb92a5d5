"""Keep sessions with other engines open for later requests, and close idle sessions."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvatlas.errors import AtlasError, Code
from kvatlas.wire import Node, Session
from kvatlas.wire.client.kept_offers import kept_offer

log = logging.getLogger("kvatlas.vllm")

_MOST = 64
"""Maximum number of cached sessions. The least recently used idle sessions are evicted."""
_STALE = {Code.PEER_LOST, Code.WIRE_FAILED, Code.UNKNOWN_SESSION}
"""Errors after which a session is reopened: the other engine may have restarted."""


@dataclass
class _Kept:
    session: Session | None = None
    failure: AtlasError | None = None
    """The error of a failed open, raised in every thread that waited for it."""
    users: int = 0
    dropped: bool = False
    opening: threading.Lock = field(default_factory=threading.Lock)


class EngineSessions:
    """Sessions of one rank with other engines, keyed by the engines' endpoints. Thread-safe.

    A session must open within `timeout` seconds. Until then, the other engine keeps the offer for
    which the session is opened. `close` receives a function that closes a session, and runs it in a
    thread that may block.
    """

    def __init__(
        self, node: Node, *, timeout: float, close: Callable[[Callable[[], None]], object]
    ) -> None:
        self._node, self._timeout, self._close = node, timeout, close
        self._kept: OrderedDict[tuple[str, ...], _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    @contextmanager
    def use(self, endpoints: tuple[str, ...], request: str) -> Iterator[Session]:
        """Yield the session with an engine. The first use opens the session.

        While the session is being opened, the other engine keeps its offer of `request`.
        """
        kept = self._borrow(endpoints)
        try:
            if kept.session is None:
                with kept_offer(self._node, endpoints, request, self._timeout):
                    session = self._opened(endpoints, kept)
            else:
                session = kept.session
            yield session
        except AtlasError as refusal:
            if kept.session is None or refusal.code in _STALE:
                self._drop(endpoints, kept)
            raise
        finally:
            self._give_back(kept)

    def _opened(self, endpoints: tuple[str, ...], kept: _Kept) -> Session:
        """Return the open session.

        The first thread opens the session, and other threads wait. If opening fails, all of these
        threads raise the error.
        """
        with kept.opening:
            if kept.failure is not None:
                raise kept.failure
            if kept.session is None:
                try:
                    kept.session = Session(self._node, endpoints, timeout=self._timeout)
                except AtlasError as refusal:
                    kept.failure = refusal
                    raise
            return kept.session

    def close_all(self) -> None:
        """Close every session, including those in use."""
        with self._lock:
            kept = list(self._kept.values())
            self._kept.clear()
        for one in kept:
            if one.session is not None:
                one.session.close()

    def _borrow(self, endpoints: tuple[str, ...]) -> _Kept:
        with self._lock:
            kept = self._kept.setdefault(endpoints, _Kept())
            kept.users += 1
            self._kept.move_to_end(endpoints)
            idle = [key for key, one in self._kept.items() if not one.users]
            unused = [self._kept.pop(key) for key in idle[: max(0, len(self._kept) - _MOST)]]
        for one in unused:
            self._end(one)
        return kept

    def _drop(self, endpoints: tuple[str, ...], kept: _Kept) -> None:
        with self._lock:
            kept.dropped = True
            if self._kept.get(endpoints) is kept:
                del self._kept[endpoints]

    def _give_back(self, kept: _Kept) -> None:
        with self._lock:
            kept.users -= 1
            over = kept.dropped and not kept.users
        if over:
            self._end(kept)

    def _end(self, kept: _Kept) -> None:
        if kept.session is not None:
            self._close(kept.session.close)
