"""The part of the CUDA driver API that transports use: IPC handles, events, stream order.

`CudaDriver` is an abstract class, so that its callers can be tested without a GPU. `LibCuda` calls
the driver's library, and torch for streams that launch kernels.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from kvatlas.copying.cuda_streams import StreamStock
from kvatlas.copying.device_queue import DeviceQueue
from kvatlas.copying.torch_queue import TorchQueue
from kvatlas.errors import AtlasError, Code

HANDLE_BYTES = 64
"""The size of an IPC handle of an allocation or an event, in bytes."""

UUID_BYTES = 16

_UNTIMED, _SHARED = 2, 4
"""Event flags: no timing, interprocess."""
_PEER_ACCESS = 1
_RELAXED = 2
"""`cudaStreamCaptureModeRelaxed`."""
_NON_BLOCKING = 1
"""Streams that do not synchronize with the default stream."""
_NOT_READY, _NOT_SUPPORTED = 600, 801


_AS_IT_IS = nullcontext()


class DriverError(Exception):
    """An error from the driver or its library."""


class CudaDriver(ABC):
    """The CUDA driver as transports use it. Devices are this process's device indices."""

    streams: StreamStock
    """Streams for copies and marks only. torch does not hand them out for other work."""

    @abstractmethod
    def devices(self) -> list[bytes]:
        """Return the UUID of each device that this process sees, by index."""

    @abstractmethod
    def allocation(self, device: int, address: int) -> tuple[int, int]:
        """Return (start address, size in bytes) of the allocation that contains an address."""

    @abstractmethod
    def export_memory(self, device: int, base: int) -> bytes:
        """Return an IPC handle of an allocation."""

    @abstractmethod
    def open_memory(self, device: int, handle: bytes) -> int:
        """Map another process's allocation. Return its address in this process."""

    @abstractmethod
    def close_memory(self, device: int, address: int) -> None:
        """Unmap an allocation that `open_memory` mapped, when no copy reads it anymore."""

    @abstractmethod
    def make_memory(self, device: int, nbytes: int) -> int:
        """Create a separate, zeroed allocation, which peers can map. Return its address."""

    @abstractmethod
    def end_memory(self, device: int, address: int, nbytes: int) -> None:
        """Set an allocation to zero and free it, when no copy accesses it anymore."""

    @abstractmethod
    def make_event(self, device: int) -> int:
        """Create an event that other processes can wait for."""

    @abstractmethod
    def export_event(self, device: int, event: int) -> bytes:
        """Return an IPC handle of an event."""

    @abstractmethod
    def open_event(self, device: int, handle: bytes) -> int:
        """Open another process's event. Return its address in this process."""

    @abstractmethod
    def end_event(self, device: int, event: int) -> None:
        """Destroy an event that this process created or opened."""

    @abstractmethod
    def synchronize(self, device: int, event: int) -> None:
        """Block the host until the work before the last recording of an event has completed."""

    @abstractmethod
    def finished(self, device: int, event: int) -> bool:
        """Return whether the work before the last recording of an event has completed."""

    @abstractmethod
    def recorder(self, device: int, stream: int) -> Callable[[int], None]:
        """Return a function that records an event on `stream`.

        When the returned function is called, it records the event after all work that is queued on
        the caller's current stream.
        """

    @abstractmethod
    def queue(self, device: int, multiprocessors: int) -> DeviceQueue:
        """Create a queue whose kernels use at most `multiprocessors` SMs; 0 means no limit."""


@lru_cache(maxsize=1)
def load_driver() -> CudaDriver:
    """Load the CUDA driver of this machine, or raise an error if there is none."""
    try:
        import torch

        if torch.cuda.is_available():
            return LibCuda()
        got = "torch sees no GPU"
    except (ImportError, OSError, AttributeError) as problem:
        got = f"{type(problem).__name__}: {problem}"
    raise AtlasError(
        Code.WRONG_DEVICE,
        "No CUDA device is available to this process",
        got=got,
        hint="Install a CUDA driver and torch with CUDA, or keep the caches on the host",
    )


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)

    @classmethod
    def of(cls, handle: bytes) -> _Handle:
        return cls.from_buffer_copy(handle)


class LibCuda(CudaDriver):
    """A `CudaDriver` that calls the driver's library, `libcuda`."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        self._looks: Any = ctypes.PyDLL("libcuda.so.1")
        """The library for calls that never block, which keep the interpreter lock."""
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.RLock()
        self.streams = StreamStock(self._make_stream)
        self._call("cuInit", 0)
        # These are called often. With argtypes set, plain integers need no wrapping.
        self._looks.cuEventQuery.argtypes = [ctypes.c_void_p]
        self._looks.cuStreamQuery.argtypes = [ctypes.c_void_p]
        self._looks.cuEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._looks.cuGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._library.cuStreamWaitEvent.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
        self._looks.cuMemcpyHtoDAsync_v2.argtypes = [
            ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
        ]  # fmt: skip
        self._write_word: Any = getattr(self._looks, "cuStreamWriteValue32_v2", None)
        """The function that writes 32 bits in stream order; None if it is not supported."""
        if self._write_word is not None:
            self._write_word.argtypes = [
                ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint,
            ]  # fmt: skip

    def _call(self, name: str, *given: Any) -> None:
        self._check(name, getattr(self._library, name)(*given))

    def _check(self, name: str, code: int) -> None:
        if code:
            raise DriverError(f"{name} returned {self._error(code)}")

    def _error(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        return f"{code} ({(text.value or b'unknown').decode()})"

    def on(self, device: int) -> AbstractContextManager[None]:
        """Return a context in which a device is current for the calling thread."""
        context = self._contexts.get(device)
        current = ctypes.c_void_p()
        self._looks.cuCtxGetCurrent(ctypes.byref(current))
        if context is not None and current.value == context.value:
            return _AS_IT_IS
        return self._made_current(device)

    @contextmanager
    def _made_current(self, device: int) -> Iterator[None]:
        with self._lock:
            if device not in self._contexts:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(number), device)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
                self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def devices(self) -> list[bytes]:
        """Return the UUIDs of the visible devices."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        uuids = []
        for number in range(count.value):
            device, uuid = ctypes.c_int(), ctypes.create_string_buffer(UUID_BYTES)
            self._call("cuDeviceGet", ctypes.byref(device), number)
            self._call("cuDeviceGetUuid_v2", uuid, device)
            uuids.append(uuid.raw)
        return uuids

    def allocation(self, device: int, address: int) -> tuple[int, int]:
        """Return (start, bytes) of the driver's allocation, which torch may have subdivided."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        with self.on(device):
            self._call(
                "cuMemGetAddressRange_v2",
                ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address),
            )  # fmt: skip
        return base.value, nbytes.value

    def export_memory(self, device: int, base: int) -> bytes:
        """Return a legacy IPC handle. Only memory from cudaMalloc has one."""
        handle = _Handle()
        with self.on(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open_memory(self, device: int, handle: bytes) -> int:
        """Map an allocation into this process's address space. Return its address."""
        address = ctypes.c_uint64()
        with self.on(device):
            self._call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.of(handle), _PEER_ACCESS
            )
        return address.value

    def close_memory(self, device: int, address: int) -> None:
        """Unmap an allocation."""
        with self.on(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def make_memory(self, device: int, nbytes: int) -> int:
        """Create an allocation with the driver, because torch could put other tensors in it."""
        address = ctypes.c_uint64()
        with self.on(device):
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._wipe(device, address.value, nbytes)
        return address.value

    def end_memory(self, device: int, address: int, nbytes: int) -> None:
        """Set an allocation to zero, because a peer may still have it mapped, and free it."""
        self._wipe(device, address, nbytes)
        with self.on(device):
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def _wipe(self, device: int, address: int, nbytes: int) -> None:
        """Set `nbytes` bytes to zero on a separate stream, and wait until that is done."""
        lent = self.streams.lend(device, self)
        stream = ctypes.c_void_p(lent.address)
        try:
            with self.on(device):
                about = ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes)
                self._call("cuMemsetD8Async", *about, stream)
                self._call("cuStreamSynchronize", stream)
        finally:
            lent.give_back()

    def make_event(self, device: int) -> int:
        """Create an interprocess event."""
        return self._event(device, _UNTIMED | _SHARED)

    def local_event(self, device: int) -> int:
        """Create an event for use in this process; it can be recorded any number of times."""
        return self._event(device, _UNTIMED)

    def _event(self, device: int, flags: int) -> int:
        event = ctypes.c_void_p()
        with self.on(device):
            self._call("cuEventCreate", ctypes.byref(event), flags)
        return event.value or 0

    def export_event(self, device: int, event: int) -> bytes:
        """Return the event's IPC handle."""
        handle = _Handle()
        with self.on(device):
            self._call("cuIpcGetEventHandle", ctypes.byref(handle), ctypes.c_void_p(event))
        return bytes(handle)

    def open_event(self, device: int, handle: bytes) -> int:
        """Open an event of another process. Return its address."""
        event = ctypes.c_void_p()
        with self.on(device):
            self._call("cuIpcOpenEventHandle", ctypes.byref(event), _Handle.of(handle))
        return event.value or 0

    def end_event(self, device: int, event: int) -> None:
        """Destroy the event in this process. Other processes can still use it if they opened it."""
        with self.on(device):
            self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def synchronize(self, device: int, event: int) -> None:
        """Wait for an event without blocking other threads."""
        with self.on(device):
            self._call("cuEventSynchronize", ctypes.c_void_p(event))

    def finished(self, device: int, event: int) -> bool:
        """Return at once whether the work before the last recording of an event has completed."""
        with self.on(device):
            code = self._looks.cuEventQuery(event)
        if code not in (0, _NOT_READY):
            raise DriverError(f"cuEventQuery returned {self._error(code)}")
        return bool(code == 0)

    def _make_stream(self, device: int) -> int:
        stream, least, most = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        try:
            with self.on(device):
                # The lowest priority: streams of the framework with a higher one run first.
                self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(most))
                about = ctypes.byref(stream), _NON_BLOCKING, least.value
                self._call("cuStreamCreateWithPriority", *about)
        except DriverError as problem:
            hint = "Free GPU memory, or restart the process"
            raise AtlasError(
                Code.WIRE_FAILED, "The GPU cannot create a stream", got=str(problem), hint=hint
            ) from problem
        return stream.value or 0

    def recorder(self, device: int, stream: int) -> Callable[[int], None]:
        """Return a function that records an event after the work on the caller's current stream."""
        import torch

        order: Any = torch.cuda.ExternalStream(stream, device)  # type: ignore[no-untyped-call]

        def record(event: int) -> None:
            order.wait_stream(torch.cuda.current_stream(device))
            with self.on(device):
                self.record(event, stream)

        return record

    def queue(self, device: int, multiprocessors: int) -> DeviceQueue:
        """Create a queue that copies with Triton kernels."""
        return TorchQueue(self, device, multiprocessors)

    def upload(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from pinned host memory in stream order. The stream's device must be current."""
        code = self._looks.cuMemcpyHtoDAsync_v2(to, source, nbytes, stream)
        self._check("cuMemcpyHtoDAsync", code)

    def write_word(self, to: int, number: int, stream: int) -> bool:
        """Write 32 bits to pinned memory in stream order. Return False if this is not supported."""
        if self._write_word is None:
            return False
        code = self._write_word(stream, to, number, 0)
        if code == _NOT_SUPPORTED:
            self._write_word = None
            return False
        self._check("cuStreamWriteValue32", code)
        return True

    def download(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy into pinned host memory in stream order. The stream's device must be current."""
        address, begin = ctypes.c_void_p(to), ctypes.c_uint64(source)
        size, order = ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
        self._call("cuMemcpyDtoHAsync_v2", address, begin, size, order)

    def stream_waits(self, device: int, stream: int, event: int) -> None:
        """Make a stream wait for an event."""
        with self.on(device):
            self._call("cuStreamWaitEvent", stream, event, 0)

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream. The stream's device must be current."""
        self._check("cuEventRecord", self._looks.cuEventRecord(event, stream))

    def order(self, event: int, before: int, stream: int) -> None:
        """Make `stream` wait, through `event`, for the work on stream `before`.

        The device of both streams must be current.
        """
        if self._looks.cuStreamQuery(before):  # not idle
            self.record(event, before)
            self._call("cuStreamWaitEvent", stream, event, 0)

    def capture(self, stream: int, act: Callable[[], None]) -> int:
        """Capture the work that `act` queues on a stream, without running it. Return the graph."""
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), _RELAXED)
        try:
            act()
        finally:
            self._call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        try:
            no_flags = ctypes.c_uint64(0)
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, no_flags)
        finally:
            self._call("cuGraphDestroy", graph)
        return made.value or 0

    def launch_graph(self, graph: int, stream: int) -> None:
        """Launch a captured graph on a stream. The stream's device must be current."""
        self._check("cuGraphLaunch", self._looks.cuGraphLaunch(graph, stream))

    def end_graph(self, device: int, graph: int) -> None:
        """Destroy a captured graph."""
        with self.on(device):
            self._call("cuGraphExecDestroy", ctypes.c_void_p(graph))
