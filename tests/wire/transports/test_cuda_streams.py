"""Streams of GPUs: whose they are, and that they are given back."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvatlas import AtlasError, Code
from kvatlas.copying.cuda_driver import LibCuda
from kvatlas.copying.cuda_streams import StreamStock
from kvatlas.copying.device_marks import DeviceMarks
from kvatlas.copying.device_queue import AddressRuns
from kvatlas.copying.torch_queue import TorchQueue
from kvatlas.routing.binding import ORIGIN
from kvatlas.wire import Session
from tests.wire.helpers import small
from tests.wire.transports.fake_cuda import FakeCuda, FakeMachine, node_of
from tests.wire.transports.fake_launches import FakeLaunches, FakeStream
from tests.wire.transports.test_cuda import GpuEnd


def test_every_mark_mover_and_link_has_a_stream_of_its_own_and_gives_it_back() -> None:
    machine, rng = FakeMachine(), np.random.default_rng(1)
    made = small("dense")
    with node_of(made, machine, rng) as (source, _, theirs):
        with node_of(made, machine, rng) as (target, _, driver):
            assert driver.lent_streams() == 2  # the marks', and the mover's
            with Session(target, [source.endpoint]), Session(target, [source.endpoint]):
                assert driver.lent_streams() == driver.made_streams[0] == 4
            assert driver.lent_streams() == 2
        assert driver.lent_streams() == 0
        assert theirs.lent_streams() == 2
    assert theirs.lent_streams() == 0


def test_a_hundred_ends_opened_and_closed_leave_no_stream() -> None:
    machine = FakeMachine()
    source, driver = GpuEnd(machine), FakeCuda(machine)
    published, memory = source.transport.publish(), source.transport.memory
    for _ in range(100):
        target = GpuEnd(machine, driver=driver)
        target.transport.connect(published, memory).close()
        target.transport.close()
        assert driver.lent_streams() == 0
    assert driver.made_streams[0] == 2


def test_a_peer_whose_memory_has_gone_takes_no_stream_along() -> None:
    machine = FakeMachine()
    source, target = GpuEnd(machine), GpuEnd(machine)
    published, memory = source.transport.publish(), source.transport.memory
    lent = target.driver.lent_streams()
    source.driver.free(source.memory)
    with pytest.raises(AtlasError):
        target.transport.connect(published, memory)
    assert target.driver.lent_streams() == lent


def test_streams_of_two_gpus_are_not_mixed_up_and_one_nobody_closed_comes_back() -> None:
    driver = FakeCuda(FakeMachine(gpus=2), sees=(0, 1))
    one, other = driver.queue(0, 0), driver.queue(1, 0)
    assert one.stream.address != other.stream.address
    one.close()
    one.close()
    assert [driver.streams.idle(device) for device in (0, 1)] == [1, 0]
    again, more = driver.queue(0, 0), driver.queue(0, 0)
    assert again.stream.address == one.stream.address != more.stream.address
    del other
    gc.collect()
    assert driver.lent_streams(1) == 0


class QueueDriver(FakeLaunches):
    """A driver whose streams are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.streams = StreamStock(self._make)

    def _make(self, device: int) -> int:
        self.made += 1
        return 100 * device + self.made


def test_a_queue_takes_no_stream_that_torch_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(*_: Any) -> None:
        raise AssertionError("torch gives this stream to somebody else too")

    monkeypatch.setattr(torch.cuda, "Stream", shared)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address, _: FakeStream(address))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", int, raising=False)
    driver: Any = QueueDriver()
    queues = [TorchQueue(driver, 1, 0) for _ in range(40)]
    streams = [one.stream.cuda_stream for one in queues]
    streams += [one.another_stream().cuda_stream for one in queues]
    assert sorted(streams) == list(range(101, 181))
    for one in queues:
        one.close()
        one.close()
    assert driver.streams.idle(1) == 80
    runs = [AddressRuns(0, 0, ORIGIN.ends, (*ORIGIN.ends, ORIGIN.source))]
    for act in (
        lambda: queues[0].post(runs), lambda: queues[0].prepare([]), lambda: queues[0].after(7),
        queues[0].after_caller,
    ):  # fmt: skip
        with pytest.raises(AtlasError) as refused:
            act()
        assert refused.value.code is Code.WIRE_FAILED


class Contexts:
    """CUDA's library, as far as it makes streams: which device is current then."""

    def __init__(self, answer: int = 0) -> None:
        self.current: list[int] = []
        self.made: list[tuple[int, int, int]] = []
        self.answer = answer

    def library(self) -> SimpleNamespace:
        """Under the names that it has there; most functions are called by nobody."""
        unused = (
            "cuEventQuery", "cuStreamQuery", "cuEventRecord", "cuGraphLaunch", "cuStreamWaitEvent",
            "cuMemcpyHtoDAsync_v2",
        )  # fmt: skip
        return SimpleNamespace(
            cuInit=lambda _: 0, cuCtxGetCurrent=self.find, cuDeviceGet=self.number,
            cuDevicePrimaryCtxRetain=self.retain, cuCtxPushCurrent_v2=self.push,
            cuCtxPopCurrent_v2=self.pop, cuStreamCreateWithPriority=self.make_stream,
            cuCtxGetStreamPriorityRange=self.priorities, cuGetErrorName=lambda *_: 0,
            **{name: SimpleNamespace() for name in unused},
        )  # fmt: skip

    def find(self, context: Any) -> int:
        context._obj.value = self.current[-1] if self.current else None
        return 0

    def number(self, number: Any, device: int) -> int:
        number._obj.value = device
        return 0

    def retain(self, context: Any, number: Any) -> int:
        context._obj.value = 7000 + number.value
        return 0

    def push(self, context: Any) -> int:
        self.current.append(context.value)
        return 0

    def pop(self, context: Any) -> int:
        context._obj.value = self.current.pop()
        return 0

    def priorities(self, least: Any, most: Any) -> int:
        least._obj.value, most._obj.value = 3, -5
        return 0

    def make_stream(self, stream: Any, flags: int, priority: int) -> int:
        self.made.append((self.current[-1], flags, priority))
        stream._obj.value = 50 + len(self.made)
        return self.answer


def driver_over(contexts: Contexts, monkeypatch: pytest.MonkeyPatch) -> LibCuda:
    library = contexts.library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(ctypes, "PyDLL", lambda _: library)
    return LibCuda()


def test_the_driver_makes_a_stream_on_its_own_device_that_waits_for_no_other_and_goes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contexts = Contexts()
    driver = driver_over(contexts, monkeypatch)
    lent = [driver.streams.lend(device, contexts).address for device in (1, 0)]
    assert lent == [51, 52]
    assert contexts.made == [(7001, 1, 3), (7000, 1, 3)]
    assert not contexts.current


def test_a_gpu_that_gives_no_stream_is_refused_with_a_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contexts = Contexts(answer=2)
    driver = driver_over(contexts, monkeypatch)
    made: list[int] = []
    monkeypatch.setattr(driver, "make_event", made.append)
    with pytest.raises(AtlasError) as refused:
        DeviceMarks(driver, 0)
    assert refused.value.code is Code.WIRE_FAILED
    assert not made, "events that nobody gives back"
    assert not contexts.current


def test_marks_that_were_closed_are_refused_with_a_code() -> None:
    marks = DeviceMarks(FakeCuda(FakeMachine()), 0)
    marks.mark()
    marks.close()
    with node_of(small("dense"), FakeMachine(), np.random.default_rng(1)) as (node, _, _driver):
        pass
    for act in (
        marks.mark, lambda: marks.wait(0), lambda: marks.event(0),
        lambda: node.offer("r", [0, 1, 2, 3], 16),
    ):  # fmt: skip
        with pytest.raises(AtlasError) as refused:
            act()
        assert refused.value.code is Code.WIRE_FAILED
