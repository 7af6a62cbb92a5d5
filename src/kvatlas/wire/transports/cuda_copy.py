"""Launch copies on a GPU, detect their end, and limit their share of the GPU's time.

A fast copy uses all memory bandwidth for a short time. That slows down concurrent kernels less than
a slow copy of the same bytes, which occupies multiprocessors for longer. So copies run at full
speed, and pauses between them limit their share of the time (`CopyPace`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvatlas.copying.device_queue import Posted, PreparedRuns, Tables
from kvatlas.wire.transports.base import PreparedRead
from kvatlas.wire.transports.handles import Handle
from kvatlas.wire.transports.opened_memory import MappedAllocation, OpenedMemory

_SPIN = 2e-3
"""Seconds during which `wait` polls without pauses."""

_LOOKS = 8
"""The maximum number of device queries per poll."""

ALLOWANCE = 10e-3
"""The maximum copy time in seconds that can be saved up during pauses."""

_SLOWEST = 500e9
"""The minimum bandwidth of a running copy in bytes per second. A slower copy was interrupted."""


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
        """Estimate when a copy of `nbytes` bytes ends, from the speed of the last copy.

        Times are in seconds. The result is infinity if there was no copy yet.

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

        A copy slower than `_SLOWEST` bytes per second counts as if it had that speed: it did not
        run all the time, because the GPU ran kernels of other processes, or the host polled late.
        """
        with self._lock:
            seconds = max(0.0, ended - max(begun, self._ended))
            self._saved -= min(seconds, nbytes / _SLOWEST)
            if seconds:
                self._rate = nbytes / seconds
            self._ended = max(self._ended, ended)


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
        """Create a copy that starts when `may_begin` returns True and `pace` permits it.

        `launch` starts the copy, and returns the posted copy and a function to call after the copy
        has ended. `check` raises an error if the link is closed. `nbytes` returns the size of the
        copy in bytes.
        """
        self._launch, self._may_begin, self._check = launch, may_begin, check
        self._pace, self._nbytes = pace, nbytes
        self._ended = 0.0
        """The time at which the copy was first seen to have ended; 0 before."""
        self._posted: Posted | None = None
        self._over: Callable[[], None] | None = None
        """Frees the resources of the copy, once it has ended."""
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
        """Wrap a copy that is already queued. `over` is called once the copy has ended."""
        copy = cls(lambda: (posted, over), lambda: True, check, pace, lambda: nbytes)
        copy._posted, copy._over = posted, over
        copy.expected_end = pace.end_of(nbytes, copy._begun)
        return copy

    def begin(self) -> None:
        """Launch the copy if it may begin now and was not launched before."""
        with self._lock:
            if self._posted is not None or self._given_up:
                return
            if self._may_begin() and self._pace.may_begin():
                self._begun = time.monotonic()
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
        """Whether the copy has ended. Queries the device several times before it returns False."""
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
            self._free()
            raise
        if over and self._free():
            self._pace.took(self._begun, self._ended, self._nbytes())
        return over

    def _free(self) -> bool:
        """Free the resources of a copy that has ended. Return whether this is the first call."""
        with self._lock:
            over, self._over = self._over, None
        if over is not None:
            over()
        return over is not None

    def _pause(self, seconds: float) -> None:
        """Sleep, except in the first `_SPIN` seconds after the launch.

        A sleep takes at least 0.1 ms, and a copy of 1 GB only 0.5 ms.
        """
        super()._pause(0.0 if time.monotonic() - self._begun < _SPIN else seconds)

    def _release(self) -> None:
        """Prevent the launch of the copy. A copy that was already launched continues."""
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


@dataclass(frozen=True)
class CudaPreparedRead(PreparedRead):
    """Prepared reads over one link, for requests that differ only in their block ids."""

    runs: PreparedRuns
    opened: OpenedMemory
    mapped: Sequence[MappedAllocation]
    """The peer's allocations, as they were mapped when the read was prepared."""
    passed: Callable[[int | None], bool]
    """Returns whether a GPU event of the peer has completed; True for None."""
    pace: CopyPace
    check: Callable[[], None]
    """Raises an error if the link is closed."""
    nbytes: int

    @property
    def stale(self) -> bool:
        """Whether the peer's memory is no longer mapped at the addresses of the prepared read."""
        return any(one.stale for one in self.mapped)

    def begin(self, source: Tables, destination: Tables, after_event: int | None) -> Handle | None:
        """Launch the read, if it may begin now and the peer's memory is still mapped."""
        self.check()
        if not self.passed(after_event) or not self.pace.may_begin():
            return None
        if not self.opened.hold(self.mapped):
            return None
        posted = None
        try:
            posted = self.runs.post(source, destination)
        finally:
            if posted is None:
                self._unused()
        if posted is None:
            return None
        return CudaCopy.launched(posted, self._unused, self.check, self.pace, self.nbytes)

    def _unused(self) -> None:
        self.opened.release(self.mapped)
