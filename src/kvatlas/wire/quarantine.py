"""Quarantine: memory that an abandoned operation of a transport may still access.

The bytes of an abandoned read may still arrive: if a stopped source process continues, they are
written to the destination of the read. Such memory is not reused until the transport reports that
the operation is over, whether it succeeded or failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger("kvatlas.wire")


class Settling(Protocol):
    """An operation that may be quarantined, such as a transport's handle."""

    def settle(self) -> bool:
        """Whether the operation can no longer access memory."""


_EVERY = 0.02
"""Seconds between two checks of abandoned operations."""

_PATIENCE = 10.0
"""Seconds that abandoned operations get to end by themselves before their link is severed.

Severing is expensive: a severed NIXL link may keep its resources for good.
"""


@dataclass(eq=False)
class _Kept:
    handles: list[Settling]
    then: Callable[[], None]
    sever: Callable[[], None]
    sever_at: float


class Quarantine:
    """Abandoned operations, each with a callback to run when the operation is over.

    >>> from kvatlas.wire.transports.handles import Done
    >>> quarantine = Quarantine()
    >>> quarantine.hold([Done()], lambda: print("may be reused"))
    may be reused
    >>> len(quarantine)
    0
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        """Operations that are not over. While there are any, one thread checks them."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    def hold(
        self,
        handles: Sequence[Settling],
        then: Callable[[], None],
        sever: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `then` once all operations are over: now, or later from the watching thread.

        If operations do not end by themselves in time, `sever` is called, which must break their
        link.
        """
        left = [handle for handle in handles if not handle.settle()]
        if not left:
            then()
            return
        with self._lock:
            first = not self._kept
            self._kept.append(_Kept(left, then, sever, time.monotonic() + _PATIENCE))
        if first:
            threading.Thread(target=self._watch, name="kvatlas-quarantine", daemon=True).start()

    def _sweep(self) -> bool:
        """Run the callbacks of operations that are over, and sever links that take too long.

        Return whether operations are left.
        """
        with self._lock:
            kept = list(self._kept)
        for one in kept:
            one.handles = [handle for handle in one.handles if not handle.settle()]
            if one.handles and time.monotonic() > one.sever_at:
                one.sever_at = float("inf")
                carefully(one.sever)
        over = [one for one in kept if not one.handles]
        with self._lock:
            self._kept = [one for one in self._kept if one not in over]
            left = bool(self._kept)
        for one in over:
            carefully(one.then)
        return left

    def _watch(self) -> None:
        while self._sweep():
            time.sleep(_EVERY)


def carefully(act: Callable[[], None]) -> None:
    """Call `act` and log its error, so that a failure does not affect other operations."""
    try:
        act()
    except Exception:
        log.exception("the work after a transfer failed")
