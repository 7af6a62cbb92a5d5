"""`Transfer`: one request in flight, its progress and its outcome."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.block_ledger import BlockClaim
from kvatlas.wire.rpc import log
from kvatlas.wire.transports.errors import failed, own_limit

_LOOK_SECONDS = 0.002
"""Seconds within which a thread that waits for layers notices the end of the transfer."""


class TransferPart:
    """One part of a transfer. It runs once, in a worker thread or in the waiting thread."""

    def __init__(
        self,
        act: Callable[[], None],
        *,
        quick: bool = False,
        ends_within: Callable[[float], bool] = lambda _: False,
    ) -> None:
        """Create a part that calls `act` once.

        If `quick` is true, the part may also run in the thread that waits for the transfer.
        `ends_within(seconds)` waits for at most `seconds`, and returns whether the part would now
        end without waiting.
        """
        self._act, self.quick, self.ends_within = act, quick, ends_within
        self._claim, self._under_way = threading.Lock(), threading.Lock()
        self._under_way.acquire()
        self.over = False
        """Whether the part has finished."""

    def __call__(self) -> None:
        """Run the part, unless another thread has started it."""
        if self._claim.acquire(blocking=False):
            try:
                self._act()
            finally:
                self.over = True
                self._under_way.release()

    def join(self) -> None:
        """Wait for the thread that runs the part."""
        if self._claim.locked():
            with self._under_way:
                pass


class Transfer:
    """A request in flight over several ranks.

    A transfer is ready when every rank has delivered its bytes. The transfer fails when one rank
    fails, or when the deadline passes, even if ranks are still waiting for a peer. The blocks of a
    transfer may be reused once it is `released`. A failed transfer is released only when the
    transport is known to have stopped using its blocks.

    >>> transfer = Transfer("request 17", ranks=(0, 1), total=8192, timeout=30)
    >>> transfer.add(0, 4096)
    >>> transfer.finished(0)
    >>> print(repr(transfer).partition(" after ")[0])
    <Transfer 'request 17': running, 4,096 of 8,192 bytes
    """

    def __init__(
        self,
        request: str,
        ranks: Sequence[int],
        total: int | Callable[[], int] | None,
        timeout: float,
        layers: Collection[str] | None = None,
        claim: BlockClaim | None = None,
        *,
        patient: bool = False,
    ) -> None:
        """Create a running transfer.

        `total` is the number of bytes that must arrive, a function that returns this number, or
        None for a push. `layers` are the names of the layers that the transfer delivers, or None if
        it does not track layers. `claim` is the claim on the blocks, and is released once the
        blocks may be reused. If `patient` is true, each arrival of bytes extends the deadline to
        `timeout` seconds after the arrival.
        """
        self.request = request
        self._total = total
        self._bytes: dict[int, int] = dict.fromkeys(ranks, 0)
        self._brings = layers
        self._claim = claim
        self._layers: dict[int, set[str]] = {rank: set() for rank in ranks}
        self._waiting = set(ranks)
        self._users = 0
        self._parts: list[TransferPart] = []
        self._lock = threading.Lock()
        self._layer_came = threading.Condition(self._lock)
        self._over = threading.Event()
        self._released = threading.Event()
        self._cancel = threading.Event()
        self.error: AtlasError | None = None
        self.begun = time.monotonic()
        self.deadline = self.begun + timeout
        self._patience = timeout if patient else 0.0
        self.seconds = 0.0
        if not self._waiting:
            self._end()

    def __repr__(self) -> str:
        state = str(self.error.code) if self.error else "ready" if self.done else "running"
        total = f" of {self._total:,}" if isinstance(self._total, int) else ""
        seconds = self.seconds if self.done else time.monotonic() - self.begun
        moved = f"{self.moved:,}{total} bytes after {seconds:.3f} s"
        return f"<Transfer {self.request!r}: {state}, {moved}>"

    @property
    def total(self) -> int | None:
        """The number of bytes that must arrive, according to the two plans; None for a push."""
        total = self._total
        if callable(total):  # concurrent threads compute the same number
            total = self._total = total()
        return total

    @property
    def moved(self) -> int:
        """The number of bytes moved so far, over all ranks."""
        with self._lock:
            return sum(self._bytes.values())

    @property
    def layers(self) -> set[str]:
        """The names of the layers that every rank has delivered, in a streamed transfer."""
        with self._lock:
            return set.intersection(*self._layers.values()) if self._layers else set()

    @property
    def done(self) -> bool:
        """Whether the transfer has ended, either ready or failed."""
        self._expire()
        return self._over.is_set()

    @property
    def ready(self) -> bool:
        """Whether every byte has arrived and every source has confirmed its lease."""
        return self.done and self.error is None

    @property
    def released(self) -> bool:
        """Whether the blocks may be reused: the transfer has ended and no longer uses them."""
        self._expire()
        return self._released.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancel.is_set()

    def cancel(self) -> None:
        """Cancel the transfer. When this returns, the transfer has failed or was already ready."""
        self._cancel.set()
        self._fail(self._cancellation())

    def wait(self, timeout: float | None = None) -> Transfer:
        """Wait until the transfer is ready, and return it.

        Raise the transfer's error if it fails, or `deadline` after `timeout` seconds.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        if timeout is None or until >= self.deadline or self._ends_within(timeout):
            self._help()
        # More than once only if bytes have put the deadline off.
        while (left := min(until, self.deadline) - time.monotonic()) > 0:
            if self._over.wait(left):
                break
        if not self.done:
            problem = f"The transfer is still running after {time.monotonic() - self.begun:.1f} s"
            got = f"{self.moved:,} bytes of request {self.request!r}"
            raise AtlasError(Code.DEADLINE, problem, got=got, hint="Wait longer, or call cancel()")
        if self.error is not None:
            raise self.error
        return self

    def wait_layers(self, names: Iterable[str], timeout: float | None = None) -> Transfer:
        """Wait until the given layers have arrived, so that a forward pass can start with them.

        In a streamed transfer, layers arrive in the order in which they are computed. Otherwise all
        layers arrive together at the end. Raises the transfer's error, `deadline` after `timeout`
        seconds, or `unknown_layer` for a layer that the transfer does not deliver.

        >>> transfer = Transfer("request 17", ranks=(0,), total=8192, timeout=30)
        >>> transfer.add_layer(0, "layers.0.attn")
        >>> transfer.wait_layers(["layers.0.attn"]).ready
        False
        """
        wanted, begun = set(names), time.monotonic()
        others = set() if self._brings is None else wanted.difference(self._brings)
        if others:
            problem, got = (
                "The transfer does not deliver this layer",
                repr(min(others, key=str))[:200],
            )
            hint = (
                "Pass layers of the plan. If pull() was called with layers=, pass only those layers"
            )
            raise AtlasError(Code.UNKNOWN_LAYER, problem, got=got, hint=hint)
        while not wanted <= self.layers:
            if self.done:
                return self.wait(0.0)  # all are here, or its failure is raised
            # Read again each time: bytes may have put the deadline off.
            if time.monotonic() > (self.deadline if timeout is None else begun + timeout):
                missing = sorted(wanted - self.layers)
                problem = f"Some layers have not arrived after {time.monotonic() - begun:.1f} s"
                got = f"{len(missing)} missing layers: {', '.join(map(repr, missing[:3]))}"
                hint = "Wait longer, or cancel the transfer"
                raise AtlasError(Code.DEADLINE, problem, got=got, hint=hint)
            with self._lock:
                self._layer_came.wait(_LOOK_SECONDS)
        return self

    def carry_out(self) -> None:
        """Run the parts that no thread has started yet, in the calling thread.

        The session's threads then need not be woken up for these parts.
        """
        for part in self._parts:
            part()

    def wait_released(self, timeout: float | None = None) -> bool:
        """Wait until the blocks may be reused. Return False if that takes longer than `timeout`."""
        begun = time.monotonic()
        with suppress(AtlasError):
            self.wait(timeout)
        left = None if timeout is None else max(0.0, begun + timeout - time.monotonic())
        return self._released.wait(left)

    # -- for the threads that carry it out --------------------------------------------------

    def add_part(
        self,
        act: Callable[[], None],
        *,
        quick: bool = False,
        ends_within: Callable[[float], bool] = lambda _: False,
    ) -> TransferPart:
        """Add a part. If `quick` is true, it may run in the thread that waits for the transfer.

        Waking another thread would add a tenth to the time of a quick part. `ends_within` is passed
        to `TransferPart`.
        """
        part = TransferPart(act, quick=quick, ends_within=ends_within)
        self._parts.append(part)
        return part

    def run_rank(
        self, rank: int, act: Callable[[], None], ended: Callable[[str], None] = lambda _: None
    ) -> bool:
        """Run `act`, one rank's part, and record its outcome. Return whether it has succeeded.

        `ended` is called with the error code of the transfer, or with "ok".
        """
        try:
            act()
            self.finished(rank)
        except AtlasError as refused:
            error = refused
        except Exception as defect:
            log.exception("transfer failed request=%r rank=%d", self.request, rank)
            got, hint = f"{type(defect).__name__}: {defect}", "See the traceback in the log"
            error = own_limit(defect) or failed(got, hint)
        else:
            ended("ok")
            return True
        self.failed(rank, error)
        ended(str(error.code if self.error is None else self.error.code))
        log.warning("transfer failed request=%r rank=%d code=%s", self.request, rank, error.code)
        return False

    def join(self) -> None:
        """Wait until no thread works on the transfer."""
        for part in self._parts:
            part.join()

    def _ends_within(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds. Return whether all parts can end without waiting."""
        until = time.monotonic() + timeout
        parts = [part for part in self._parts if not part.over]
        return all(part.ends_within(until - time.monotonic()) for part in parts)

    def _help(self) -> None:
        try:
            for part in self._parts:
                if part.quick:
                    part()
        except BaseException:  # such as KeyboardInterrupt: no other thread runs the part
            self.cancel()
            raise

    def check_cancelled(self) -> None:
        """Raise an error if the transfer has ended: cancelled, timed out, or failed elsewhere."""
        if self.done:
            raise self._cancellation()

    def add(self, rank: int, nbytes: int) -> None:
        """Count bytes that a rank has moved."""
        with self._lock:
            self._bytes[rank] += nbytes
            if self._patience:
                self.deadline = max(self.deadline, time.monotonic() + self._patience)

    def add_layer(self, rank: int, name: str) -> None:
        """Record that a rank has delivered a layer."""
        with self._lock:
            self._layers[rank].add(name)
            self._layer_came.notify_all()

    def restart(self, rank: int) -> None:
        """Reset the progress of a rank that starts over on another replica."""
        with self._lock:
            self._bytes[rank] = 0
            self._layers[rank].clear()

    def use(self) -> None:
        """Record that a thread may access the blocks, until it calls `leave`."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """End a `use`: the caller no longer accesses the blocks."""
        with self._lock:
            self._users -= 1
            if not self._users and self._over.is_set():
                self._release()

    def settle(self) -> bool:
        """Return whether the blocks may be reused. `Quarantine` requires this method."""
        return self.released

    def finished(self, rank: int) -> None:
        """Record that a rank has delivered all its bytes and its source has confirmed the lease."""
        total = self.total
        with self._lock:
            self._waiting.discard(rank)
            if self._waiting or self._over.is_set():
                return
            moved = sum(self._bytes.values())
            if total not in (None, moved):
                got = f"{moved} bytes; the destination's plan needs {total}"
                problem = "The transfer delivered the wrong number of bytes"
                self.error = failed(got, "Please report this as a bug in kvatlas", problem)
            self._end()

    def failed(self, rank: int, problem: AtlasError) -> None:
        """Record that a rank has failed on every replica, and cancel the other ranks."""
        with self._lock:
            self._waiting.discard(rank)
        self._fail(problem)

    def _expire(self) -> None:
        """End the transfer if its deadline has passed."""
        if not self._over.is_set() and time.monotonic() > self.deadline:
            got = f"{self.moved:,} bytes after {time.monotonic() - self.begun:.1f} s"
            hint = "Allow more time, or retry on another replica"
            self._fail(AtlasError(Code.DEADLINE, got=got, hint=hint))

    def _fail(self, problem: AtlasError) -> None:
        with self._lock:
            if not self._over.is_set():
                self.error = problem
                self._end()

    def _cancellation(self) -> AtlasError:
        return AtlasError(
            Code.CANCELLED, got=f"request {self.request!r}", hint="Start a new transfer"
        )

    def _end(self) -> None:
        self.seconds = time.monotonic() - self.begun
        # Before waiting threads wake up: the blocks of a complete transfer are free at once.
        if self._claim is not None and self.error is None:
            self._claim.release()
        elif self._claim is not None:
            self._claim.quarantine()
        self._over.set()
        if not self._users:
            self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
        self._released.set()
