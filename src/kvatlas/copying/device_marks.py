"""Marks: recorded points in a process's GPU work, which other operations can wait for.

A mark is recorded when blocks are offered, when a push into them is expected, and before a pull
fills them. Reads and writes of these blocks, in this process or another, then run after the kernels
that were launched before the mark.

A few events are reused in rotation. Events are recorded in order, so waiting for a reused event
also waits for the work before its earlier mark. If the oldest event has completed, its completion
is published, and the event is reused for the next mark. If the oldest event is still pending, the
latest event is recorded again instead. Other processes cannot rely on the events alone: on a device
with a long backlog, a reused event is pending again before they see that it completed. They
therefore also read the published marks.
"""

from __future__ import annotations

import threading
from typing import Protocol

from kvatlas.copying.cuda_driver import CudaDriver, DriverError
from kvatlas.errors import AtlasError, Code

EVENTS = 64
"""The number of events that marks use in rotation."""


class MarkBoard(Protocol):
    """Publishes completed marks to other processes."""

    def tell_done(self, number: int) -> None:
        """Publish that all marks up to and including `number` have completed."""


class DeviceMarks:
    """The marks of one device of this process."""

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self._driver, self._device = driver, device
        self._order = driver.streams.lend(device, self)
        """The stream that records events. It is given back even if `__init__` fails later."""
        self._events = [driver.make_event(device) for _ in range(EVENTS)]
        self._record = driver.recorder(device, self._order.address)
        self._lock = threading.Lock()
        self._made = 0
        self.done = -1
        """The number of the last mark that is known to have completed; -1 if there is none.

        The event of this mark may be reused.
        """
        self.board: MarkBoard | None = None
        """The board on which other processes read `done`; None if they cannot."""

    def mark(self) -> int:
        """Record a mark on the calling thread's current stream, and return its number."""
        try:
            with self._lock:
                return self._mark()
        except DriverError as problem:
            raise AtlasError(
                Code.WIRE_FAILED,
                "The GPU failed to record an event",
                got=str(problem),
                hint="Restart the process",
            ) from problem

    def _mark(self) -> int:
        # Reading the board is faster for a peer than querying an event of another process. If the
        # latest mark has completed, all earlier marks have completed too.
        last = self._made - 1
        if last > self.done and self._driver.finished(self._device, self.event(last)):
            self._tell_done(last)
        if self._made < EVENTS:
            self._made += 1
        elif self.passed(self._made - EVENTS):
            self._tell_done(max(self.done, self._made - EVENTS))
            self._made += 1
        # Otherwise the latest event is recorded again: its mark then covers the new work too. The
        # other events are not recorded again, so waiting for such an event ends.
        self._record(self.event(self._made - 1))
        return self._made - 1

    def _tell_done(self, number: int) -> None:
        """Publish that mark `number` has completed. Called before its event is reused."""
        self.done = number
        if self.board is not None:
            self.board.tell_done(number)

    def passed(self, number: int) -> bool:
        """Return whether the work before mark `number` has completed."""
        return number <= self.done or self._driver.finished(self._device, self.event(number))

    def event(self, number: int) -> int:
        """Return the event that was recorded for mark `number`; raise an error after `close`."""
        events = self._events
        if not events:
            raise AtlasError(
                Code.WIRE_FAILED,
                "The transport is closed",
                got="a call after close()",
                hint="Open a new transport",
            )
        return events[number % EVENTS]

    def wait(self, number: int) -> None:
        """Block the host until the work before mark `number` has completed."""
        self._driver.synchronize(self._device, self.event(number))

    def export(self) -> tuple[bytes, ...]:
        """Return the IPC handles of the events; mark n uses event n modulo `EVENTS`."""
        return tuple(self._driver.export_event(self._device, event) for event in self._events)

    def close(self) -> None:
        """Destroy the events, and give back the stream that recorded them."""
        with self._lock:
            events, self._events = self._events, []
            self._order.give_back()
        for event in events:
            self._driver.end_event(self._device, event)
