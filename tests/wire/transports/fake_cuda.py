"""A machine with GPUs that are none: host memory, handles that go stale, copies by numpy.

Every `FakeCuda` is the driver of one process; those of one `FakeMachine` can open each
other's handles.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvatlas.copying.cuda_driver import HANDLE_BYTES, UUID_BYTES, CudaDriver, DriverError
from kvatlas.copying.cuda_streams import StreamStock
from kvatlas.copying.device_queue import AddressRuns, DeviceQueue, Posted
from kvatlas.copying.memory_copy import as_bytes
from kvatlas.copying.run_bounds import Bytes
from kvatlas.specs.cell_formats import ElementCast
from kvatlas.wire import Memory, Node
from kvatlas.wire.transports.cuda import CudaTransport
from tests.identities import OURS

HEAD = 512
"""Bytes of an allocation before the pool in it: a framework's allocator divides what it has."""


class FakeMachine:
    """The allocations and events of all processes, by handle."""

    def __init__(self, gpus: int = 1) -> None:
        self.gpus = [secrets.token_bytes(UUID_BYTES) for _ in range(gpus)]
        self.memory: dict[bytes, Bytes] = {}
        self.events: dict[bytes, int] = {}


class FakeCuda(CudaDriver):
    """One process's driver. `opened` counts what it has mapped, by address."""

    def __init__(self, machine: FakeMachine, *, sees: Sequence[int] = (0,)) -> None:
        self.machine, self._sees = machine, sees
        self.allocations: dict[int, tuple[Bytes, bytes]] = {}
        self.opened: Counter[int] = Counter()
        self.opens = 0
        self.log: list[tuple[str, int]] = []
        self.busy = False
        """Whether no event is done yet."""
        self.late = False
        """Whether what is posted stays under way until `finish`."""
        self.pending: list[FakePosted] = []
        self.lacks: set[str] = set()
        """Types of elements that its GPU does not have."""
        self._events = 0
        self.made_streams: Counter[int] = Counter()
        self.streams = StreamStock(self._make_stream)

    def _make_stream(self, device: int) -> int:
        self.made_streams[device] += 1
        return 100 * device + self.made_streams[device]

    def lent_streams(self, device: int = 0) -> int:
        """Streams that have an owner now."""
        return self.made_streams[device] - self.streams.idle(device)

    def allocate(self, nbytes: int, device: int = 0) -> tuple[Memory, Bytes]:
        """A pool inside an allocation of its own."""
        whole = np.zeros(nbytes + 2 * HEAD, np.uint8)
        self.allocations[whole.ctypes.data] = whole, secrets.token_bytes(HANDLE_BYTES)
        pool = whole[HEAD:-HEAD]
        return Memory(pool.ctypes.data, nbytes, f"cuda:{device}", owner=whole), pool

    def free(self, memory: Memory) -> None:
        """Its handles are stale from now on."""
        _, handle = self.allocations.pop(memory.address - HEAD)
        self.machine.memory.pop(handle, None)

    def make_memory(self, device: int, nbytes: int) -> int:
        del device
        whole = np.zeros(nbytes, np.uint8)
        self.allocations[whole.ctypes.data] = whole, secrets.token_bytes(HANDLE_BYTES)
        return int(whole.ctypes.data)

    def end_memory(self, device: int, address: int, nbytes: int) -> None:
        del device
        whole, handle = self.allocations.pop(address)
        assert whole.nbytes == nbytes
        whole[:] = 0
        self.machine.memory.pop(handle, None)

    def finish(self) -> None:
        for posted in self.pending:
            posted.act()
        self.pending.clear()

    def devices(self) -> list[bytes]:
        return [self.machine.gpus[number] for number in self._sees]

    def allocation(self, device: int, address: int) -> tuple[int, int]:
        del device
        own = [whole for whole, _ in self.allocations.values()]
        for whole in [*own, *self.machine.memory.values()]:
            base = whole.ctypes.data
            if base <= address < base + whole.nbytes:
                return base, whole.nbytes
        raise DriverError("no allocation there")

    def export_memory(self, device: int, base: int) -> bytes:
        del device
        whole, handle = self.allocations[base]
        self.machine.memory[handle] = whole
        return handle

    def open_memory(self, device: int, handle: bytes) -> int:
        del device
        if handle not in self.machine.memory:
            raise DriverError("no such handle")
        self.opens += 1
        address: int = self.machine.memory[handle].ctypes.data
        assert not self.opened[address], "an allocation is mapped twice"
        self.opened[address] += 1
        return address

    def close_memory(self, device: int, address: int) -> None:
        del device
        assert self.opened[address] == 1, "unmapped without having been mapped"
        self.opened[address] -= 1

    def make_event(self, device: int) -> int:
        del device
        self._events += 1
        return self._events

    def export_event(self, device: int, event: int) -> bytes:
        del device
        handle = secrets.token_bytes(HANDLE_BYTES)
        self.machine.events[handle] = event
        return handle

    def open_event(self, device: int, handle: bytes) -> int:
        del device
        if handle not in self.machine.events:
            raise DriverError("no such event")
        return 1000 + self.machine.events[handle]

    def end_event(self, device: int, event: int) -> None:
        del device
        self.log.append(("end", event))

    def synchronize(self, device: int, event: int) -> None:
        del device
        self.log.append(("synchronize", event))

    def finished(self, device: int, event: int) -> bool:
        del device
        self.log.append(("finished", event))
        return not self.busy

    def recorder(self, device: int, stream: int) -> Callable[[int], None]:
        del device, stream
        return lambda event: self.log.append(("record", event))

    def queue(self, device: int, multiprocessors: int) -> FakeQueue:
        del multiprocessors
        return FakeQueue(self, device)


class FakeQueue(DeviceQueue):
    """Copies by numpy, at once or when the driver is told to finish."""

    def __init__(self, driver: FakeCuda, device: int) -> None:
        self.driver = driver
        self.stream, self.closed = driver.streams.lend(device, self), False

    def close(self) -> None:
        self.closed = True
        self.stream.give_back()

    def after(self, event: int) -> None:
        self.driver.log.append(("after", event))

    def post(self, runs: Sequence[AddressRuns], **_: Any) -> Posted:
        assert not self.closed, "its stream may be another's"
        self.driver.log.append(("post", len(runs)))
        posted = FakePosted(runs)
        if self.driver.late:
            self.driver.pending.append(posted)
        else:
            posted.act()
        return posted

    def after_caller(self) -> None:
        self.driver.log.append(("after_caller", 0))

    def converts(self, cast: ElementCast) -> bool:
        return cast.target.name not in self.driver.lacks

    def buffer(self, nbytes: int) -> FakeBuffer:
        return FakeBuffer(nbytes)

    def buffers(self, nbytes: int) -> tuple[FakeBuffer, FakeBuffer]:
        return FakeBuffer(nbytes), FakeBuffer(nbytes)

    def through(
        self, runs: Sequence[AddressRuns], host: FakeBuffer, gpu: FakeBuffer, nbytes: int, *,
        out: bool,
    ) -> Posted:  # fmt: skip
        self.driver.log.append(("through", nbytes))
        posted = FakePosted(runs)
        if not out:
            gpu.numpy()[:nbytes] = host.numpy()[:nbytes]
        posted.act()
        if out:
            host.numpy()[:nbytes] = gpu.numpy()[:nbytes]
        return posted

    def staged(
        self, runs: Sequence[AddressRuns], stretches: Sequence[tuple[int, int, int]], *, out: bool
    ) -> Posted:
        self.driver.log.append(("staged", len(stretches)))
        posted = FakePosted(runs)
        if out:
            posted.act()
        for host, gpu, nbytes in stretches:
            here, there = as_bytes(Memory(host, nbytes)), as_bytes(Memory(gpu, nbytes))
            (here if out else there)[:] = there if out else here
        if not out:
            posted.act()
        return posted


class FakeBuffer:
    """Memory of the GPU or pinned for it, as much as is asked for."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.full(nbytes, 0x5A, np.uint8)

    def data_ptr(self) -> int:
        return int(self._bytes.ctypes.data)

    def numpy(self) -> Bytes:
        return self._bytes


class FakePosted(Posted):
    """A copy that is done when somebody does it."""

    def __init__(self, runs: Sequence[AddressRuns]) -> None:
        self._runs = runs
        self._over = False

    def act(self) -> None:
        for run in self._runs:
            one, two = (1, 1) if run.cast is None else run.cast.items
            for number, (a, b) in enumerate(zip(*run.starts, strict=True)):
                for x, y, length in zip(*run.spans, strict=True):
                    source = as_bytes(Memory(run.source + int(a + x) * one, int(length) * one))
                    if run.cast is not None:
                        from tests.routing.converting import cast_elements  # needs torch

                        scale = 0 if run.scales is None else int(run.scales[number])
                        cells = source.reshape(-1, one)
                        source = cast_elements(cells, run.cast, scale).reshape(-1)
                    as_bytes(Memory(run.target + int(b + y) * two, int(length) * two))[:] = source
        self._over = True

    def done(self) -> bool:
        return self._over

    def wait(self) -> None:
        assert self._over


@contextmanager
def node_of(
    made: Any, machine: FakeMachine, rng: Any, share: float = 1.0, rank: int = 0, **about: Any
) -> Iterator[tuple[Any, Any, FakeCuda]]:
    """A node on a GPU of its own process, its pools as bytes, and its driver."""
    driver = FakeCuda(machine)
    given = {pool.index: driver.allocate(pool.nbytes) for pool in made.rank_pools(rank).values()}
    for _, pool in given.values():
        pool[:] = rng.integers(0, 256, pool.nbytes, np.uint8)
    memory = {index: at for index, (at, _) in given.items()}
    pools = {index: pool for index, (_, pool) in given.items()}
    transport = CudaTransport(driver=driver, share=share)
    options: Any = {"identity": OURS, "buffers": 0} | about
    with Node(made, rank=rank, memory=memory, transport=transport, **options) as node:
        yield node, pools, driver
