"""A stream that is none: what it is given lies in a row until it is told to go on."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from kvatlas.copying.address_runs import BlockSpans
from kvatlas.copying.cuda_driver import DriverError
from kvatlas.copying.memory_copy import as_bytes
from kvatlas.copying.torch_prepared import LaunchTables
from kvatlas.wire import Memory

Act = Callable[[], object]


class FakeStream:
    """A stream, by its address."""

    def __init__(self, address: int) -> None:
        self.cuda_stream = address


class FakeLaunches:
    """What launches of prepared copies need of CUDA's driver."""

    def __init__(self, *, writes_words: bool = True) -> None:
        self.row: list[Act] = []
        self.captured: dict[int, list[Act]] = {}
        self.capturing: list[Act] | None = None
        self.log: list[str] = []
        self.events: dict[int, bool] = {}
        self.ended: list[tuple[str, int]] = []
        self.writes_words, self.failed = writes_words, False

    def go_on(self) -> None:
        """Do all that was given."""
        row, self.row = self.row, []
        for act in row:
            act()

    def give(self, act: Act) -> None:
        """Have something done behind all else, or captured."""
        (self.row if self.capturing is None else self.capturing).append(act)

    def on(self, _: int) -> Any:
        return nullcontext()

    def write_word(self, to: int, number: int, _: int) -> bool:
        if self.writes_words:
            self.give(lambda: ctypes.memmove(to, number.to_bytes(4, "little"), 4))
        return self.writes_words

    def local_event(self, _: int) -> int:
        self.events[len(self.events)] = True
        return len(self.events) - 1

    def end_event(self, _: int, event: int) -> None:
        self.ended.append(("event", event))

    def synchronize(self, _: int, event: int) -> None:
        self.go_on()
        assert self.events[event]

    def finished(self, _: int, event: int) -> bool:
        if self.failed:
            raise DriverError("700")
        return self.events[event]

    def record(self, event: int, _: int) -> None:
        self.events[event] = False
        self.give(lambda: self.events.__setitem__(event, True))

    def order(self, *_: int) -> None:
        self.log.append("order")

    def capture(self, _: int, act: Act) -> int:
        self.capturing = []
        try:
            act()
        finally:
            graph, self.capturing = self.capturing, None
        self.captured[len(self.captured)] = graph
        self.log.clear()
        return len(self.captured) - 1

    def launch_graph(self, graph: int, _: int) -> None:
        self.log.append("graph")
        self.row += self.captured[graph]

    def end_graph(self, _: int, graph: int) -> None:
        self.ended.append(("graph", graph))


class FakeLaunchQueue:
    """A stream of a device whose memory is the host's."""

    number, programs, closed = 0, 0, False

    def __init__(self, driver: FakeLaunches) -> None:
        self.driver, self.lock = driver, threading.Lock()
        self.stream = FakeStream(1)
        self.waits = 0
        self.tables = LaunchTables(self)

    def caller_stream(self, _: int) -> int:
        return 2

    def another_stream(self) -> FakeStream:
        return FakeStream(3)

    def placed(self, starts: Any) -> Any:
        return starts

    def scales(self, starts: Any, which: Any, cast: Any) -> Any:
        raise NotImplementedError

    def on_stream(self) -> Any:
        return nullcontext()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0x5A, dtype=torch.uint8)

    def wait_for_launches(self) -> None:
        self.waits += 1
        self.driver.go_on()

    def kernel(
        self, ends: Any, starts: Any, spans: BlockSpans, ids: Any, _: int, cast: Any
    ) -> HostKernel:
        """Stands in for a copy that is launched again and again."""
        assert cast is None
        return HostKernel(self.driver, ends, starts, spans, ids)


class HostKernel:
    """Copies runs of host memory, between blocks whose ids it reads when it is its turn."""

    def __init__(
        self, driver: FakeLaunches, ends: Any, starts: Any, spans: BlockSpans, ids: Any
    ) -> None:
        self._driver, self._ends, self._starts = driver, ends, starts
        self._spans, self._ids = spans, ids

    def launch(self, stream: Any) -> None:
        del stream
        self._driver.log.append("launch")
        self._driver.give(self._copy)

    def _copy(self) -> None:
        spans, at = self._spans, []
        for end in (0, 1):
            blocks = self._ids[end].numpy()[spans.entries[end]]
            if end == 0:
                blocks = np.where((blocks >= 0) & (blocks < spans.blocks), blocks, 0)
            at.append(self._ends[end] + blocks * spans.strides[end] + spans.offsets[end])
        for a, b in zip(*self._starts, strict=True):
            for x, y, length in zip(*at, spans.length, strict=True):
                moved = as_bytes(Memory(int(a + x), int(length)))
                as_bytes(Memory(int(b + y), int(length)))[:] = moved
