"""Memory that a transport was given and has not been seen to be done with.

A read that was given up may still arrive: a stopped source goes on, and its bytes land
wherever the read was posted. Such memory is not reused before the transport has said that
the operation is over, however it ended.
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
    """An operation, as far as quarantine goes: a transport's handle, for one."""

    def settle(self) -> bool:
        """Whether it can touch memory no more."""


_EVERY = 0.02
"""Seconds between two looks at operations that were given up."""

_PATIENCE = 10.0
"""Seconds in which they may end by themselves; then their link is torn down.

What a torn down link keeps for good (NIXL) or takes with it is worth some patience.
"""


@dataclass
class _Kept:
    handles: list[Settling]
    then: Callable[[], None]
    sever: Callable[[], None]
    sever_at: float


class Quarantine:
    """Operations that were given up, each with what is done once it cannot touch memory.

    >>> from kvatlas.wire.transports.base import Done
    >>> quarantine = Quarantine()
    >>> quarantine.hold([Done()], lambda: print("may be reused"))
    may be reused
    >>> len(quarantine)
    0
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._lock = threading.Lock()
        self._watching = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    def hold(
        self,
        handles: Sequence[Settling],
        then: Callable[[], None],
        sever: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `then` once all operations are over: now, or from a thread that watches them.

        Operations that do not end by themselves are ended by `sever`, which tears their link
        down.
        """
        left = [handle for handle in handles if not handle.settle()]
        if not left:
            then()
            return
        with self._lock:
            self._kept.append(_Kept(left, then, sever, time.monotonic() + _PATIENCE))
            start, self._watching = not self._watching, True
        if start:
            threading.Thread(target=self._watch, name="kvatlas-quarantine", daemon=True).start()

    def sweep(self) -> None:
        """Let go of what is over."""
        with self._lock:
            kept, self._kept = self._kept, []
        for one in kept:
            one.handles = [handle for handle in one.handles if not handle.settle()]
            if one.handles and time.monotonic() > one.sever_at:
                one.sever_at = float("inf")
                _carefully(one.sever)
        with self._lock:
            self._kept += [one for one in kept if one.handles]
        for one in kept:
            if not one.handles:
                _carefully(one.then)

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            self.sweep()
            with self._lock:
                if not self._kept:
                    self._watching = False
                    return
            pause.wait(_EVERY)


def _carefully(act: Callable[[], None]) -> None:
    """What fails here must not keep other memory from being let go."""
    try:
        act()
    except Exception:
        log.exception("memory could not be let go")
