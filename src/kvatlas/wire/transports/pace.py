"""How much of a GPU's time copies take beside what else runs there.

A copy at full speed takes all of the memory's bandwidth for a moment: that costs whatever
runs beside it less than the same bytes at a trickle, which hold multiprocessors for long. So
copies run at full speed, and pauses between them keep their share of the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

ALLOWANCE = 4e-3
"""Seconds that copies which were long apart may take at once."""


class CopyPace:
    """Says when the next copy may begin, so that in the long run copies take a share of the time.

    What was not used is saved up, so that a copy after a quiet time begins at once.

    >>> now = [0.0]
    >>> pace = CopyPace(0.05, clock=lambda: now[0])
    >>> pace.may_begin()
    True
    >>> now[0] = 0.014
    >>> pace.took(0.0, 0.014)  # 10 ms more than was saved up
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

    def took(self, begun: float, ended: float) -> None:
        """A copy was under way between two moments; time that others took as well counts once."""
        with self._lock:
            self._saved -= max(0.0, ended - max(begun, self._ended))
            self._ended = max(self._ended, ended)
