"""Streams that nobody else is given as long as their owner is there.

torch hands out 32 streams of a device in turn, so that a process with more owners than that
has some that share one. A graph that is captured on a shared stream takes in the other's work,
or fails because of it. So these are made by the driver, and torch never hands them out.

They are lent, and not destroyed. torch's allocators keep memory by the stream that it was used
on, and turn to that stream when they give it back, which may be long after the stream's owner
has gone. Whoever is lent a stream next comes behind what is still under way there, and uses
the memory that was kept for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class LentStream(NamedTuple):
    """A stream, and what to call once it is not used any more: the first call alone counts."""

    address: int
    give_back: Callable[[], object]


class StreamStock:
    """Streams of the devices of this process; any thread may use it.

    >>> stock = StreamStock(make=lambda device: 100 + device)
    >>> class Queue: ...
    >>> owner = Queue()
    >>> lent = stock.lend(3, owner)
    >>> lent.address, stock.idle(3)
    (103, 0)
    >>> lent.give_back()
    >>> stock.idle(3)
    1
    """

    def __init__(self, make: Callable[[int], int]) -> None:
        """`make` has the driver make a stream of a device."""
        self._make = make
        self._idle: dict[int, deque[int]] = {}

    def lend(self, device: int, owner: object) -> LentStream:
        """A stream of a device, until it is given back or its owner is garbage."""
        idle = self._idle.setdefault(device, deque())
        try:
            address = idle.pop()
        except IndexError:
            address = self._make(device)
        # No lock: an owner may turn to garbage anywhere, in this method too.
        give_back = weakref.finalize(owner, idle.append, address)
        give_back.atexit = False
        return LentStream(address, give_back)

    def idle(self, device: int) -> int:
        """Streams of a device that nobody has."""
        return len(self._idle.get(device, ()))
