"""Copies prepared for requests that differ only in block ids: write the ids, launch kernels.

Everything except the block ids exists before the request arrives: span offsets on the device,
pinned memory, events, and launches with fixed arguments. Requests that differ only in block ids
have the same shape. The pinned memory and the events belong to the queue, and requests of all
shapes use both in rotation. The GPU reads block ids from pinned memory, because an upload of a few
kilobytes would take longer. Work that can overlap the copy is done after the launch.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from kvatlas.copying.device_queue import AddressPattern, Posted, PreparedRuns, Tables
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import ceil_div
from kvatlas.specs.cell_formats import ElementCast

log = logging.getLogger("kvatlas.wire")

_TABLES = 4
"""The maximum number of requests in flight on one queue."""
_ALIGNED = 16
"""Groups of block ids start at multiples of this, because kernels load several ids at once."""
MOST_IDS = 1 << 14
"""The maximum number of block ids of a request."""
_WRITTEN_AT_ONCE = 500
"""The maximum number of block ids per numpy assignment: for more, numpy releases the GIL."""
_LOOKS = 64
"""One in this many polls queries the driver; the others read the completion word.

The word is faster to read, but only the driver reports a failed device.
"""


class LaunchDriver(Protocol):
    """The driver calls that prepared launches need. All but `on` require a current device."""

    def on(self, device: int) -> AbstractContextManager[None]:
        """Make a device current for the calling thread."""

    def write_word(self, to: int, number: int, stream: int) -> bool:
        """Write 32 bits to pinned memory in stream order. Return False if this is not supported."""

    def local_event(self, device: int) -> int:
        """Create an event for use in this process; it can be recorded any number of times."""

    def end_event(self, device: int, event: int) -> None:
        """Destroy an event."""

    def synchronize(self, device: int, event: int) -> None:
        """Wait for the work before the last recording of an event."""

    def finished(self, device: int, event: int) -> bool:
        """Return whether the work before the last recording of an event has completed."""

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream."""

    def order(self, event: int, before: int, stream: int) -> None:
        """Make `stream` wait, through `event`, for the work on stream `before`."""

    def capture(self, stream: int, act: Callable[[], None]) -> int:
        """Capture the work that `act` queues on a stream, without running it. Return the graph."""

    def launch_graph(self, graph: int, stream: int) -> None:
        """Launch a captured graph."""

    def end_graph(self, device: int, graph: int) -> None:
        """Destroy a captured graph."""


class LaunchQueue(Protocol):
    """The attributes and methods of a queue that prepared launches need."""

    lock: threading.Lock
    number: int
    programs: int
    closed: bool
    """Whether the queue has given its streams back."""

    @property
    def driver(self) -> LaunchDriver:
        """The CUDA driver."""

    @property
    def stream(self) -> Any:
        """The queue's stream."""

    @property
    def caller_stream(self) -> Callable[[int], int]:
        """A function that returns the address of the caller's current stream on a device."""

    def another_stream(self) -> Any:
        """Return another stream of the device, reserved until the queue is closed."""

    @property
    def tables(self) -> LaunchTables:
        """The block tables that prepared launches use in rotation."""

    def placed(self, starts: tuple[Int64s, Int64s]) -> Any:
        """Return starts (source offsets and target offsets) as a table in device memory."""

    def scales(self, starts: tuple[Int64s, Int64s], which: Int64s | None, cast: ElementCast) -> Any:
        """Return the scales of `cast` in device memory, for starts that `placed` returned."""

    def on_stream(self) -> AbstractContextManager[None]:
        """Return a context in which the stream is current."""

    def pinned(self, nbytes: int) -> Any:
        """Allocate host memory that the GPU can access."""

    def wait_for_launches(self) -> None:
        """After a launch has failed, wait for the earlier launches, which may still write."""


class LaunchTables:
    """Pinned block tables for the requests in flight on a queue."""

    def __init__(self, queue: LaunchQueue) -> None:
        self.all = [RequestTable(queue) for _ in range(_TABLES)]
        self.aside = queue.another_stream()
        """The stream on which launches are captured."""
        self.captures = True
        """Whether launches can be captured; False after a capture has failed."""

    def free(self) -> RequestTable | None:
        """Return a table that no copy in flight reads; None if there is none."""
        for table in self.all:
            if table.posted is None or table.posted.done():
                return table
        return None


class RequestTable:
    """Pinned memory for one request's block ids and a 32-bit completion word, plus two events."""

    def __init__(self, queue: LaunchQueue) -> None:
        import torch

        self.pinned: Any = queue.pinned(8 * (MOST_IDS + _ALIGNED)).view(torch.int64)
        """The memory as a tensor, for kernels. `ids` is the same memory as an array."""
        self.ids: Int64s = self.pinned.numpy()
        self.word = memoryview(self.ids[MOST_IDS:]).cast("B").cast("I")
        """The number of the last completed copy, written by the device."""
        self.word_address: int = self.pinned.data_ptr() + 8 * MOST_IDS
        self.word[0] = self.copies = 0
        self.driver, self.number = queue.driver, queue.number
        self.caller, self.over = (self.driver.local_event(self.number) for _ in "ab")
        for event in (self.caller, self.over):
            _destroy_with(self, self.driver.end_event, self.number, event)
        self.posted: Posted | None = None


class GroupIds(NamedTuple):
    """The position of one group's source or destination ids among all block ids of a request.

    >>> GroupIds(end=1, group=0, first=2, blocks=2).among([7, 8, 3, 5])
    [3, 5]
    """

    end: int
    group: int
    first: int
    blocks: int

    def among(self, ids: Any) -> Any:
        """Return the block ids of this group, out of the ids of all groups of a request."""
        return ids[self.first : self.first + self.blocks]

    def pieces(self, ids: Int64s) -> Iterator[_Piece]:
        """Yield (end, group, slice of the group's block table, part of `ids` to write it to).

        `end` is 0 for source ids, 1 for destination ids. Each piece is written by one assignment.
        """
        mine = self.among(ids)
        for first in range(0, self.blocks, _WRITTEN_AT_ONCE):
            part = slice(first, min(self.blocks, first + _WRITTEN_AT_ONCE))
            yield self.end, self.group, part, mine[part]


_Piece = tuple[int, int, slice, Int64s]
"""(0 for source or 1 for destination, group, slice of its block table, memory to write it to)."""


class _TableLaunches:
    """Launches for requests of one shape, which read their block ids from one `RequestTable`."""

    def __init__(self, copies: list[Any], pieces: list[_Piece]) -> None:
        self.copies, self.pieces = copies, pieces
        self.graph: int | None = None
        """The graph of all launches; None before they are captured."""


class TorchPreparedRuns(PreparedRuns):
    """Prepared launches for requests that differ only in block ids. Any thread may use them."""

    def __init__(self, queue: LaunchQueue, patterns: Sequence[AddressPattern]) -> None:
        """Prepare launches that copy `patterns` on `queue`; `fits(patterns)` must be true."""
        self._queue, self._tables = queue, queue.tables
        self._address = queue.stream.cuda_stream
        self._patterns, self._groups = patterns, group_ids(patterns)
        first = self._tables.all[0]
        self._made = {first: self._make(first)}
        """Launches by table. Most copies use the first table; other launches are made on demand."""
        self._launched = 0

    def post(self, source: Tables, destination: Tables) -> Posted | None:
        """Write the block ids to a pinned table and launch. Return None if no table is free."""
        queue = self._queue
        with queue.lock, queue.driver.on(queue.number):
            table = None if queue.closed else self._tables.free()
            if table is None:
                return None
            try:
                return self._post(table, (source, destination))
            except BaseException:
                queue.wait_for_launches()
                raise

    def _post(self, table: RequestTable, tables: tuple[Tables, Tables]) -> Posted:
        queue, stream = self._queue, self._address
        driver, made = queue.driver, self._made.get(table)
        if made is None:
            made = self._made[table] = self._make(table)
        for end, group, part, place in made.pieces:
            place[:] = tables[end][group][part]
        driver.order(table.caller, queue.caller_stream(queue.number), stream)
        graph = made.graph
        if graph is not None:
            driver.launch_graph(graph, stream)
        else:
            _launch_all(made.copies, queue.stream)
        # The copy is running now.
        table.copies = table.copies % 0xFFFFFFFF + 1
        told = driver.write_word(table.word_address, table.copies, stream)
        driver.record(table.over, stream)
        table.posted = PostedTable(table, self, told=told)
        self._launched += 1
        if graph is None and self._launched > 1 and self._tables.captures:
            self._capture(made)
        return table.posted

    def _make(self, table: RequestTable) -> _TableLaunches:
        """Build the kernel launches that read the block ids in `table`, without running them."""
        pieces = [piece for one in self._groups for piece in one.pieces(table.ids)]
        return _TableLaunches(_copies(self._queue, self._patterns, self._groups, table), pieces)

    def _capture(self, made: _TableLaunches) -> None:
        """Capture the launches in a graph, so that the next request needs only one launch.

        Called for the second request, because a capture needs compiled kernels. The first request
        compiles them.
        """
        driver, aside = self._queue.driver, self._tables.aside
        try:
            graph = driver.capture(aside.cuda_stream, lambda: _launch_all(made.copies, aside))
        except Exception:
            log.exception("cannot capture copies in a CUDA graph, launching kernels one by one")
            self._tables.captures = False
            return
        _destroy_with(self, driver.end_graph, self._queue.number, graph)
        made.graph = graph


class PostedTable(Posted):
    """A launched copy. It keeps its table and its launches alive while it runs."""

    def __init__(self, table: RequestTable, runs: object, *, told: bool) -> None:
        self._table: RequestTable | None = table
        """Cleared once the copy is over, to break the reference cycle with the table."""
        self._runs, self._number, self._told = runs, table.copies, told
        self._looks = 0

    def done(self) -> bool:
        """Return whether the device has completed the copy."""
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
        """Wait for the copy without blocking other Python threads."""
        table = self._table
        if table is not None:
            table.driver.synchronize(table.number, table.over)


def group_ids(patterns: Sequence[AddressPattern]) -> list[GroupIds]:
    """Return the position of each group's block ids in a `RequestTable`.

    Only groups that the patterns use are included.
    """
    used: dict[tuple[int, int], int] = {}
    for one in patterns:
        for end in (0, 1):
            key = end, one.pattern.groups[end]
            last = int(one.pattern.template.entries[end].max())
            used[key] = max(used.get(key, 0), last + 1)
    placed, first = [], 0
    for (end, group), blocks in used.items():
        placed.append(GroupIds(end, group, first, blocks))
        first += ceil_div(blocks, _ALIGNED) * _ALIGNED
    return placed


def fits(patterns: Sequence[AddressPattern]) -> bool:
    """Return whether patterns use block ids, and all of these ids fit into one `RequestTable`."""
    tables = group_ids(patterns)
    return bool(tables) and tables[-1].first + tables[-1].blocks <= MOST_IDS


def _copies(
    queue: LaunchQueue,
    patterns: Sequence[AddressPattern],
    groups: Sequence[GroupIds],
    table: RequestTable,
) -> list[Any]:
    """Return one `RepeatedCopy` per pattern. All read their block ids from `table`."""
    from kvatlas.copying.address_runs import BlockSpans, RepeatedCopy

    ids = {(one.end, one.group): one.among(table.pinned) for one in groups}
    copies = []
    for read_at, write_at, pattern, blocks in patterns:
        made = pattern.template
        spans = BlockSpans(made.entries, made.offsets, made.length, pattern.strides, blocks)
        source, destination = ids[0, pattern.groups[0]], ids[1, pattern.groups[1]]
        starts, scales = queue.placed(made.starts.ends), None
        if pattern.cast is not None:
            which = made.starts.scales
            scales = pattern.cast, queue.scales(made.starts.ends, which, pattern.cast)
        ends, block_ids = (read_at, write_at), (source, destination)
        with queue.on_stream():
            copies.append(RepeatedCopy(ends, starts, spans, block_ids, queue.programs, scales))
    return copies


def _launch_all(copies: Sequence[Any], stream: Any) -> None:
    for copy in copies:
        copy.launch(stream)


def _destroy_with(
    owner: object, destroy: Callable[[int, int], None], device: int, handle: int
) -> None:
    """Call `destroy(device, handle)` when `owner` is garbage collected, but not at process exit."""
    weakref.finalize(owner, destroy, device, handle).atexit = False
