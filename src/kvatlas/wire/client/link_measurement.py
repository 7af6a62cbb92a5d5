"""Measure the costs of a link for runs of one length, from timed reads between staging buffers.

Other threads and processes make a read take longer, never shorter. Four rules limit their effect on
the result:

- The costs of runs are the difference between two reads of the same number of bytes: one reads many
  runs, and the other a single run. An error in the measured bandwidth thus cancels out.
- The two reads are compared by wall time and by CPU time of the calling thread, and the larger
  difference is used. The CPU time hardly depends on the load of the machine.
- The number of runs grows until they take most of a read's time, or a limit is reached.
- Each time is the shortest of several measurements. The functions are timed in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvatlas.routing import Costs

_TURNS, _MOST_TURNS, _LEAST_SECONDS = 5, 25, 0.01
"""Functions are timed for `_TURNS` turns; for more, up to `_MOST_TURNS`, if they are that fast."""
_FEW_RUNS, _MORE = 256, 8
"""The number of runs that are read first, and the factor by which it grows."""
_MOST_BYTES = 1 << 20
"""The maximum number of bytes that are read as many runs."""
_OUTWEIGHS = 3
"""There are enough runs if they take this multiple of the time for the same bytes in one run."""


class Rehearsal(Protocol):
    """Test copies for a measurement of a link.

    A read copies from a staging buffer of the peer to a staging buffer of this node. A scatter
    copies from this node's staging buffer to scratch memory.
    """

    piece: int
    """Size in bytes of a staging buffer."""

    def read(self, count: int, length: int) -> Callable[[], None]:
        """Return a function that reads `count` runs of `length` bytes, with gaps between them."""

    def scatter(self, count: int, length: int) -> Callable[[], None]:
        """Return a function that scatters `count` runs of `length` bytes into scratch memory."""


class Clock(NamedTuple):
    """Two functions: one returns the time, the other the thread's CPU time, in seconds."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.thread_time


class _ShortestTimes(NamedTuple):
    """The shortest times of a function, in seconds."""

    wall: float
    cpu: float


_CLOCK = Clock()


def measure(rehearsal: Rehearsal, length: int, clock: Clock = _CLOCK) -> Costs:
    """Return the costs of a link for runs of about `length` bytes."""
    read, piece = rehearsal.read, rehearsal.piece

    def both(count: int) -> tuple[Callable[[], None], Callable[[], None]]:
        return read(count, length), read(1, count * length)

    length = min(length, piece)
    most = max(1, min(piece // 2, _MOST_BYTES) // length)
    count = min(_FEW_RUNS, most)
    many, joined = quickest(*both(count), clock=clock)
    while count < most and many.wall < _OUTWEIGHS * joined.wall:
        count = min(most, _MORE * count)
        many, joined = quickest(*both(count), clock=clock)
    more = max(0.0, many.wall - joined.wall, many.cpu - joined.cpu)
    scatter = rehearsal.scatter(count, length)
    alone, whole, scattered = quickest(read(1, 1), read(1, piece), scatter, clock=clock)
    # The fixed cost of a read belongs neither to its bytes nor to its runs.
    wire = piece / max(whole.wall - alone.wall, whole.wall / 2)
    copy = count * length / scattered.wall
    return Costs(descriptor=more / max(1, count - 1), wire=wire, copy=copy, piece=piece)


def quickest(*acts: Callable[[], object], clock: Clock = _CLOCK) -> list[_ShortestTimes]:
    """Return the shortest times of several calls of each function.

    The functions are called in turn, so that other threads slow down all functions equally.
    """
    shortest = [_ShortestTimes(float("inf"), float("inf"))] * len(acts)
    turns, begun = 0, clock.wall()
    while turns < _TURNS or (turns < _MOST_TURNS and clock.wall() < begun + _LEAST_SECONDS):
        turns += 1
        for index, act in enumerate(acts):
            wall, cpu = clock.wall(), clock.cpu()
            act()
            taken = clock.wall() - wall, clock.cpu() - cpu
            shortest[index] = _ShortestTimes(*map(min, shortest[index], taken))
    return [_ShortestTimes(max(1e-9, one.wall), one.cpu) for one in shortest]
