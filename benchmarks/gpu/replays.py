"""How a call is timed on a GPU: by replays of a graph of many, by turns with its limit.

It needs nothing of a tree, so that two of them can be timed alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

_WARM = 0.05
"""Seconds of work before the clock starts: an idle chip clocks down."""
LONG = 100.0
"""Milliseconds that are timed, at least."""
_TURNS = 5
"""How often a cell and its limit take turns."""
_LEAST_OF_LIMIT, _LONG_OF_LIMIT = 3, 5.0
"""How often, and how many milliseconds, a limit is played in a turn."""
_REPLAY = 1.0
"""Milliseconds that a graph takes, at least: to start it takes up to 5 us, which is no call's."""
_MOST_CALLS = 64
"""Calls in a graph."""
_MOST_PLAYS = 500


class Case(NamedTuple):
    """Ready to run: calls that take turns, so that no cache holds their data, and a check."""

    calls: Sequence[Callable[[], Any]]
    work: float
    """What one call does, in the unit of the figure: bytes, or operations."""
    right: Callable[[], bool]
    """Poisons what is written, calls, and compares with float64."""


class Player(NamedTuple):
    """A case that was compiled, and captured where that is wanted."""

    play: Callable[[], Any]
    """All of its calls, one after the other, some times over."""
    calls: int
    """How many that are."""
    case: Case
    """Whose tensors a captured graph needs, and does not keep."""


def ready(case: Case, *, graph: bool = True) -> Player:
    """A case that can be played; a graph has its calls so often that its own start is little."""
    for call in case.calls:
        call()
    torch.cuda.synchronize()
    if not graph:
        return Player(lambda: [call() for call in case.calls], len(case.calls), case)
    once = _captured(case.calls)
    once.replay()
    torch.cuda.synchronize()
    taken = next(_elapsed(once.replay, 1))
    often = min(_MOST_CALLS // len(case.calls), math.ceil(_REPLAY / taken))
    if often <= 1:
        return Player(once.replay, len(case.calls), case)
    calls = list(case.calls) * often
    return Player(_captured(calls).replay, len(calls), case)


def _captured(calls: Sequence[Callable[[], Any]]) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _elapsed(play: Callable[[], Any], calls: int) -> Iterator[float]:
    """Milliseconds of a call, over and over, by the device's clock."""
    while True:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
        begin.record()
        play()
        end.record()
        end.synchronize()
        yield begin.elapsed_time(end) / calls


def warm_up(player: Player) -> None:
    """Play until the chip's clocks are up."""
    clock = time.perf_counter()
    while time.perf_counter() - clock < _WARM:
        player.play()
        torch.cuda.synchronize()


def times(player: Player, repeat: int, long: float) -> list[float]:
    """Milliseconds of a call, played so often and so long at least."""
    taken: list[float] = []
    for one in _elapsed(player.play, player.calls):
        taken.append(one)
        played = sum(taken) * player.calls
        if len(taken) >= repeat and (played >= long or len(taken) >= _MOST_PLAYS):
            break
    return taken


def milliseconds(
    case: Case, *, graph: bool = True, repeat: int = 15, long: float = LONG
) -> tuple[float, float]:
    """Median milliseconds of a call, and the spread of the middle half."""
    player = ready(case, graph=graph)
    warm_up(player)
    return middle(times(player, repeat, long))


def by_turns(
    player: Player, limit: Player, *, repeat: int = 15, long: float = LONG
) -> tuple[list[float], list[float]]:
    """Milliseconds of calls and of their limit, timed by turns, so that both have one chip.

    Chips clock down when they are hot, and others use the host: what was timed minutes ago says
    little of now.
    """
    own: list[float] = []
    others: list[float] = []
    warm_up(player)
    for _ in range(_TURNS):
        own += times(player, -(-repeat // _TURNS), long / _TURNS)
        others += times(limit, _LEAST_OF_LIMIT, _LONG_OF_LIMIT)
    return own, others


def middle(taken: list[float]) -> tuple[float, float]:
    """The median, and the spread of the middle half as a share of it.

    >>> middle([1.0, 2.0, 4.0, 3.0, 5.0])
    (3.0, 1.0)
    """
    low, median, high = statistics.quantiles(taken, n=4)
    return median, (high - low) / median
