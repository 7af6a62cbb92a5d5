"""Copies of requests of one shape: block ids go up, kernels that are at hand are launched.

Everything else is there before the request is: tables in pinned memory and on the device with
the lengths of all spans, events, and launches whose arguments do not change.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvatlas.geometry import Int64s, ceil_div
from kvatlas.routing import SpanPattern
from kvatlas.wire.transports.device_queue import AddressPattern, Posted, PreparedRuns, Tables

log = logging.getLogger("kvatlas.wire")

_TABLES = 4
"""Requests of one shape that may be under way at once."""
_ALIGNED = 16
"""Numbers that tables begin at multiples of: kernels load several at once."""


class LaunchDriver(Protocol):
    """What launches of prepared copies need of CUDA's driver; but for `on`, a device is current."""

    def on(self, device: int) -> AbstractContextManager[None]:
        """Makes a device the calling thread's own."""

    def upload(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from pinned memory, in the order of a stream."""

    def local_event(self, device: int) -> int:
        """An event of this process, to be recorded again and again."""

    def end_event(self, device: int, event: int) -> None:
        """Give an event back."""

    def synchronize(self, device: int, event: int) -> None:
        """Wait for what an event was last recorded behind."""

    def finished(self, device: int, event: int) -> bool:
        """Whether what an event was last recorded behind is done."""

    def record(self, event: int, stream: int) -> None:
        """Record an event behind what a stream has to do."""

    def order(self, event: int, before: int, stream: int) -> None:
        """What a stream is given from now on comes after another."""

    def capture(self, stream: int, act: Callable[[], None]) -> int:
        """What is given to a stream meanwhile, to be launched as often as wanted, and not now."""

    def launch_graph(self, graph: int, stream: int) -> None:
        """Launch what was captured."""

    def end_graph(self, device: int, graph: int) -> None:
        """Give back what was captured."""


class LaunchQueue(Protocol):
    """A stream, as far as launches of prepared copies need it."""

    lock: threading.Lock
    number: int
    programs: int

    @property
    def driver(self) -> LaunchDriver:
        """CUDA's driver."""

    @property
    def stream(self) -> Any:
        """The stream."""

    def placed(self, starts: tuple[Int64s, Int64s]) -> Any:
        """Starts on the device."""

    def buffers(self, nbytes: int) -> tuple[Any, Any]:
        """Pinned memory of the host, and as much of the GPU."""

    def wait_for_launches(self) -> None:
        """Wait for all that was launched, where something has failed."""


class TorchPreparedRuns(PreparedRuns):
    """Launches of one queue; any thread may use them."""

    def __init__(self, queue: LaunchQueue, patterns: Sequence[AddressPattern]) -> None:
        import torch

        from kvatlas.kernels import RepeatedCopy

        self._queue, self._patterns = queue, [one.pattern for one in patterns]
        self._stream, self._address = queue.stream, queue.stream.cuda_stream
        self._aside: Any = torch.cuda.Stream(queue.stream.device)  # type: ignore[no-untyped-call]
        """Where launches are captured: nobody else is ever given it."""
        self._captures = True
        self._caller_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._copies = [
            RepeatedCopy(
                source, target, queue.placed(pattern.template.starts.ends),
                pattern.template.length, pattern.bits, queue.programs,
            )
            for source, target, pattern in patterns
        ]  # fmt: skip
        self._tables = [_RequestTable(queue, self._patterns) for _ in range(_TABLES)]

    def post(self, src: Tables, dst: Tables) -> Posted | None:
        """Upload where blocks are, and launch."""
        queue = self._queue
        with queue.lock, queue.driver.on(queue.number):
            table = next((one for one in self._tables if one.free), None)
            if table is None:
                return None
            try:
                return self._post(table, src, dst)
            except BaseException:
                queue.wait_for_launches()
                raise

    def _post(self, table: _RequestTable, src: Tables, dst: Tables) -> Posted:
        driver, stream = self._queue.driver, self._address
        driver.order(table.caller, self._caller_stream(self._queue.number), stream)
        for pattern, rows in zip(self._patterns, table.rows, strict=True):
            pattern.fill(0, src, rows[0])
            pattern.fill(1, dst, rows[1])
        orders = tuple(
            copy.starts_first(rows[1]) for copy, rows in zip(self._copies, table.rows, strict=True)
        )
        graph = table.graphs.get(orders)
        if graph is not None:
            driver.launch_graph(graph, stream)
        else:
            self._launch(table, orders, self._stream)
        driver.record(table.over, stream)
        table.posted = _PostedTable(table)
        if graph is None and self._captures:
            self._capture(table, orders)
        return table.posted

    def _launch(self, table: _RequestTable, orders: tuple[bool, ...], stream: Any) -> None:
        """Upload a table, and launch its copies."""
        address = stream.cuda_stream
        self._queue.driver.upload(table.device_address, table.address, table.nbytes, address)
        for copy, spans, starts_first in zip(self._copies, table.spans, orders, strict=True):
            copy.launch(spans, stream, starts_first=starts_first)

    def _capture(self, table: _RequestTable, orders: tuple[bool, ...]) -> None:
        """Have one call launch all of it the next time: kernels are compiled now."""
        driver = self._queue.driver
        act = partial(self._launch, table, orders, self._aside)
        try:
            graph = driver.capture(self._aside.cuda_stream, act)
        except Exception:
            log.exception("copies are not captured, and launched one by one")
            self._captures = False
            return
        _at_its_end(table, driver.end_graph, self._queue.number, graph)
        table.graphs[orders] = graph


class _RequestTable:
    """Pinned memory for the spans of one request, as much of the device, and two events."""

    def __init__(self, queue: LaunchQueue, patterns: Sequence[SpanPattern]) -> None:
        import torch

        counts = [len(one.template.length) for one in patterns]
        sizes = [ceil_div(3 * count, _ALIGNED) * _ALIGNED for count in counts]
        begins = np.cumsum([0, *sizes]).tolist()
        pinned, device = queue.buffers(8 * begins[-1])
        here = pinned.view(torch.int64)
        there = device.view(torch.int64)
        self.address, self.device_address = pinned.data_ptr(), device.data_ptr()
        self.nbytes = pinned.nbytes
        parts = [(at, at + 3 * count, count) for at, count in zip(begins, counts, strict=False)]
        self.rows: list[Any] = [here[a:b].view(3, n).numpy() for a, b, n in parts]
        """Where spans lie at either end and how long they are, by pattern."""
        self.spans: list[Any] = [there[a:b].view(3, n) for a, b, n in parts]
        for one, rows in zip(patterns, self.rows, strict=True):
            rows[2] = one.template.length
        self.driver, self.number = queue.driver, queue.number
        self.caller, self.over = (self.driver.local_event(self.number) for _ in "ab")
        for event in (self.caller, self.over):
            _at_its_end(self, self.driver.end_event, self.number, event)
        self.posted: Posted | None = None
        self.graphs: dict[tuple[bool, ...], int] = {}
        """What launches all of it at once, by the orders in which kernels take their tables."""

    @property
    def free(self) -> bool:
        """Whether no copy under way reads it."""
        return self.posted is None or self.posted.done()


class _PostedTable(Posted):
    """A copy that was launched; it keeps its table, which must stay as long as it runs."""

    def __init__(self, table: _RequestTable) -> None:
        self._table: _RequestTable | None = table
        """Let go of once it is over: the table has the copy, and two that have each other stay."""

    def done(self) -> bool:
        """Whether the device has done it; seen before the event is recorded for another copy."""
        table = self._table
        if table is not None and table.driver.finished(table.number, table.over):
            self._table = None
        return self._table is None

    def wait(self) -> None:
        """Wait without holding up other threads."""
        table = self._table
        if table is not None:
            table.driver.synchronize(table.number, table.over)


def _at_its_end(owner: object, give_back: Callable[[int, int], None], device: int, it: int) -> None:
    """Give something of the driver's back when its owner goes, but not as the process ends."""
    weakref.finalize(owner, give_back, device, it).atexit = False
