"""Handles of posted reads and writes, including those that this process performs itself."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from kvatlas.copying.memory_copy import copy_runs_unchecked
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors

_LONGEST_PAUSE = 2e-3


class Handle(ABC):
    """A read or write that was posted."""

    _done = False
    _settled = False
    _failure: AtlasError | None = None
    expected_end = math.inf
    """The expected end of the operation, by the monotonic clock; infinity if it is unknown."""

    def poll(self) -> bool:
        """Whether the operation is done. If it has failed, every call raises its error."""
        if self._failure is not None:
            raise self._failure
        if not self._done:
            try:
                self._done = self._poll()
            except AtlasError as failure:
                self._failure = failure
                raise
            except Exception as problem:
                got = f"{type(problem).__name__}: {problem}"
                self._failure = errors.own_limit(problem) or errors.failed(got)
                raise self._failure from problem
        return self._done

    def peek(self) -> bool:
        """Like `poll`, but may leave the cleanup of a finished operation to the next `poll`."""
        return self.poll()

    @abstractmethod
    def _poll(self) -> bool:
        """Whether the operation is done. Not called again once it is done or has failed."""

    def wait(self, deadline: float, interrupt: Callable[[], None] = lambda: None) -> None:
        """Wait until the operation is done.

        Raise the error `deadline` if the operation is still in flight at the time `deadline`
        (monotonic clock). `interrupt` is called between polls; if it raises an error, the wait ends
        with that error.
        """
        begun = time.monotonic()
        while not self.poll():
            interrupt()
            now = time.monotonic()
            if now > deadline:
                got = f"an operation that is still in flight after {now - begun:.1f} s"
                hint = "Allow more time, or retry on another replica"
                raise AtlasError(Code.DEADLINE, got=got, hint=hint)
            # Pauses grow with the time waited, so that the end of a short operation is seen soon.
            self._pause(min((now - begun) / 20, _LONGEST_PAUSE))

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def release(self) -> None:
        """Release the resources of the operation, and cancel the operation if it is in flight.

        Not every transport can stop an operation in flight: see `settle`.
        """
        if not self._done and self._failure is None:
            self._failure = errors.cancelled()
        self._release()

    def _release(self) -> None:  # noqa: B027
        """Release the operation in the transport's library, if there is one. Must not block."""

    def settle(self) -> bool:
        """Return True if the operation can no longer read or write this process's memory.

        While the result is False, the operation may still access memory, even if it was released or
        has failed. Once True, the result stays True. Never raises, and may be called at any time
        from any thread.
        """
        if not self._settled:
            try:
                self._settled = self._done or self._settle()
            except Exception:
                return False
        return self._settled

    def _settle(self) -> bool:
        """Return True only if an unfinished operation can certainly no longer access memory.

        Transports override this. `settle` calls this method unless a poll has found the operation
        done.
        """
        return False


class Done(Handle):
    """An operation that was complete when it was posted."""

    _done = True

    def _poll(self) -> bool:
        return True


class Stepwise(Handle):
    """An operation that this process performs in steps: each poll performs the next step.

    A step yields the socket event that the next step waits for, or None.

    >>> work = Stepwise(iter([None, None]))
    >>> work.poll(), work.poll(), work.poll()
    (False, False, True)
    """

    waits_for: int | None = None

    def __init__(self, steps: Iterator[int | None]) -> None:
        self._steps = steps
        self._stepping = threading.Lock()
        self._given_up = False

    def _poll(self) -> bool:
        with self._stepping:
            if self._given_up:
                raise errors.cancelled()
            try:
                self.waits_for = next(self._steps)
            except StopIteration:
                return True
        return False

    def _pause(self, seconds: float) -> None:
        """Do nothing, because the next step does not depend on another process."""

    def _release(self) -> None:
        """Perform no further step. A step in progress in another thread finishes."""
        self._given_up = True

    def _settle(self) -> bool:
        """Whether no step is in progress and none will follow."""
        if not self._stepping.acquire(blocking=False):
            return False
        try:
            over = self._given_up or self._failure is not None
            if over:
                self._steps = iter(())  # drop the references to the memory
        finally:
            self._stepping.release()
        return over


def copy_steps(
    ends: Iterable[tuple[Bytes, Bytes, Copy]], check: Callable[[], None]
) -> Iterator[None]:
    """Copy runs between buffers of this process, one step per iteration.

    `check` is called before and after every step, and raises an error to end the copies.
    """
    for source, target, copy in ends:
        check()
        for _ in copy_runs_unchecked(source, target, copy.source, copy.destination, copy.length):
            yield
            check()
    check()
