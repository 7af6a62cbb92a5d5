"""The staging buffers of a node, lent to its own transfers and to its peers."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from kvatlas.copying.memory import HOST
from kvatlas.wire.transports.base import Transport


def staging_memory(transport: Transport, device: str, nbytes: int) -> Any:
    """Allocate zeroed staging memory: an array on the host, or a byte tensor on a GPU."""
    if device == HOST:
        return transport.allocate(nbytes)
    import torch

    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


class StagingBuffers:
    """A registered memory of several buffers, lent one by one.

    Half of the buffers are for transfers of this node, half for its peers. Otherwise two nodes that
    read from each other could each wait for a buffer that the other holds.

    >>> import numpy as np
    >>> staging = StagingBuffers(np.zeros(4 * 4096, np.uint8), 4096)
    >>> mine, lent = staging.acquire(2), staging.acquire(2, for_peer=True)
    >>> len(mine), len(lent), staging.acquire(1), staging.free
    (2, 2, [], 0)
    >>> staging.give_back(mine + lent)
    >>> staging.free
    4
    """

    def __init__(self, memory: Any, piece: int) -> None:
        self.memory, self.piece, self.count = memory, piece, int(memory.nbytes) // piece
        own = -(-self.count // 2)
        self._free = {False: list(range(own)), True: list(range(own, self.count))}
        self._own = own
        self._changed = threading.Condition()

    @property
    def free(self) -> int:
        """The number of free buffers."""
        with self._changed:
            return sum(map(len, self._free.values()))

    def most(self, *, for_peer: bool = False) -> int:
        """The number of buffers available to transfers of this node, or to its peers."""
        return self.count - self._own if for_peer else self._own

    def acquire(self, count: int, seconds: float = 0.0, *, for_peer: bool = False) -> list[int]:
        """Wait up to `seconds` for `count` free buffers. Return their indices, or an empty list."""
        free = self._free[for_peer]
        with self._changed:
            if not self._changed.wait_for(lambda: count <= len(free), seconds):
                return []
            return [free.pop() for _ in range(count)]

    def give_back(self, buffers: Iterable[int]) -> None:
        """Return buffers that were acquired."""
        with self._changed:
            for buffer in buffers:
                self._free[buffer >= self._own].append(buffer)
            self._changed.notify_all()

    def view(self, buffer: int, nbytes: int) -> Any:
        """View the first bytes of a buffer: an array on the host, or a tensor on a GPU."""
        return self.memory[buffer * self.piece :][:nbytes]
