"""What has ended beside the engine's own thread, until its next step asks for it."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Ended:
    """Requests that were sent, and that were received or failed to be, since the last step."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class EndedRequests:
    """Requests that have ended, told by any thread.

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
        """These are kept for a peer and for a tier: they are sent when both are done."""
        with self._lock:
            self._twice |= requests

    def sent(self, request_id: str) -> None:
        """Nobody here needs a request's blocks any more, unless it was held twice."""
        with self._lock:
            if request_id in self._twice:
                self._twice.discard(request_id)
                return
        self._told.put(("sent", request_id))

    def arrived(self, request_id: str, *, failed: bool) -> None:
        """A request is here, or could not be read."""
        self._told.put(("failed" if failed else "received", request_id))

    def take(self, seconds: float = 0.0) -> Ended:
        """What has ended since the last step; where nothing has, the first within `seconds`."""
        ended = Ended()
        with suppress(queue.Empty):
            while True:
                wait = seconds if ended == Ended() else 0.0
                what, request_id = self._told.get(wait > 0, wait or None)
                if what == "sent":
                    ended.sent.add(request_id)
                    continue
                ended.received.add(request_id)
                if what == "failed":
                    ended.failed.add(request_id)
        return ended
