"""What is asked of CUDA's driver: handles of allocations and events, and order between streams.

An interface, so that everything above it runs without a GPU: `LibCuda` calls the driver's own
library, and torch where there must be a stream for kernels.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.cuda_streams import StreamStock
from kvatlas.wire.transports.device_queue import DeviceQueue
from kvatlas.wire.transports.torch_queue import TorchQueue

HANDLE_BYTES = 64
"""Bytes of a handle, of an allocation or of an event."""

UUID_BYTES = 16

_UNTIMED, _SHARED = 2, 4
"""Flags of events: no timing, and to be shared with other processes."""
_PEER_ACCESS = 1
_RELAXED = 2
"""A capture that forbids nobody anything."""
_NON_BLOCKING = 1
"""Streams that do not wait for the default stream."""
_NOT_READY, _NOT_SUPPORTED = 600, 801


_AS_IT_IS = nullcontext()


class DriverError(Exception):
    """The driver, or its library, refuses."""


class CudaDriver(ABC):
    """CUDA as transports need it. Devices are numbers of this process's own."""

    streams: StreamStock
    """Streams that torch hands out to nobody."""

    @abstractmethod
    def devices(self) -> list[bytes]:
        """The identity of each device that this process sees, by number."""

    @abstractmethod
    def allocation(self, device: int, address: int) -> tuple[int, int]:
        """Where the allocation that an address lies in begins, and its bytes."""

    @abstractmethod
    def export_memory(self, device: int, base: int) -> bytes:
        """A handle of an allocation for other processes."""

    @abstractmethod
    def open_memory(self, device: int, handle: bytes) -> int:
        """Map another process's allocation; its address here."""

    @abstractmethod
    def close_memory(self, device: int, address: int) -> None:
        """Unmap what was opened; nothing may be reading it."""

    @abstractmethod
    def make_event(self, device: int) -> int:
        """An event that other processes can wait for."""

    @abstractmethod
    def export_event(self, device: int, event: int) -> bytes:
        """A handle of an event for other processes."""

    @abstractmethod
    def open_event(self, device: int, handle: bytes) -> int:
        """Another process's event."""

    @abstractmethod
    def end_event(self, device: int, event: int) -> None:
        """Give an event back, made or opened."""

    @abstractmethod
    def synchronize(self, device: int, event: int) -> None:
        """Wait, on the host, for what an event was last recorded behind."""

    @abstractmethod
    def finished(self, device: int, event: int) -> bool:
        """Whether what an event was last recorded behind is done."""

    @abstractmethod
    def recorder(self, device: int, stream: int) -> Callable[[int], None]:
        """Records events in a stream, behind what the caller's current stream has to do."""

    @abstractmethod
    def queue(self, device: int, multiprocessors: int) -> DeviceQueue:
        """A new queue, that keeps at most so many multiprocessors busy; 0 for no limit."""


@lru_cache(maxsize=1)
def load_driver() -> CudaDriver:
    """The driver of this machine, refused where there is none."""
    try:
        import torch

        if torch.cuda.is_available():
            return LibCuda()
        got = "torch sees no GPU"
    except (ImportError, OSError, AttributeError) as problem:
        got = f"{type(problem).__name__}: {problem}"
    raise AtlasError(
        Code.WRONG_DEVICE,
        "There is no CUDA device that this process can use",
        got=got,
        hint="Install a driver and a torch with CUDA, or keep the caches on the host",
    )


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)

    @classmethod
    def of(cls, handle: bytes) -> _Handle:
        return cls.from_buffer_copy(handle)


class LibCuda(CudaDriver):
    """The driver's own library, `libcuda`."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        self._looks: Any = ctypes.PyDLL("libcuda.so.1")
        """For calls that never wait: whoever makes them keeps the interpreter."""
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.RLock()
        self.streams = StreamStock(self._make_stream)
        self._call("cuInit", 0)
        # Called often, so that numbers are taken as they are.
        self._looks.cuEventQuery.argtypes = [ctypes.c_void_p]
        self._looks.cuStreamQuery.argtypes = [ctypes.c_void_p]
        self._looks.cuEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._looks.cuGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._library.cuStreamWaitEvent.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
        self._looks.cuMemcpyHtoDAsync_v2.argtypes = [
            ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
        ]  # fmt: skip
        self._write_word: Any = getattr(self._looks, "cuStreamWriteValue32_v2", None)
        """None where the driver is older than that, or its GPUs cannot."""
        if self._write_word is not None:
            self._write_word.argtypes = [
                ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint,
            ]  # fmt: skip

    def _call(self, name: str, *given: Any) -> None:
        self._check(name, getattr(self._library, name)(*given))

    def _check(self, name: str, code: int) -> None:
        if code:
            raise DriverError(f"{name} answers {self._error(code)}")

    def _error(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        return f"{code} ({(text.value or b'unknown').decode()})"

    def on(self, device: int) -> AbstractContextManager[None]:
        """Around calls that are about a device: its context is this thread's meanwhile."""
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
        """UUIDs of the devices that are visible."""
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
        """The driver's allocation, which torch's allocator may have divided."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        with self.on(device):
            self._call(
                "cuMemGetAddressRange_v2",
                ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address),
            )  # fmt: skip
        return base.value, nbytes.value

    def export_memory(self, device: int, base: int) -> bytes:
        """A legacy IPC handle; memory of other kinds has none."""
        handle = _Handle()
        with self.on(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open_memory(self, device: int, handle: bytes) -> int:
        """Map an allocation into this process's address space."""
        address = ctypes.c_uint64()
        with self.on(device):
            self._call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.of(handle), _PEER_ACCESS
            )
        return address.value

    def close_memory(self, device: int, address: int) -> None:
        """Unmap it again."""
        with self.on(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def make_event(self, device: int) -> int:
        """An interprocess event."""
        return self._event(device, _UNTIMED | _SHARED)

    def local_event(self, device: int) -> int:
        """An event of this process, to be recorded again and again."""
        return self._event(device, _UNTIMED)

    def _event(self, device: int, flags: int) -> int:
        event = ctypes.c_void_p()
        with self.on(device):
            self._call("cuEventCreate", ctypes.byref(event), flags)
        return event.value or 0

    def export_event(self, device: int, event: int) -> bytes:
        """Its IPC handle."""
        handle = _Handle()
        with self.on(device):
            self._call("cuIpcGetEventHandle", ctypes.byref(handle), ctypes.c_void_p(event))
        return bytes(handle)

    def open_event(self, device: int, handle: bytes) -> int:
        """An event of another process."""
        event = ctypes.c_void_p()
        with self.on(device):
            self._call("cuIpcOpenEventHandle", ctypes.byref(event), _Handle.of(handle))
        return event.value or 0

    def end_event(self, device: int, event: int) -> None:
        """Destroy it, at this end."""
        with self.on(device):
            self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def synchronize(self, device: int, event: int) -> None:
        """Wait for an event without holding up other threads."""
        with self.on(device):
            self._call("cuEventSynchronize", ctypes.c_void_p(event))

    def finished(self, device: int, event: int) -> bool:
        """Look at an event without waiting."""
        with self.on(device):
            code = self._looks.cuEventQuery(event)
        if code not in (0, _NOT_READY):
            raise DriverError(f"cuEventQuery answers {self._error(code)}")
        return bool(code == 0)

    def _make_stream(self, device: int) -> int:
        stream, least, most = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        try:
            with self.on(device):
                # What computes goes first, wherever a framework has a stream that may.
                self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(most))
                about = ctypes.byref(stream), _NON_BLOCKING, least.value
                self._call("cuStreamCreateWithPriority", *about)
        except DriverError as problem:
            got = f"a GPU that gives no stream: {problem}"
            raise errors.failed(got, hint="Free memory of the GPU, or restart") from problem
        return stream.value or 0

    def recorder(self, device: int, stream: int) -> Callable[[int], None]:
        """Behind the caller's current stream, and behind all that was recorded before."""
        import torch

        order: Any = torch.cuda.ExternalStream(stream, device)  # type: ignore[no-untyped-call]

        def record(event: int) -> None:
            order.wait_stream(torch.cuda.current_stream(device))
            with self.on(device):
                self.record(event, stream)

        return record

    def queue(self, device: int, multiprocessors: int) -> DeviceQueue:
        """A stream that launches Triton's kernels."""
        return TorchQueue(self, device, multiprocessors)

    def upload(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from pinned memory of the host, in the order of a stream; its device is current."""
        code = self._looks.cuMemcpyHtoDAsync_v2(to, source, nbytes, stream)
        self._check("cuMemcpyHtoDAsync", code)

    def write_word(self, to: int, number: int, stream: int) -> bool:
        """Write 32 bits to pinned memory in the order of a stream; False where no GPU can."""
        if self._write_word is None:
            return False
        code = self._write_word(stream, to, number, 0)
        if code == _NOT_SUPPORTED:
            self._write_word = None
            return False
        self._check("cuStreamWriteValue32", code)
        return True

    def download(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy into pinned memory of the host, in the order of a stream; its device is current."""
        address, begin = ctypes.c_void_p(to), ctypes.c_uint64(source)
        size, order = ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
        self._call("cuMemcpyDtoHAsync_v2", address, begin, size, order)

    def stream_waits(self, device: int, stream: int, event: int) -> None:
        """What a stream is given from now on comes after an event."""
        with self.on(device):
            self._call("cuStreamWaitEvent", stream, event, 0)

    def record(self, event: int, stream: int) -> None:
        """Record an event behind what a stream has to do; its device is current."""
        self._check("cuEventRecord", self._looks.cuEventRecord(event, stream))

    def order(self, event: int, before: int, stream: int) -> None:
        """What a stream is given from now on comes after another; their device is current."""
        if self._looks.cuStreamQuery(before):  # it has something to do
            self.record(event, before)
            self._call("cuStreamWaitEvent", stream, event, 0)

    def capture(self, stream: int, act: Callable[[], None]) -> int:
        """What is given to a stream meanwhile, to be launched as often as wanted, and not now."""
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
        """Launch what was captured; its device is current."""
        self._check("cuGraphLaunch", self._looks.cuGraphLaunch(graph, stream))

    def end_graph(self, device: int, graph: int) -> None:
        """Give back what was captured."""
        with self.on(device):
            self._call("cuGraphExecDestroy", ctypes.c_void_p(graph))
