"""What is asked of CUDA's driver: handles of allocations and events, and order between streams.

An interface, so that everything above it runs without a GPU: `LibCuda` calls the driver's own
library, and torch where there must be a stream for kernels.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s

HANDLE_BYTES = 64
"""Bytes of a handle, of an allocation or of an event."""

UUID_BYTES = 16
_KEPT_STARTS = 256
"""Tables of starts that a queue keeps on its device."""

_EVENT_FLAGS = 2 | 4
"""No timing, and to be shared with other processes."""
_PEER_ACCESS = 1
_NOT_READY = 600


class DriverError(Exception):
    """The driver, or its library, refuses."""


class AddressRuns(NamedTuple):
    """Runs between two addresses, at every sum of a start and a span."""

    source: int
    target: int
    starts: tuple[Int64s, Int64s]
    """Offsets at the source and at the target; kept on the device as long as they are used."""
    spans: tuple[Int64s, Int64s, Int64s]
    """Offsets at either end, and lengths."""


class Posted(ABC):
    """Work that a queue was given."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the device has done it; raises where the device has failed."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it is done."""


class DeviceQueue(ABC):
    """A stream of its own on one device: what it is given is done in that order."""

    @abstractmethod
    def after(self, event: int) -> None:
        """What is posted from now on comes after what the event was last recorded behind."""

    @abstractmethod
    def post(self, runs: Sequence[AddressRuns]) -> Posted:
        """Copy; nobody waits."""


class CudaDriver(ABC):
    """CUDA as transports need it. Devices are numbers of this process's own."""

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
    def recorder(self, device: int) -> Callable[[int], None]:
        """Records events, one behind the other, behind what the caller's stream has to do."""

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
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self._call("cuInit", 0)

    def _call(self, name: str, *given: Any) -> None:
        code = getattr(self._library, name)(*given)
        if code:
            raise DriverError(f"{name} answers {self._error(code)}")

    def _error(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        return f"{code} ({(text.value or b'unknown').decode()})"

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Around calls that are about a device: its context is this thread's meanwhile."""
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
        with self._on(device):
            self._call(
                "cuMemGetAddressRange_v2",
                ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address),
            )  # fmt: skip
        return base.value, nbytes.value

    def export_memory(self, device: int, base: int) -> bytes:
        """A legacy IPC handle; memory of other kinds has none."""
        handle = _Handle()
        with self._on(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open_memory(self, device: int, handle: bytes) -> int:
        """Map an allocation into this process's address space."""
        address = ctypes.c_uint64()
        with self._on(device):
            self._call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.of(handle), _PEER_ACCESS
            )
        return address.value

    def close_memory(self, device: int, address: int) -> None:
        """Unmap it again."""
        with self._on(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def make_event(self, device: int) -> int:
        """An interprocess event."""
        event = ctypes.c_void_p()
        with self._on(device):
            self._call("cuEventCreate", ctypes.byref(event), _EVENT_FLAGS)
        return event.value or 0

    def export_event(self, device: int, event: int) -> bytes:
        """Its IPC handle."""
        handle = _Handle()
        with self._on(device):
            self._call("cuIpcGetEventHandle", ctypes.byref(handle), ctypes.c_void_p(event))
        return bytes(handle)

    def open_event(self, device: int, handle: bytes) -> int:
        """An event of another process."""
        event = ctypes.c_void_p()
        with self._on(device):
            self._call("cuIpcOpenEventHandle", ctypes.byref(event), _Handle.of(handle))
        return event.value or 0

    def end_event(self, device: int, event: int) -> None:
        """Destroy it, at this end."""
        with self._on(device):
            self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def synchronize(self, device: int, event: int) -> None:
        """Wait for an event without holding up other threads."""
        with self._on(device):
            self._call("cuEventSynchronize", ctypes.c_void_p(event))

    def finished(self, device: int, event: int) -> bool:
        """Look at an event without waiting."""
        with self._on(device):
            code = self._library.cuEventQuery(ctypes.c_void_p(event))
        if code not in (0, _NOT_READY):
            raise DriverError(f"cuEventQuery answers {self._error(code)}")
        return bool(code == 0)

    def recorder(self, device: int) -> Callable[[int], None]:
        """Behind the caller's current stream, and behind all that was recorded before."""
        import torch

        order: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def record(event: int) -> None:
            order.wait_stream(torch.cuda.current_stream(device))
            with self._on(device):
                stream = ctypes.c_void_p(order.cuda_stream)
                self._call("cuEventRecord", ctypes.c_void_p(event), stream)

        return record

    def queue(self, device: int, multiprocessors: int) -> DeviceQueue:
        """A stream that launches Triton's kernels."""
        return _TorchQueue(self, device, multiprocessors)

    def stream_waits(self, device: int, stream: int, event: int) -> None:
        """What a stream is given from now on comes after an event."""
        with self._on(device):
            self._call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)


class _TorchQueue(DeviceQueue):
    def __init__(self, driver: LibCuda, device: int, multiprocessors: int) -> None:
        import torch

        self._driver, self._number, self._programs = driver, device, multiprocessors
        self._device = torch.device("cuda", device)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._starts: OrderedDict[int, tuple[Any, Any]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def stream(self) -> Any:
        """The stream, for work of other kinds in the same order."""
        return self._stream

    def after(self, event: int) -> None:
        """Have the stream wait for an event."""
        self._driver.stream_waits(self._number, self._stream.cuda_stream, event)

    def after_caller(self) -> None:
        """Have the stream wait for what the caller's current stream has to do."""
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def post(self, runs: Sequence[AddressRuns], **choice: Any) -> Posted:
        """Launch a kernel for each; `choice` overrides how."""
        with self._on_stream():
            self._launch(runs, choice)
            return TorchPosted(self._stream)

    def through(
        self, runs: Sequence[AddressRuns], host: Any, gpu: Any, nbytes: int, *, out: bool
    ) -> Posted:
        """Copy from or to a buffer of the GPU, that goes to or comes from one of the host."""
        with self._on_stream():
            if not out:
                gpu[:nbytes].copy_(host[:nbytes], non_blocking=True)
            self._launch(runs, {})
            if out:
                host[:nbytes].copy_(gpu[:nbytes], non_blocking=True)
            return TorchPosted(self._stream)

    def buffer(self, nbytes: int) -> Any:
        """Memory of the GPU, for use in the order of the stream."""
        import torch

        with self._on_stream():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def buffers(self, nbytes: int) -> tuple[Any, Any]:
        """Pinned memory of the host, and as much of the GPU."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), self.buffer(nbytes)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        import torch

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def _launch(self, runs: Sequence[AddressRuns], choice: dict[str, Any]) -> None:
        from kvatlas.kernels import copy_address_runs

        for one in runs:
            use = {"programs": self._programs} | choice
            copy_address_runs(one.source, one.target, self._placed(one.starts), one.spans, **use)

    def _placed(self, starts: tuple[Int64s, Int64s]) -> Any:
        """Starts on the device; those that were used longest ago are forgotten."""
        from kvatlas.kernels import place_starts

        with self._lock:
            if id(starts[0]) not in self._starts:
                # The arrays are kept too: nobody else's can have their identity meanwhile.
                self._starts[id(starts[0])] = starts, place_starts(*starts, self._device)
            self._starts.move_to_end(id(starts[0]))
            while len(self._starts) > _KEPT_STARTS:
                self._starts.popitem(last=False)
            return self._starts[id(starts[0])][1]


class TorchPosted(Posted):
    """What a stream has been given so far."""

    def __init__(self, stream: Any) -> None:
        self._event: Any = stream.record_event()

    def done(self) -> bool:
        """Whether the stream has done it."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Wait without holding up other threads."""
        self._event.synchronize()


NO_STARTS = (np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
"""For runs that are told one by one: each span is one."""
