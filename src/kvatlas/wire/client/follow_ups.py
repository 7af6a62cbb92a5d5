"""What comes after a pull that was started by who asked for it: later, and by another thread.

Who waits for such a pull finishes it. What the source is told afterwards can wait for a moment:
a thread that was woken for it at once would take the interpreter from whoever was waiting, just
when it goes on. One thread looks after all of them from time to time, as long as there are any,
and for a moment longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from kvatlas.wire.client.transfer import Transfer, TransferPart
from kvatlas.wire.rpc import log

_EVERY = 2e-3
"""Seconds between looks."""

_LINGER = 0.1
"""Seconds for which the thread goes on looking where there is nothing: to wake one takes longer
than to look, and whoever pulls next would wait for it."""

_TOGETHER = 6e-3
"""Seconds for which sources are not told, so that they are told of several pulls in a row."""

_SLOW = 0.05
"""Seconds after which others do not wait for a source that is being told."""


@dataclass
class _FollowUp:
    transfer: Transfer
    part: TransferPart
    then: Callable[[], None]
    since: float = field(default_factory=time.monotonic)


class FollowUps:
    """Pulls that were started; any thread may use them."""

    def __init__(self, workers: Executor, beside: Executor) -> None:
        self._workers, self._beside = workers, beside
        self._kept: list[_FollowUp] = []
        self._lock = threading.Lock()
        self._looking = self._closing = False
        self._rows = 0
        """Rows of pulls that are being followed up."""

    def add(self, transfer: Transfer, part: TransferPart, then: Callable[[], None]) -> None:
        """Have a part finished if nobody does so soon, and call `then` once it is."""
        with self._lock:
            self._kept.append(_FollowUp(transfer, part, then))
            start, self._looking = not self._looking, True
        if start:
            _hand_on(self._beside, self._look)

    def close(self) -> None:
        """Finish everything, before the threads that do so end; nothing is added any more."""
        self._closing = True
        while self._looking or self._rows:
            time.sleep(_EVERY)

    def _look(self) -> None:
        over: list[_FollowUp] = []
        last = time.monotonic()
        while True:
            time.sleep(_EVERY)
            with self._lock:
                kept, self._kept = self._kept, []
                if kept or over:
                    last = time.monotonic()
                elif self._closing or time.monotonic() - last > _LINGER:
                    self._looking = False
                    return
            over += [one for one in kept if self._is_over(one)]
            if over and (self._closing or time.monotonic() - over[0].since > _TOGETHER):
                with self._lock:
                    self._rows += 1
                _hand_on(self._beside, self._do_all, over)
                over = []

    def _is_over(self, one: _FollowUp) -> bool:
        """Whether nothing but what comes afterwards is left; else it is looked at again."""
        if self._closing:
            _carefully(one.part)
            one.part.join()
        now = time.monotonic()
        if one.part.over:
            one.since = now
            return True
        if now - one.since > _EVERY:
            _hand_on(self._workers, _carefully, one.part)
            one.since = float("inf")
        with self._lock:
            self._kept.append(one)
        return False

    def _do_all(self, over: list[_FollowUp]) -> None:
        """Follow up one after the other; behind a source that stalls, all at once."""
        try:
            for place, one in enumerate(over):
                begun = time.monotonic()
                _carefully(one.then)
                if time.monotonic() - begun > _SLOW:
                    for other in over[place + 1 :]:
                        _hand_on(self._beside, _carefully, other.then)
                    return
        finally:
            with self._lock:
                self._rows -= 1


def _hand_on(to: Executor, act: Callable[..., None], *given: Any) -> None:
    """Have another thread do something; as the process ends there are none, and this one does."""
    try:
        to.submit(act, *given)
    except RuntimeError:
        act(*given)


def _carefully(act: Callable[[], None]) -> None:
    """What fails here must not keep others from being followed up."""
    try:
        act()
    except Exception:
        log.exception("a pull was not followed up")
