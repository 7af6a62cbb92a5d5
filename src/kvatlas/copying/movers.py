"""Gather, scatter and checksum the pools of this node, on the host or on a GPU.

A staged transfer moves a stream in pieces, one buffer at a time. A `PoolMover` copies between the
buffer and the pools: `HostMover` with numpy, and `GpuMover` with a kernel. The buffer of a
`GpuMover` is on the same GPU if the transport can access GPU memory. Otherwise it is in pinned host
memory, and every piece also crosses the link between GPU and host (a host bounce).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvatlas.copying.cuda_driver import CudaDriver
from kvatlas.copying.device_marks import DeviceMarks
from kvatlas.copying.device_queue import AddressRuns
from kvatlas.copying.gather_scatter import checksums, crc_pieces, gather, scatter, stream_bytes
from kvatlas.copying.memory import HOST, Memory
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import Copy
from kvatlas.routing.binding import ORIGIN

Count = Callable[[str, int], None]
"""Adds a number of bytes to the metric with the given name."""


class PoolMover(ABC):
    """Moves bytes between the pools of this node and buffers that contain pieces of a stream.

    `stream` is a numpy array on the host, or a tensor on the GPU of the pools.
    """

    @abstractmethod
    def gather(self, copies: Sequence[Copy], stream: Any) -> None:
        """Gather `copies` from the pools into `stream`."""

    @abstractmethod
    def scatter(self, copies: Sequence[Copy], stream: Any) -> int:
        """Scatter `stream` into the pools. Return the number of bytes."""

    @abstractmethod
    def rehearsal(self, copies: Sequence[Copy], stream: Any, nbytes: int) -> Callable[[], None]:
        """Return a function that scatters `stream` into scratch memory, so that it can be timed.

        The scratch memory has `nbytes` bytes and replaces pool 0.
        """

    @abstractmethod
    def checksums(self, copies: Sequence[Copy], piece: int, *, source: bool) -> Int64s:
        """Divide the stream of `copies` into pieces of `piece` bytes; return the CRC-32 of each.

        The stream is the concatenation of the runs. If `source` is true, this node is the source of
        `copies`, otherwise the destination.
        """

    def follow(self, mark: int | None) -> None:  # noqa: B027
        """Make later copies wait for the GPU work before `mark`, a result of `DeviceMarks.mark`.

        Do nothing if `mark` is None.
        """

    def wait_for_caller(self) -> None:  # noqa: B027
        """Wait for the work that is queued on the caller's GPU stream."""

    def close(self) -> None:  # noqa: B027
        """Release the mover's resources."""


class HostMover(PoolMover):
    """Moves bytes of pools in host memory."""

    def __init__(self, pools: Mapping[int, Bytes]) -> None:
        self._pools = pools

    def gather(self, copies: Sequence[Copy], stream: Any) -> None:
        """Gather `copies` from the pools into `stream` with numpy."""
        gather(copies, self._pools, stream)

    def scatter(self, copies: Sequence[Copy], stream: Any) -> int:
        """Scatter `stream` into the pools with numpy. Return the number of bytes."""
        return scatter(copies, stream, self._pools)

    def rehearsal(self, copies: Sequence[Copy], stream: Any, nbytes: int) -> Callable[[], None]:
        """Return a function that scatters `stream` into scratch memory with numpy."""
        scratch = {0: np.empty(nbytes, dtype=np.uint8)}

        def act() -> None:
            scatter(copies, stream, scratch)

        return act

    def checksums(self, copies: Sequence[Copy], piece: int, *, source: bool) -> Int64s:
        """Return the CRC-32 of each piece of the stream, computed on the CPU."""
        return checksums(copies, self._pools, piece, source=source)


class GpuMover(PoolMover):
    """Moves bytes of pools in the memory of one GPU."""

    def __init__(
        self,
        driver: CudaDriver,
        marks: DeviceMarks | None,
        memory: Mapping[int, Memory],
        staging: Any,
        count: Count,
    ) -> None:
        import torch

        (device,) = {at.device for at in memory.values()}
        self._device, self._memory = torch.device(device), dict(memory)
        self._marks, self._count_bytes = marks, count
        self._queue: Any = driver.queue(self._device.index, 0)
        bounces = isinstance(staging, np.ndarray) and staging.nbytes
        self._pinned = PinnedMemory(staging) if bounces else None

    def follow(self, mark: int | None) -> None:
        """Make the GPU stream wait for the work before `mark`, without blocking the host."""
        if mark is not None and self._marks is not None:
            self._queue.after(self._marks.event(mark))

    def wait_for_caller(self) -> None:
        """Wait for the work on the current GPU stream of the calling thread."""
        import torch

        torch.cuda.current_stream(self._device).synchronize()

    def gather(self, copies: Sequence[Copy], stream: Any) -> None:
        """Gather into `stream` with a kernel.

        If `stream` is a buffer on the host, gather into GPU memory, then copy to the host.
        """
        self._count(stream, self._through(copies, self._memory, stream, out=True))

    def scatter(self, copies: Sequence[Copy], stream: Any) -> int:
        """Scatter `stream` with a kernel.

        If `stream` is a buffer on the host, copy its content to GPU memory first.
        """
        return self._count(stream, self._through(copies, self._memory, stream, out=False))

    def rehearsal(self, copies: Sequence[Copy], stream: Any, nbytes: int) -> Callable[[], None]:
        """Return a function that scatters `stream` into scratch memory with a kernel."""
        scratch = self._queue.buffer(nbytes)
        pools = {0: Memory(scratch.data_ptr(), nbytes, f"{self._device}", owner=scratch)}

        def act() -> None:
            self._through(copies, pools, stream, out=False)

        return act

    def _through(
        self, copies: Sequence[Copy], pools: Mapping[int, Memory], stream: Any, *, out: bool
    ) -> int:
        """Copy between pools and `stream`, and wait for the copy. Return the number of bytes.

        The direction is pools to stream if `out` is true, otherwise stream to pools.
        """
        total = stream_bytes(copies)
        if not total:
            return 0
        self._queue.after_caller()
        if isinstance(stream, np.ndarray):
            import torch

            gpu = self._queue.buffer(total)
            runs = stream_runs(copies, pools, gpu.data_ptr(), out=out)
            self._queue.through(runs, torch.from_numpy(stream), gpu, total, out=out).wait()
        else:
            self._queue.post(stream_runs(copies, pools, stream.data_ptr(), out=out)).wait()
        return total

    def _count(self, stream: Any, nbytes: int) -> int:
        bounced = isinstance(stream, np.ndarray)
        self._count_bytes("host_bounce_bytes" if bounced else "gpu_staged_bytes", nbytes)
        return nbytes

    def checksums(self, copies: Sequence[Copy], piece: int, *, source: bool) -> Int64s:
        """Gather the stream to the host, and return the CRC-32 of each piece of `piece` bytes."""
        if not source:
            copies = [copy.reversed() for copy in copies]
        stream = np.empty(stream_bytes(copies), dtype=np.uint8)
        self._through(copies, self._memory, stream, out=True)
        return crc_pieces(stream, piece)

    def close(self) -> None:
        """Release the stream and the pinned memory."""
        self._queue.close()
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None


def stream_runs(
    copies: Iterable[Copy], pools: Mapping[int, Memory], stream: int, *, out: bool
) -> list[AddressRuns]:
    """Return the runs that copy between pools and a contiguous buffer at address `stream`.

    The direction is pools to buffer if `out` is true, otherwise buffer to pools.
    """
    runs, done = [], 0
    for copy in copies:
        source, destination, length = copy.runs()
        at = np.cumsum(length) - length + done
        done += copy.nbytes
        if out:
            pool = pools[copy.source_pool].address
            runs.append(AddressRuns(pool, stream, ORIGIN.ends, (source, at, length)))
        else:
            pool = pools[copy.destination_pool].address
            runs.append(AddressRuns(stream, pool, ORIGIN.ends, (at, destination, length)))
    return runs


class PinnedMemory:
    """Host memory that is pinned until `release`, so that the GPU copies it at full link speed.

    `held` is False if the memory cannot be pinned. Copies then work, but are slower.
    """

    def __init__(self, memory: Bytes) -> None:
        import torch

        self._memory = memory
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failed = self._runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        self.held = not int(failed)

    def release(self) -> None:
        """Unpin the memory."""
        if self.held:
            self.held = False
            self._runtime.cudaHostUnregister(self._memory.ctypes.data)


def pools_device(pools: Mapping[int, Memory]) -> str:
    """Return the device of a rank's pools; the host if there are no pools.

    Raise `wrong_device` if the pools are on different devices.
    """
    devices = {at.device for at in pools.values()}
    if len(devices) > 1:
        raise AtlasError(
            Code.WRONG_DEVICE,
            "The pools of one rank must be on one device",
            got=", ".join(sorted(devices)),
            hint="Allocate all pools of the rank on the same device",
        )
    return min(devices, default=HOST)
