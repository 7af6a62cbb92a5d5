"""Deferred work after pulls on the fast path: a thread cleans up and notifies the source.

The caller that waits for a launched pull also finishes it. The work after the pull is deferred: a
thread that is woken at once would take the interpreter lock from the caller. One thread does all
deferred work at intervals. It exits shortly after the work runs out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from kvatlas.wire.client.transfer import TransferPart
from kvatlas.wire.quarantine import carefully

_EVERY = 2e-3
"""Seconds between checks."""

_LINGER = 0.1
"""Seconds that the thread keeps polling without work, because waking a thread takes longer."""

_TOGETHER = 6e-3
"""Seconds by which a notification is delayed, so that it covers several consecutive pulls."""

_SLOW = 0.05
"""Seconds after which other notifications stop waiting for a source that does not answer."""


@dataclass
class _FollowUp:
    part: TransferPart
    then: Callable[[], None]
    since: float = field(default_factory=time.monotonic)


class FollowUps:
    """Launched pulls that still need cleanup. Any thread may add a pull."""

    def __init__(self, workers: Executor, background: Executor) -> None:
        self._workers, self._background = workers, background
        self._kept: list[_FollowUp] = []
        self._lock = threading.Lock()
        self._looking = self._closing = False
        self._rows = 0
        """The number of batches of pulls whose follow-up is in progress."""

    def add(self, part: TransferPart, then: Callable[[], None]) -> None:
        """Call `then` after `part` has finished. Run `part` if no other thread does so soon."""
        with self._lock:
            self._kept.append(_FollowUp(part, then))
            start, self._looking = not self._looking, True
        if start:
            _submit(self._background, self._look)

    def close(self) -> None:
        """Finish all pulls before the worker threads end. Nothing can be added after this."""
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
                _submit(self._background, self._do_all, over)
                over = []

    def _is_over(self, one: _FollowUp) -> bool:
        """Whether a pull is finished, so that its follow-up can run.

        If no other thread finishes the pull, a worker thread does. An unfinished pull is checked
        again later.
        """
        if self._closing:
            carefully(one.part)
            one.part.join()
        now = time.monotonic()
        if one.part.over:
            one.since = now
            return True
        if now - one.since > _EVERY:
            _submit(self._workers, carefully, one.part)
            one.since = float("inf")
        with self._lock:
            self._kept.append(one)
        return False

    def _do_all(self, over: list[_FollowUp]) -> None:
        """Run the follow-ups in order. After a slow follow-up, run the rest in parallel."""
        try:
            for place, one in enumerate(over):
                begun = time.monotonic()
                carefully(one.then)
                if time.monotonic() - begun > _SLOW:
                    for other in over[place + 1 :]:
                        _submit(self._background, carefully, other.then)
                    return
        finally:
            with self._lock:
                self._rows -= 1


def _submit(to: Executor, act: Callable[..., None], *given: Any) -> None:
    """Submit `act(*given)` to an executor, or call it here if the executor is shut down."""
    try:
        to.submit(act, *given)
    except RuntimeError:
        act(*given)
