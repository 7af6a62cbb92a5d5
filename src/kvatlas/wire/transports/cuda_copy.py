"""One copy on a GPU, from when it may be launched until it is known to be over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvatlas.copying.device_queue import Posted
from kvatlas.wire.transports.base import Handle
from kvatlas.wire.transports.pace import CopyPace

_SPIN = 2e-3
"""Seconds of polling without a pause."""

_LOOKS = 8
"""How often each poll queries the device."""


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
        self._launch, self._may_begin, self._check = launch, may_begin, check
        self._pace, self._launched, self._nbytes = pace, 0.0, nbytes
        self._ended = 0.0
        """When the copy was first known to be over."""
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
        """Launch the copy if that is allowed now."""
        with self._lock:
            if self._posted is not None or self._given_up:
                return
            if self._may_begin() and self._pace.may_begin():
                self._begun = self._launched = time.monotonic()
                self._posted, self._over = self._launch()

    def _poll(self) -> bool:
        if self._posted is None:
            self._check()  # the events of a link that was closed are gone
        self.begin()
        if self._is_over():
            return True
        self._check()
        return False

    def peek(self) -> bool:
        """Whether the device has finished the copy; queries several times."""
        posted = self._posted
        if posted is not None:
            for _ in range(_LOOKS):
                if posted.done():
                    self._ended = self._ended or time.monotonic()
                    return True
        return False

    def _is_over(self) -> bool:
        """Whether it was launched and has ended."""
        try:
            over = self.peek()
        except Exception:
            # The device has failed, and with it all that this process had it do.
            self._over()
            raise
        if over:
            self._over()
            launched, self._launched = self._launched, 0.0
            if launched:
                self._pace.took(launched, self._ended, self._nbytes())
        return over

    def _pause(self, seconds: float) -> None:
        """A gigabyte takes half a millisecond, and the shortest sleep a tenth of one."""
        super()._pause(0.0 if time.monotonic() - self._begun < _SPIN else seconds)

    def _release(self) -> None:
        """Never launched, if it was not yet."""
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
