"""Limits the share of GPU time that copies take from other work.

A fast copy uses all memory bandwidth for a short time. That slows down concurrent kernels less than
a slow copy of the same bytes, which occupies multiprocessors for longer. So copies run at full
speed, and pauses between them limit their share of the time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

ALLOWANCE = 10e-3
"""The maximum copy time in seconds that can be saved up during pauses."""

_SLOWEST = 500e9
"""The minimum bandwidth of a running copy in bytes per second. A slower one was interrupted."""


class CopyPace:
    """Decides when the next copy may begin, so that copies take a limited share of GPU time.

    Unused time is saved up, so that a copy after a pause begins at once.

    >>> now = [0.0]
    >>> pace = CopyPace(0.05, clock=lambda: now[0])
    >>> pace.may_begin()
    True
    >>> now[0] = 0.02
    >>> pace.took(0.0, 0.02, 20 << 30)  # 10 ms more than was saved up
    >>> pace.may_begin()
    False
    >>> now[0] = 0.23
    >>> pace.may_begin()
    True
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._saved, self._at = ALLOWANCE, clock()
        self._ended = 0.0
        self._rate = 0.0
        """The bytes per second of the last copy."""
        self._lock = threading.Lock()

    def may_begin(self) -> bool:
        """Whether a copy may begin now."""
        if self._share >= 1:
            return True
        with self._lock:
            now = self._clock()
            self._saved = min(ALLOWANCE, self._saved + (now - self._at) * self._share)
            self._at = now
            return self._saved > 0

    def end_of(self, nbytes: int, begun: float) -> float:
        """Return the estimated end of a copy, from the speed of the last one; infinity if unknown.

        >>> pace = CopyPace(1.0)
        >>> pace.end_of(100, begun=5.0)
        inf
        >>> pace.took(7.0, 7.5, nbytes=200)
        >>> pace.end_of(100, begun=9.0)
        9.25
        """
        return begun + nbytes / self._rate if self._rate else math.inf

    def took(self, begun: float, ended: float, nbytes: int) -> None:
        """Record the start and end of a copy. Time that overlaps another copy counts once.

        At most the time for `_SLOWEST` counts: a copy that took longer did not run all the time,
        because the GPU ran kernels of other processes, or the host polled late.
        """
        with self._lock:
            seconds = max(0.0, ended - max(begun, self._ended))
            self._saved -= min(seconds, nbytes / _SLOWEST)
            if seconds:
                self._rate = nbytes / seconds
            self._ended = max(self._ended, ended)
