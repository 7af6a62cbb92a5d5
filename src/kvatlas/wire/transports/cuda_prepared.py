"""Prepared reads over a `cuda` link, with as little work as possible before the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvatlas.copying.cuda_driver import CudaDriver
from kvatlas.copying.device_queue import Posted, PreparedRuns, Tables
from kvatlas.wire.transports.base import Handle, PreparedRead
from kvatlas.wire.transports.cuda_copy import CudaCopy
from kvatlas.wire.transports.offer_board import PeerBoard
from kvatlas.wire.transports.opened_memory import MappedAllocation, OpenedMemory
from kvatlas.wire.transports.pace import CopyPace


class MappedMemory(NamedTuple):
    """A peer's allocations, as they were mapped when a read was prepared."""

    opened: OpenedMemory
    allocations: list[MappedAllocation]

    @property
    def gone(self) -> bool:
        """Whether one of them was unmapped, or soon will be."""
        return any(one.gone or one.forgotten for one in self.allocations)

    def hold(self) -> bool:
        """Keep them mapped until `let_go`. Return False if they were unmapped or have moved."""
        return self.opened.hold(self.allocations)

    def let_go(self) -> None:
        """End a `hold`: no posted copy reads them anymore."""
        for one in self.allocations:
            self.opened.release(one.allocation)


class PeerMarks(NamedTuple):
    """A peer's marks with all events opened in advance, because opening one is slow."""

    driver: CudaDriver
    device: int
    board: PeerBoard
    events: Sequence[int]

    def passed(self, mark: int | None) -> bool:
        """Whether a mark has completed."""
        if mark is None or mark <= self.board.marks_done:
            return True
        return self.driver.finished(self.device, self.events[mark % len(self.events)])


@dataclass(frozen=True)
class CudaPreparedRead(PreparedRead):
    """Pulls of one shape over one link."""

    runs: PreparedRuns
    memory: MappedMemory
    marks: PeerMarks
    pace: CopyPace
    check: Callable[[], None]
    """Raises an error if the link is closed."""
    nbytes: int

    @property
    def stale(self) -> bool:
        """Whether the peer's memory is no longer mapped at the same addresses."""
        return self.memory.gone

    def begin(self, src: Tables, dst: Tables, behind: int | None) -> Handle | None:
        """Launch the read, if that is allowed now and the peer's memory is still mapped."""
        self.check()
        if not self.marks.passed(behind) or not self.pace.may_begin() or not self.memory.hold():
            return None
        posted = None
        try:
            posted = self.runs.post(src, dst)
        finally:
            if posted is None:
                self.memory.let_go()
        return None if posted is None else self._launched(posted)

    def _launched(self, posted: Posted) -> Handle:
        over = _Once(self.memory.let_go)
        return CudaCopy.launched(posted, over, self.check, self.pace, self.nbytes)


class _Once:
    """Calls something at the first call, and nothing at others."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._left = [act]

    def __call__(self) -> None:
        while self._left:
            self._left.pop()()
