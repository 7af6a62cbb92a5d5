"""Collect the transfers that background threads have finished since the engine's last step."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Ended:
    """Requests sent, received or failed since the last step; `received` includes `failed`."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class EndedRequests:
    """A thread-safe queue of requests whose transfers have ended.

    >>> ended = EndedRequests()
    >>> ended.hold_twice({"r"})
    >>> ended.sent("r")
    >>> ended.take().sent
    set()
    >>> ended.sent("r")
    >>> ended.take().sent
    {'r'}
    """

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._twice: set[str] = set()
        self._lock = threading.Lock()

    def hold_twice(self, requests: set[str]) -> None:
        """Count requests as sent only after two reports: one from a peer and one from the tier."""
        with self._lock:
            self._twice |= requests

    def sent(self, request_id: str) -> None:
        """Report that a peer or the tier has read a request's blocks.

        The request counts as sent now or, after `hold_twice`, at the second report.
        """
        with self._lock:
            if request_id in self._twice:
                self._twice.discard(request_id)
                return
        self._told.put(("sent", request_id))

    def arrived(self, request_id: str, *, failed: bool) -> None:
        """Report that the read of a request has ended; `failed` is true if the read failed."""
        self._told.put(("failed" if failed else "received", request_id))

    def take(self, timeout: float = 0.0) -> Ended:
        """Return the requests that ended since the last call.

        If none has ended, wait up to `timeout` seconds for one.
        """
        ended = Ended()
        with suppress(queue.Empty):
            while True:
                wait = timeout if ended == Ended() else 0.0
                what, request_id = self._told.get(wait > 0, wait or None)
                if what == "sent":
                    ended.sent.add(request_id)
                    continue
                ended.received.add(request_id)
                if what == "failed":
                    ended.failed.add(request_id)
        return ended
