"""How much of a GPU's time copies take beside what else runs there.

A copy at full speed takes all of the memory's bandwidth for a moment: that costs whatever
runs beside it less than the same bytes at a trickle, which hold multiprocessors for long. So
copies run at full speed, and pauses between them keep their share of the time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

ALLOWANCE = 10e-3
"""Seconds that copies which were long apart may take at once."""

_SLOWEST = 500e9
"""Bytes per second, at least, of a copy that runs: what takes longer has waited for the GPU."""


class CopyPace:
    """Says when the next copy may begin, so that in the long run copies take a share of the time.

    What was not used is saved up, so that a copy after a quiet time begins at once.

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
        """Bytes per second of the last copy."""
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
        """When a copy should be over, where it is as fast as the last; never, before there is one.

        >>> pace = CopyPace(1.0)
        >>> pace.end_of(100, begun=5.0)
        inf
        >>> pace.took(7.0, 7.5, nbytes=200)
        >>> pace.end_of(100, begun=9.0)
        9.25
        """
        return begun + nbytes / self._rate if self._rate else math.inf

    def took(self, begun: float, ended: float, nbytes: int) -> None:
        """A copy was under way between two moments; time that others took as well counts once.

        A copy of so many bytes that took long did not run all the while: kernels of other
        processes, which a GPU takes in turns, or a host that looked late, are not its doing.
        """
        with self._lock:
            seconds = max(0.0, ended - max(begun, self._ended))
            self._saved -= min(seconds, nbytes / _SLOWEST)
            if seconds:
                self._rate = nbytes / seconds
            self._ended = max(self._ended, ended)
