"""Marks: what a process had told its GPU to do at some moment, for others to wait behind.

A mark is recorded when blocks are offered, expected or to be filled: whoever then reads or
writes them, in this process or in another, does so behind the kernels that were launched
before it. Events are few and used in turn. They are recorded one behind the other, so that
one which was used again since stands for more than it did, never for less. One that is not
done yet is not used again, but for the last, and that it was done is said before it is: of a
device that is far behind, nobody would ever see it.
"""

from __future__ import annotations

import threading

from kvatlas.wire.transports import errors
from kvatlas.wire.transports.cuda_driver import CudaDriver, DriverError
from kvatlas.wire.transports.offer_board import OfferBoard

EVENTS = 64
"""Events that marks take in turn."""


class DeviceMarks:
    """Marks of one device of this process."""

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self._driver, self._device = driver, device
        self._order = driver.streams.lend(device, self)
        """Where events are recorded; asked for first, since it comes back by itself."""
        self._events = [driver.make_event(device) for _ in range(EVENTS)]
        self._record = driver.recorder(device, self._order.address)
        self._lock = threading.Lock()
        self._made = 0
        self.done = -1
        """Marks up to this one are done, and their events may stand for others."""
        self.board: OfferBoard | None = None
        """Where other processes see that."""

    def mark(self) -> int:
        """Mark what the calling thread's current stream has to do; the number of the mark."""
        try:
            with self._lock:
                return self._mark()
        except DriverError as problem:
            raise errors.failed(
                f"a GPU that has failed: {problem}", hint="Restart the process"
            ) from problem

    def _mark(self) -> int:
        # Readers look at the board sooner than at an event of another process. The last that is
        # done has none behind it that is not, and so it is not recorded again.
        last = self._made - 1
        if last > self.done and self._driver.finished(self._device, self.event(last)):
            self._tell_done(last)
        if self._made < EVENTS:
            self._made += 1
        elif self.passed(self._made - EVENTS):
            self._tell_done(max(self.done, self._made - EVENTS))
            self._made += 1
        # Else the last stands for more: what somebody waits for is not put off for ever.
        self._record(self.event(self._made - 1))
        return self._made - 1

    def _tell_done(self, number: int) -> None:
        """Let everybody know of a mark that is done, before its event is recorded again."""
        self.done = number
        if self.board is not None:
            self.board.tell_done(number)

    def passed(self, number: int) -> bool:
        """Whether what was marked is done."""
        return number <= self.done or self._driver.finished(self._device, self.event(number))

    def event(self, number: int) -> int:
        """The event that stands for a mark; refused once they were given back."""
        events = self._events
        if not events:
            raise errors.closed("transport")
        return events[number % EVENTS]

    def wait(self, number: int) -> None:
        """Wait on the host until what was marked is done."""
        self._driver.synchronize(self._device, self.event(number))

    def export(self) -> tuple[bytes, ...]:
        """Handles of the events, in their order."""
        return tuple(self._driver.export_event(self._device, event) for event in self._events)

    def close(self) -> None:
        """Give the events back, and the stream that they were recorded in."""
        with self._lock:
            events, self._events = self._events, []
            self._order.give_back()
        for event in events:
            self._driver.end_event(self._device, event)
