"""A queue that launches the copy kernel on a torch stream, with minimal host work."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvatlas.copying.cuda_streams import LentStream, StreamStock
from kvatlas.copying.device_queue import (
    AddressPattern,
    AddressRuns,
    DeviceQueue,
    Posted,
    PreparedRuns,
)
from kvatlas.copying.torch_prepared import (
    LaunchDriver,
    LaunchTables,
    TorchPreparedRuns,
    fits,
)
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.specs.cell_formats import ElementCast

_KEPT_STARTS = 256
"""The maximum number of start tables that a queue keeps on its device."""
_SLOTS = 32
"""The number of memory slots that a queue reuses for span tables."""
_SLOT_BYTES = 64 << 10
"""The size of a slot for a span table. Larger tables get separate memory."""


class QueueDriver(LaunchDriver, Protocol):
    """The driver calls that a queue needs."""

    @property
    def streams(self) -> StreamStock:
        """Streams for copies and marks only. torch does not hand them out for other work."""

    def upload(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from pinned memory in stream order."""

    def download(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy into pinned memory in stream order."""

    def stream_waits(self, device: int, stream: int, event: int) -> None:
        """Make a stream wait for an event."""


class TorchQueue(DeviceQueue):
    """A queue of copy operations on one stream of one device. Any thread may use it."""

    def __init__(self, driver: QueueDriver, device: int, multiprocessors: int) -> None:
        import torch

        self.driver, self.number, self.programs = driver, device, multiprocessors
        self._device = torch.device("cuda", device)
        self._lent: list[LentStream] = []
        self.closed = False
        """Whether the queue has given its streams back."""
        self._stream = self.another_stream()
        self.caller_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._starts: OrderedDict[int, _KeptStarts] = OrderedDict()
        self._slots = [_TableSlot() for _ in range(_SLOTS)]
        self._used = 0
        self._tables: LaunchTables | None = None
        self.lock = threading.Lock()
        """Held while work is posted."""
        self._ordering = threading.Lock()
        """Held while the stream is made to wait. Kernels are never compiled under it."""

    @property
    def stream(self) -> Any:
        """The queue's stream, for other work in the same order."""
        return self._stream

    def another_stream(self) -> Any:
        """Return another stream of the device, reserved until this queue is closed."""
        import torch

        lent = self.driver.streams.lend(self.number, self)
        self._lent.append(lent)
        return torch.cuda.ExternalStream(lent.address, self._device)  # type: ignore[no-untyped-call]

    def after(self, event: int) -> None:
        """Make the stream wait for an event."""
        with self._ordering:
            self._check_open()
            self.driver.stream_waits(self.number, self._stream.cuda_stream, event)

    def after_caller(self) -> None:
        """Make the stream wait for the work queued on the caller's current stream."""
        import torch

        with self._ordering:
            self._check_open()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def post(self, runs: Sequence[AddressRuns], **choice: Any) -> Posted:
        """Launch one kernel for each item of `runs`. `choice` overrides the launch parameters."""
        with self._posting(), self.driver.on(self.number):
            return self._launch(runs, choice)

    def converts(self, cast: ElementCast) -> bool:
        """Return whether the device supports both element types of `cast`."""
        from kvatlas.copying.address_runs import can_convert

        return can_convert(cast, self._device)

    def prepare(self, patterns: Sequence[AddressPattern]) -> PreparedRuns | None:
        """Prepare launches for requests that differ only in block ids.

        Return None if a request has too many block ids.
        """
        with self._posting():
            return TorchPreparedRuns(self, patterns) if fits(patterns) else None

    @property
    def tables(self) -> LaunchTables:
        """The block tables that prepared launches use in rotation; created on first use."""
        if self._tables is None:
            self._tables = LaunchTables(self)
        return self._tables

    def wait_for_launches(self) -> None:
        """After a launch has failed, wait for the earlier launches, which may still write."""
        with suppress(Exception):  # a failed device writes nothing
            TorchPosted(self._stream).wait()

    def through(
        self, runs: Sequence[AddressRuns], host: Any, gpu: Any, nbytes: int, *, out: bool
    ) -> Posted:
        """Copy `nbytes` bytes between pools and buffer `host`, through GPU buffer `gpu`.

        The direction is pools to host if `out` is true, otherwise host to pools.
        """
        with self._posting(), self.on_stream(), self._no_launch_left_behind():
            if not out:
                gpu[:nbytes].copy_(host[:nbytes], non_blocking=True)
            posted = self._launch(runs, {})
            if out:
                host[:nbytes].copy_(gpu[:nbytes], non_blocking=True)
                posted = TorchPosted(self._stream)
            return posted

    def staged(
        self, runs: Sequence[AddressRuns], stretches: Sequence[tuple[int, int, int]], *, out: bool
    ) -> Posted:
        """Copy between pools and pinned host memory, through a buffer on the GPU.

        `runs` are between the pools and the buffer. `stretches` are between pinned memory and the
        buffer: (host address, address in the buffer, number of bytes). The direction is pools to
        host if `out` is true, otherwise host to pools.
        """
        stream = self._stream.cuda_stream
        with self._posting(), self.driver.on(self.number), self._no_launch_left_behind():
            if out:
                self._launch(runs, {})
            for host, gpu, nbytes in stretches:
                if out:
                    self.driver.download(host, gpu, nbytes, stream)
                else:
                    self.driver.upload(gpu, host, nbytes, stream)
            return TorchPosted(self._stream) if out else self._launch(runs, {})

    def close(self) -> None:
        """Release the streams. A second call has no effect."""
        with self.lock, self._ordering:
            self.closed = True
            for lent in self._lent:
                lent.give_back()

    @contextmanager
    def _posting(self) -> Iterator[None]:
        """Keep the queue open during the context. Raises an error if it is already closed."""
        with self.lock:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self.closed:
            raise AtlasError(
                Code.WIRE_FAILED,
                "The queue is closed",
                got="a call after close()",
                hint="Open a new queue",
            )

    def buffer(self, nbytes: int) -> Any:
        """Allocate GPU memory for use in stream order."""
        import torch

        with self.on_stream():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def buffers(self, nbytes: int) -> tuple[Any, Any]:
        """Return two new buffers of `nbytes` bytes: (pinned host memory, GPU memory)."""
        return self.pinned(nbytes), self.buffer(nbytes)

    def pinned(self, nbytes: int) -> Any:
        """Allocate host memory that the GPU can access."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make the queue's stream current during the context."""
        import torch

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def _launch(self, runs: Sequence[AddressRuns], choice: dict[str, Any]) -> TorchPosted:
        """Launch one kernel for each item of `runs`. The caller must hold the lock.

        Without the lock, a table could be overwritten before a kernel has read it.
        """
        from kvatlas.copying.address_runs import convert_address_runs, copy_address_runs

        use = {"programs": self.programs} | choice
        slots: list[_TableSlot] = []

        def placed(table: Int64s) -> Any:
            return self._uploaded(table, slots)

        with self._no_launch_left_behind():
            try:
                for one in runs:
                    told = one.source, one.target, self.placed(one.starts), one.spans
                    about = {"stream": self._stream, "place": placed, **use}
                    if one.cast is None:
                        copy_address_runs(*told, **about)
                    else:
                        scales = self.scales(one.starts, one.scales, one.cast)
                        convert_address_runs(*told, one.cast, scales, **about)
            finally:
                posted = TorchPosted(self._stream)
                for slot in slots:
                    slot.used_until = posted
        return posted

    @contextmanager
    def _no_launch_left_behind(self) -> Iterator[None]:
        """Wait for all launches of the queue if the context ends with an error."""
        try:
            yield
        except BaseException:
            self.wait_for_launches()
            raise

    def _uploaded(self, table: Int64s, slots: list[_TableSlot]) -> Any:
        """Return a table on the device, uploaded in stream order. Append its slot to `slots`."""
        import torch

        slot = self._slots[self._used % _SLOTS]
        in_use = slot.used_until is not None and not slot.used_until.done()
        if table.nbytes > _SLOT_BYTES or len(slots) == _SLOTS or in_use:
            with self.on_stream():
                whole = torch.from_numpy(table).pin_memory()
                return whole.to(self._device, non_blocking=True)
        self._used += 1
        if slot.used_until is None:
            with self.on_stream():
                slot.make(self._device)
        slots.append(slot)
        slot.here[: table.size] = table.reshape(-1)
        address, stream = slot.table.data_ptr(), self._stream.cuda_stream
        self.driver.upload(address, slot.address, table.nbytes, stream)
        return slot.table[: table.size].view(table.shape)

    def placed(self, starts: tuple[Int64s, Int64s]) -> Any:
        """Return starts (source offsets and target offsets) as a table in device memory.

        Tables are cached; the least recently used are evicted.
        """
        from kvatlas.copying.address_runs import place_starts

        if id(starts[0]) not in self._starts:
            with self.on_stream():
                placed = place_starts(*starts, self._device)
            self._starts[id(starts[0])] = _KeptStarts(starts, placed, {})
        self._starts.move_to_end(id(starts[0]))
        while len(self._starts) > _KEPT_STARTS:
            self._starts.popitem(last=False)
        return self._starts[id(starts[0])].placed

    def scales(self, starts: tuple[Int64s, Int64s], which: Int64s | None, cast: ElementCast) -> Any:
        """Return the scales of `cast` in device memory, for starts that `placed` returned.

        Start i has the scale with index `which[i]`, or with index 0 if `which` is None. The scales
        are cached with the starts.
        """
        from kvatlas.kernels.cast_scales import place_scales

        kept = self._starts[id(starts[0])]
        if cast not in kept.scales:
            with self.on_stream():
                made = place_scales(cast, which, len(starts[0]), self._device)
            kept.scales[cast] = made
        return kept.scales[cast]


class _KeptStarts(NamedTuple):
    """Starts (pairs of a source and a target offset) in device memory, and their scales."""

    starts: tuple[Int64s, Int64s]
    """The arrays that were uploaded. They are kept alive so that their `id` is not reused."""
    placed: Any
    scales: dict[ElementCast, Any]


class _TableSlot:
    """Pinned memory and device memory for one span table."""

    here: NDArray[np.int64]
    address: int
    table: Any
    used_until: Posted | None = None

    def make(self, device: Any) -> None:
        """Allocate the pinned memory and the device memory."""
        import torch

        count = _SLOT_BYTES // 8
        pinned = torch.empty(count, dtype=torch.int64, pin_memory=True)
        self.here, self.address = pinned.numpy(), pinned.data_ptr()
        self.table = torch.empty(count, dtype=torch.int64, device=device)


class TorchPosted(Posted):
    """The work that was queued on a stream before this object was created."""

    def __init__(self, stream: Any) -> None:
        self._event: Any = stream.record_event()

    def done(self) -> bool:
        """Return whether the stream has completed the work."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Wait for the work without blocking other Python threads."""
        self._event.synchronize()
