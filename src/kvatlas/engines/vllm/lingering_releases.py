"""Release other engines' offers after a delay, because a late reader may still arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvatlas.engines.vllm.orders import RemoteRequest


class LingeringReleases:
    """Releases each offer after a delay of `seconds`, unless the offer gets another reader before.

    An offer is a finished request whose blocks another engine keeps for this engine to read. Call
    `add` when the offer has no reader left. After the delay, `release` is called with the offer.

    >>> released: list[RemoteRequest] = []
    >>> waiting = LingeringReleases(released.append, seconds=60.0)
    >>> one = RemoteRequest(version=1, request="p", tokens=9, endpoints=("tcp://h:1",))
    >>> waiting.add(one), waiting.cancel("p"), waiting.add(one), waiting.flush()
    (None, None, None, None)
    >>> released == [one]
    True
    """

    def __init__(self, release: Callable[[RemoteRequest], object], *, seconds: float) -> None:
        self._release, self._seconds = release, seconds
        self._timers: dict[str, threading.Timer] = {}
        self._lock = threading.Lock()

    def add(self, offer: RemoteRequest) -> None:
        """Release an offer after the delay, unless `cancel` is called before."""
        timer = threading.Timer(self._seconds, self._fire)
        timer.args, timer.daemon = (offer, timer), True
        self.cancel(offer.request)
        with self._lock:
            self._timers[offer.request] = timer
        timer.start()

    def cancel(self, name: str) -> None:
        """Cancel the delayed release of the offer `name`, because it has a reader again."""
        with self._lock:
            timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def flush(self) -> None:
        """Release every waiting offer now."""
        with self._lock:
            timers = list(self._timers.values())
        for timer in timers:
            timer.cancel()
            self._fire(*timer.args)

    def _fire(self, offer: RemoteRequest, timer: threading.Timer) -> None:
        with self._lock:
            if self._timers.get(offer.request) is not timer:
                return
            del self._timers[offer.request]
        self._release(offer)
