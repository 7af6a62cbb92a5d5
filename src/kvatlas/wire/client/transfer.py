"""`Transfer`: one request on its way, its progress and its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.transports.errors import failed


class Transfer:
    """A request on its way over several ranks.

    It is ready when every rank has delivered; the first failure ends it.

    >>> transfer = Transfer("request 17", ranks=(0, 1), total=8192)
    >>> transfer.add(0, 4096)
    >>> transfer.finished(0)
    >>> print(repr(transfer).partition(" after ")[0])
    <Transfer 'request 17': running, 4,096 of 8,192 bytes
    """

    def __init__(self, request: str, ranks: Sequence[int], total: int | None) -> None:
        self.request = request
        self.total = total
        """Bytes that must arrive, from the destination's plan; None for a push."""
        self._bytes: dict[int, int] = dict.fromkeys(ranks, 0)
        self._layers: dict[int, set[str]] = {rank: set() for rank in ranks}
        self._waiting = set(ranks)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._cancel = threading.Event()
        self.error: AtlasError | None = None
        self.begun = time.monotonic()
        self.seconds = 0.0
        if not self._waiting:
            self._end()

    def __repr__(self) -> str:
        state = str(self.error.code) if self.error else "ready" if self.done else "running"
        total = "" if self.total is None else f" of {self.total:,}"
        seconds = self.seconds if self.done else time.monotonic() - self.begun
        moved = f"{self.moved:,}{total} bytes after {seconds:.3f} s"
        return f"<Transfer {self.request!r}: {state}, {moved}>"

    @property
    def moved(self) -> int:
        """Bytes that have moved so far, of all ranks."""
        with self._lock:
            return sum(self._bytes.values())

    @property
    def layers(self) -> set[str]:
        """Layers that every rank has delivered, in a streamed transfer."""
        with self._lock:
            return set.intersection(*self._layers.values()) if self._layers else set()

    @property
    def done(self) -> bool:
        """Whether it has ended, ready or failed."""
        return self._over.is_set()

    @property
    def ready(self) -> bool:
        """Whether every byte has arrived and every source has confirmed it."""
        return self._over.is_set() and self.error is None

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancel.is_set()

    def cancel(self) -> None:
        """Cancel it: it ends soon, and delivers nothing unless it already has."""
        self._cancel.set()

    def wait(self, seconds: float | None = None) -> Transfer:
        """Wait until it has ended; raises its failure, or once `seconds` have passed."""
        if not self._over.wait(seconds):
            problem = f"The transfer is still running after {time.monotonic() - self.begun:.1f} s"
            raise AtlasError(Code.DEADLINE, problem, got=self, hint="Wait longer, or cancel it")
        if self.error is not None:
            raise self.error
        return self

    # -- for those who carry it out ---------------------------------------------------------

    def check_cancelled(self) -> None:
        """Raise where it was cancelled, or another rank has failed."""
        if self.cancelled or self.error is not None:
            raise AtlasError(Code.CANCELLED, got=f"request {self.request}", hint="Start it again")

    def add(self, rank: int, nbytes: int) -> None:
        """Count bytes of a rank."""
        with self._lock:
            self._bytes[rank] += nbytes

    def add_layer(self, rank: int, name: str) -> None:
        """A rank has delivered a layer."""
        with self._lock:
            self._layers[rank].add(name)

    def restart(self, rank: int) -> None:
        """A rank starts over, on another replica."""
        with self._lock:
            self._bytes[rank] = 0
            self._layers[rank].clear()

    def finished(self, rank: int) -> None:
        """A rank has delivered and its source has confirmed."""
        self._leave(rank, None)

    def failed(self, rank: int, problem: AtlasError) -> None:
        """A rank has failed on every replica; the others are cancelled."""
        self._leave(rank, problem)

    def _leave(self, rank: int, problem: AtlasError | None) -> None:
        with self._lock:
            self._waiting.discard(rank)
            over, moved = not self._waiting, sum(self._bytes.values())
            short = over and self.total not in (None, moved)
            if problem is None and self.error is None and short:
                got = f"{moved} bytes where the destination's plan needs {self.total}"
                problem = failed(got, "Please report it: a route has left bytes out")
            if problem is not None and (self.error is None or self.error.code is Code.CANCELLED):
                self.error = problem
        if over:
            self._end()

    def _end(self) -> None:
        self.seconds = time.monotonic() - self.begun
        self._over.set()
