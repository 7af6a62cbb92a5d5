"""CUDA streams that have only one owner at a time.

torch hands out 32 streams per device in rotation, so if there are more than 32 owners, some share a
stream. A graph captured on a shared stream would include the other owner's work, or the capture
would fail because of that work. These streams are therefore created through the driver, and torch
never hands them out.

Streams are reused, not destroyed. torch's allocators cache memory by the stream that used it, and
may use that stream to free the memory long after the stream's owner is gone. When a stream is lent
again, the next owner's work runs after the work that is still queued on the stream, and reuses the
memory that torch has cached for the stream.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class LentStream(NamedTuple):
    """A lent stream: its address, and a function that gives it back to its `StreamStock`.

    Only the first call of `give_back` has an effect.
    """

    address: int
    give_back: Callable[[], object]


class StreamStock:
    """Lends streams of this process's devices. All methods are thread-safe.

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
        """Create an empty stock; `make(device)` creates a stream and returns its address."""
        self._make = make
        self._idle: dict[int, deque[int]] = {}

    def lend(self, device: int, owner: object) -> LentStream:
        """Lend a stream until it is given back, or until `owner` is garbage collected."""
        idle = self._idle.setdefault(device, deque())
        try:
            address = idle.pop()
        except IndexError:
            address = self._make(device)
        # No lock: an owner may be garbage collected at any point, also inside this method.
        give_back = weakref.finalize(owner, idle.append, address)
        give_back.atexit = False
        return LentStream(address, give_back)

    def idle(self, device: int) -> int:
        """Return the number of streams of a device that are not lent."""
        return len(self._idle.get(device, ()))
