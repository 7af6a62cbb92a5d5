"""Copies of requests of one shape: block ids go up, kernels that are at hand are launched.

Everything else is there before the request is: tables in pinned memory and on the device,
events, and launches whose arguments do not change. The tables are those of a queue, which all
shapes take in turn. What can be done while the copy runs is done once it was launched.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from kvatlas.geometry import Int64s, ceil_div
from kvatlas.routing import SpanPattern
from kvatlas.wire.transports.device_queue import AddressPattern, Posted, PreparedRuns, Tables

log = logging.getLogger("kvatlas.wire")

_TABLES = 4
"""Requests that may be under way at once on one queue."""
_ALIGNED = 16
"""Numbers that tables begin at multiples of: kernels load several at once."""
MOST_NUMBERS = 1 << 14
"""Numbers that a table has room for, three for each span."""
_LOOKS = 64
"""Looks at a word in memory for each that asks the driver, which says whether it has failed."""


class LaunchDriver(Protocol):
    """What launches of prepared copies need of CUDA's driver; but for `on`, a device is current."""

    def on(self, device: int) -> AbstractContextManager[None]:
        """Makes a device the calling thread's own."""

    def upload(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from pinned memory, in the order of a stream."""

    def write_word(self, to: int, number: int, stream: int) -> bool:
        """Write 32 bits to pinned memory, in the order of a stream; False where none can."""

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

    @property
    def caller_stream(self) -> Callable[[int], int]:
        """Finds the address of the caller's current stream of a device."""

    def another_stream(self) -> Any:
        """A stream of the same device that nobody else is ever given."""

    @property
    def tables(self) -> LaunchTables:
        """Tables that its launches take in turn."""

    def placed(self, starts: tuple[Int64s, Int64s]) -> Any:
        """Starts on the device."""

    def buffers(self, nbytes: int) -> tuple[Any, Any]:
        """Pinned memory of the host, and as much of the GPU."""

    def wait_for_launches(self) -> None:
        """Wait for all that was launched, where something has failed."""


class LaunchTables:
    """Tables of one queue, and a stream on which launches are captured."""

    def __init__(self, queue: LaunchQueue) -> None:
        self.all = [RequestTable(queue) for _ in range(_TABLES)]
        self.aside = queue.another_stream()
        self.captures = True
        """Whether launches can be captured."""

    def free(self) -> RequestTable | None:
        """One that no copy under way reads."""
        for table in self.all:
            if table.posted is None or table.posted.done():
                return table
        return None


class RequestTable:
    """Pinned memory for the spans of one request, as much of the device, a word, and two events."""

    def __init__(self, queue: LaunchQueue) -> None:
        import torch

        pinned, device = queue.buffers(8 * (MOST_NUMBERS + _ALIGNED))
        self.here: Int64s = pinned.view(torch.int64).numpy()
        self.there: Any = device.view(torch.int64)
        self.address, self.device_address = pinned.data_ptr(), device.data_ptr()
        self.word = memoryview(self.here[MOST_NUMBERS:]).cast("B").cast("I")
        """Behind the numbers: which copy was the last that ended, as the device writes it."""
        self.word_address = self.address + 8 * MOST_NUMBERS
        self.word[0] = self.copies = 0
        self.driver, self.number = queue.driver, queue.number
        self.caller, self.over = (self.driver.local_event(self.number) for _ in "ab")
        for event in (self.caller, self.over):
            _at_its_end(self, self.driver.end_event, self.number, event)
        self.posted: Posted | None = None
        self.lengths_of: object = None
        """Whose lengths stand in it."""


class _Part(NamedTuple):
    """What one kernel is launched for: where its spans are in a table."""

    pattern: SpanPattern
    copy: Any
    first: int
    spans: int

    def rows(self, numbers: Any) -> Any:
        """Offsets at either end, and lengths, in all numbers of a table."""
        return numbers[self.first : self.first + 3 * self.spans].reshape(3, self.spans)


class TorchPreparedRuns(PreparedRuns):
    """Launches of one queue; any thread may use them."""

    def __init__(self, queue: LaunchQueue, patterns: Sequence[AddressPattern]) -> None:
        """The spans of the patterns fit into a table: `fits` says so."""
        self._queue, self._tables = queue, queue.tables
        self._address = queue.stream.cuda_stream
        self._parts = list(_parts(queue, patterns))
        self._nbytes = 8 * (self._parts[-1].first + 3 * self._parts[-1].spans)
        self._rows: dict[RequestTable, list[Any]] = {}
        self._graphs: dict[RequestTable, int] = {}
        """What launches all of it at once, by the table that it is launched for."""
        self._launched = 0
        self._lengths = object()
        """Stands for the lengths of its spans."""

    def post(self, src: Tables, dst: Tables) -> Posted | None:
        """Upload where blocks are, and launch."""
        queue = self._queue
        with queue.lock, queue.driver.on(queue.number):
            table = self._tables.free()
            if table is None:
                return None
            try:
                return self._post(table, src, dst)
            except BaseException:
                queue.wait_for_launches()
                raise

    def _post(self, table: RequestTable, src: Tables, dst: Tables) -> Posted:
        driver, stream = self._queue.driver, self._address
        for part, (at, to, _) in zip(self._parts, self._rows_of(table), strict=True):
            part.pattern.fill(0, src, at)
            part.pattern.fill(1, dst, to)
        graph = self._graphs.get(table)
        driver.order(table.caller, self._queue.caller_stream(self._queue.number), stream)
        if graph is not None:
            driver.launch_graph(graph, stream)
        else:
            self._launch(table, self._queue.stream)
        # It runs from here on.
        table.copies = table.copies % 0xFFFFFFFF + 1
        told = driver.write_word(table.word_address, table.copies, stream)
        driver.record(table.over, stream)
        table.posted = PostedTable(table, self, told=told)
        self._launched += 1
        if graph is None and self._launched > 1 and self._tables.captures:
            self._capture(table)
        return table.posted

    def _rows_of(self, table: RequestTable) -> list[Any]:
        """Where spans go in a table, with their lengths in place."""
        rows = self._rows.get(table)
        if rows is None:
            rows = self._rows[table] = [part.rows(table.here) for part in self._parts]
        if table.lengths_of is not self._lengths:
            table.lengths_of = None
            for part, (_, _, lengths) in zip(self._parts, rows, strict=True):
                lengths[:] = part.pattern.template.length
            table.lengths_of = self._lengths
        return rows

    def _launch(self, table: RequestTable, stream: Any) -> None:
        """Upload a table, and launch its copies."""
        address = stream.cuda_stream
        self._queue.driver.upload(table.device_address, table.address, self._nbytes, address)
        for part in self._parts:
            part.copy.launch(part.rows(table.there), stream)

    def _capture(self, table: RequestTable) -> None:
        """Have one call launch all of it the next time: kernels are compiled now."""
        driver, aside = self._queue.driver, self._tables.aside
        try:
            graph = driver.capture(aside.cuda_stream, lambda: self._launch(table, aside))
        except Exception:
            log.exception("copies are not captured, and launched one by one")
            self._tables.captures = False
            return
        _at_its_end(self, driver.end_graph, self._queue.number, graph)
        self._graphs[table] = graph


class PostedTable(Posted):
    """A copy that was launched; it keeps its table, and what launched it, as long as it runs."""

    def __init__(self, table: RequestTable, runs: object, *, told: bool) -> None:
        self._table: RequestTable | None = table
        """Let go of once it is over: the table has the copy, and two that have each other stay."""
        self._runs, self._number, self._told = runs, table.copies, told
        self._looks = 0

    def done(self) -> bool:
        """Whether the device has done it; seen before its table is used for another copy."""
        table = self._table
        if table is None:
            return True
        self._looks += 1
        if self._told and self._looks % _LOOKS:
            over = table.word[0] == self._number
        else:
            over = table.driver.finished(table.number, table.over)
        if over:
            self._table = self._runs = None
        return over

    def wait(self) -> None:
        """Wait without holding up other threads."""
        table = self._table
        if table is not None:
            table.driver.synchronize(table.number, table.over)


def fits(patterns: Sequence[AddressPattern]) -> bool:
    """Whether the spans of some patterns have room in a table."""
    return bool(patterns) and sum(_numbers(one.pattern) for one in patterns) <= MOST_NUMBERS


def _numbers(pattern: SpanPattern) -> int:
    """Numbers of a table that a pattern's spans take."""
    return ceil_div(3 * len(pattern.template.length), _ALIGNED) * _ALIGNED


def _parts(queue: LaunchQueue, patterns: Sequence[AddressPattern]) -> Iterator[_Part]:
    from kvatlas.kernels import RepeatedCopy

    first = 0
    for source, target, pattern in patterns:
        made = pattern.template
        starts = queue.placed(made.starts[:2])
        about = made.length, pattern.bits, pattern.apart, queue.programs
        copy = RepeatedCopy(source, target, starts, *about)
        yield _Part(pattern, copy, first, len(made.length))
        first += _numbers(pattern)


def _at_its_end(owner: object, give_back: Callable[[int, int], None], device: int, it: int) -> None:
    """Give something of the driver's back when its owner goes, but not as the process ends."""
    weakref.finalize(owner, give_back, device, it).atexit = False
