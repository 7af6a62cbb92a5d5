"""Copies of requests of one shape: block ids go up, kernels that are at hand are launched.

Everything else is there before the request is: tables in pinned memory and on the device with
the lengths of all spans, events, and launches whose arguments do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from kvatlas.geometry import Int64s, ceil_div
from kvatlas.wire.transports.device_queue import AddressPattern, Posted, PreparedRuns, Tables

_TABLES = 4
"""Requests of one shape that may be under way at once."""
_ALIGNED = 16
"""Numbers that tables begin at multiples of: kernels load several at once."""


class LaunchQueue(Protocol):
    """A stream, as far as launches of prepared copies need it."""

    programs: int

    def placed(self, starts: tuple[Int64s, Int64s]) -> Any:
        """Starts on the device."""

    def buffers(self, nbytes: int) -> tuple[Any, Any]:
        """Pinned memory of the host, and as much of the GPU."""

    def caller_stream(self) -> Any:
        """The stream that the caller uses now."""

    def posting(self) -> AbstractContextManager[Any]:
        """The stream, for one thread at a time, with its device as the current one."""

    def upload(self, to: int, source: int, nbytes: int) -> None:
        """Copy from pinned memory in the order of the stream."""


class TorchPreparedRuns(PreparedRuns):
    """Launches of one queue; any thread may use them."""

    def __init__(self, queue: LaunchQueue, patterns: Sequence[AddressPattern]) -> None:
        from kvatlas.kernels import RepeatedCopy

        self._queue, self._patterns = queue, patterns
        self._copies = [
            RepeatedCopy(
                source, target, queue.placed(pattern.template.starts[:2]),
                pattern.template.length, pattern.bits, queue.programs,
            )
            for source, target, pattern in patterns
        ]  # fmt: skip
        self._tables = [_RequestTable(queue, patterns) for _ in range(_TABLES)]

    def post(self, src: Tables, dst: Tables) -> Posted | None:
        """Upload where blocks are, and launch."""
        queue = self._queue
        with queue.posting() as stream:
            table = next((one for one in self._tables if one.free), None)
            if table is None:
                return None
            table.caller.record(queue.caller_stream())
            stream.wait_event(table.caller)
            for (_, _, pattern), rows in zip(self._patterns, table.rows, strict=True):
                pattern.fill(0, src, rows[0])
                pattern.fill(1, dst, rows[1])
            queue.upload(table.device.data_ptr(), table.address, table.nbytes)
            for copy, rows, spans in zip(self._copies, table.rows, table.spans, strict=True):
                apart = abs(int(rows[1, 1]) - int(rows[1, 0])) if rows.shape[1] > 1 else 0
                copy.launch(spans, apart, stream)
            table.over.record(stream)
            table.posted = _PostedTable(table.over, table)
            return table.posted


class _RequestTable:
    """Pinned memory for the spans of one request, as much of the device, and two events."""

    def __init__(self, queue: LaunchQueue, patterns: Sequence[AddressPattern]) -> None:
        import torch

        counts = [len(one.pattern.template.length) for one in patterns]
        sizes = [ceil_div(3 * count, _ALIGNED) * _ALIGNED for count in counts]
        begins = np.cumsum([0, *sizes]).tolist()
        pinned, self.device = queue.buffers(8 * begins[-1])
        here = pinned.view(torch.int64)
        there = self.device.view(torch.int64)
        self._pinned, self.address, self.nbytes = pinned, pinned.data_ptr(), pinned.nbytes
        parts = [(at, at + 3 * count, count) for at, count in zip(begins, counts, strict=False)]
        self.rows: list[Any] = [here[a:b].view(3, n).numpy() for a, b, n in parts]
        """Where spans lie at either end and how long they are, by pattern."""
        self.spans: list[Any] = [there[a:b].view(3, n) for a, b, n in parts]
        for one, rows in zip(patterns, self.rows, strict=True):
            rows[2] = one.pattern.template.length
        self.caller: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.over: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.posted: Posted | None = None

    @property
    def free(self) -> bool:
        """Whether no copy under way reads it."""
        return self.posted is None or self.posted.done()


class _PostedTable(Posted):
    """A copy that was launched, and what must stay as long as it runs."""

    def __init__(self, event: Any, keep: object) -> None:
        self._event, self._keep = event, keep
        self._over = False

    def done(self) -> bool:
        """Whether the device has done it; seen before the event is recorded for another copy."""
        self._over = self._over or bool(self._event.query())
        return self._over

    def wait(self) -> None:
        """Wait without holding up other threads."""
        if not self._over:
            self._event.synchronize()
