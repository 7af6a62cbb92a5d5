"""One copy on a GPU: when it is launched, whether it has ended, how long it took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvatlas.copying.device_queue import Posted
from kvatlas.wire.transports.base import Handle
from kvatlas.wire.transports.pace import CopyPace

_SPIN = 2e-3
"""Seconds during which `wait` polls without pauses."""

_LOOKS = 8
"""The maximum number of device queries per poll."""


class CudaCopy(Handle):
    """A copy on a GPU. Once launched, it cannot be cancelled."""

    def __init__(
        self,
        launch: Callable[[], tuple[Posted, Callable[[], None]]],
        may_begin: Callable[[], bool],
        check: Callable[[], None],
        pace: CopyPace,
        nbytes: Callable[[], int],
    ) -> None:
        """`launch` starts the copy, and returns it and a function to call once it has ended.

        `check` raises an error if the link is closed.
        """
        self._launch, self._may_begin, self._check = launch, may_begin, check
        self._pace, self._launched, self._nbytes = pace, 0.0, nbytes
        self._ended = 0.0
        """The time at which the copy was first seen to have ended; 0 before."""
        self._posted: Posted | None = None
        self._over: Callable[[], None] = lambda: None
        self._given_up = False
        self._begun = time.monotonic()
        self._lock = threading.Lock()

    @classmethod
    def launched(
        cls,
        posted: Posted,
        over: Callable[[], None],
        check: Callable[[], None],
        pace: CopyPace,
        nbytes: int,
    ) -> CudaCopy:
        """Wrap a copy that is already queued. `over` is called once it has ended."""
        copy = cls(lambda: (posted, over), lambda: True, check, pace, lambda: nbytes)
        copy._posted, copy._over, copy._launched = posted, over, copy._begun
        copy.expected_end = pace.end_of(nbytes, copy._begun)
        return copy

    def begin(self) -> None:
        """Launch the copy if it may begin now and was not launched before."""
        with self._lock:
            if self._posted is not None or self._given_up:
                return
            if self._may_begin() and self._pace.may_begin():
                self._begun = self._launched = time.monotonic()
                self._posted, self._over = self._launch()

    def _poll(self) -> bool:
        if self._posted is None:
            self._check()  # a closed link has no events to query
        self.begin()
        if self._is_over():
            return True
        self._check()
        return False

    def peek(self) -> bool:
        """Whether the device has finished the copy. Queries the device several times."""
        posted = self._posted
        if posted is not None:
            for _ in range(_LOOKS):
                if posted.done():
                    self._ended = self._ended or time.monotonic()
                    return True
        return False

    def _is_over(self) -> bool:
        """Whether the copy was launched and has ended."""
        try:
            over = self.peek()
        except Exception:
            # The device has failed, so none of this process's copies is still running.
            self._over()
            raise
        if over:
            self._over()
            launched, self._launched = self._launched, 0.0
            if launched:
                self._pace.took(launched, self._ended, self._nbytes())
        return over

    def _pause(self, seconds: float) -> None:
        """Do not sleep at first: a sleep takes at least 0.1 ms, and a copy of 1 GB only 0.5 ms."""
        super()._pause(0.0 if time.monotonic() - self._begun < _SPIN else seconds)

    def _release(self) -> None:
        """Do not launch the copy anymore. A launched copy continues."""
        self._given_up = True

    def _settle(self) -> bool:
        """Whether the copy has ended, the device has failed, or the copy will never be launched."""
        with self._lock:
            if self._posted is None:
                return self._given_up or self._failure is not None
        try:
            return self._is_over()
        except Exception:
            return True
