"""Call a store with a time limit.

A call that exceeds its limit continues in its thread and keeps its memory, which is released only
when the call ends. The threads are daemons, so a hanging store does not keep the process alive.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from kvatlas.errors import AtlasError, Code

T = TypeVar("T")


class Deadline:
    """The time at which a caller stops waiting for the store."""

    def __init__(self, timeout: float) -> None:
        self.timeout, self._end = timeout, time.monotonic() + timeout

    @property
    def left(self) -> float:
        """Return the remaining seconds, or 0 after the deadline."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> AtlasError:
        """Return the error to raise after the deadline."""
        hint = (
            "Compute the tokens instead of fetching them, or open the tier with a larger timeout="
        )
        problem = "The store did not respond in time"
        got = f"no result within {self.timeout:g} seconds"
        return AtlasError(Code.DEADLINE, problem, got=got, hint=hint)


class StoreCalls:
    """A few threads that execute calls to a store.

    >>> from threading import get_native_id
    >>> polling = StoreCalls(threads=1, nice=3)
    >>> niceness = polling.start(lambda: os.getpriority(os.PRIO_PROCESS, get_native_id())).result()
    >>> niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3), polling.close(Deadline(5.0))
    (True, True)
    >>> calls = StoreCalls(threads=1)
    >>> calls.result(calls.start(lambda: 7), Deadline(5.0))
    7
    >>> calls.close(Deadline(5.0))
    True
    >>> calls.result(calls.start(lambda: 7), Deadline(5.0))
    Traceback (most recent call last):
        ...
    kvatlas.errors.AtlasError: ...
    """

    def __init__(self, threads: int, *, nice: int = 0) -> None:
        """Start the threads. `nice` lowers their priority, like `nice` for processes."""
        self._nice = nice
        self._waiting: OrderedDict[Future[Any], Callable[[], Any]] = OrderedDict()
        """Calls that have not started, oldest first."""
        self._closing = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvatlas-store-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call and return its future, which fails if this object is closed."""
        made: Future[T] = Future()
        with self._changed:
            if self._closing:
                hint = "Open the store again"
                problem = "The store is closed"
                got = "a call after close()"
                refusal = AtlasError(Code.WIRE_FAILED, problem, got=got, hint=hint)
                made.set_exception(refusal)
                return made
            self._waiting[made] = call
            self._changed.notify()
        return made

    def result(self, started: Future[T], deadline: Deadline) -> T:
        """Return the result of a call. Raises an error with code `DEADLINE` if it takes too long.

        Exceptions other than `AtlasError` are raised with code `WIRE_FAILED`.
        """
        try:
            return started.result(deadline.left)
        except TimeoutError:
            self._withdraw(started)
            raise deadline.passed() from None
        except AtlasError:
            raise
        except Exception as problem:
            got = f"{type(problem).__name__}: {problem}"
            hint = "Check that the store is running, and read its log"
            text = "A call to the store failed"
            raise AtlasError(Code.WIRE_FAILED, text, got=got, hint=hint) from problem

    def close(self, deadline: Deadline) -> bool:
        """Finish all queued calls, end the threads, and return whether that was done in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(deadline.left)
        return not any(thread.is_alive() for thread in self._threads)

    def _withdraw(self, started: Future[Any]) -> None:
        """Cancel a call that has not begun, so that calls do not pile up while the store hangs."""
        if started.cancel():
            with self._changed:
                mine = self._waiting.pop(started, None) is not None
            if mine:
                started.set_running_or_notify_cancel()

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popitem(last=False) if self._waiting else None

    def _yield(self) -> None:
        """Lower this thread's priority permanently."""
        thread = threading.get_native_id()
        with suppress(OSError):  # the system does not support priorities of threads
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + self._nice
            os.setpriority(os.PRIO_PROCESS, thread, niceness)

    def _work(self) -> None:
        if self._nice:
            self._yield()
        while (item := self._next()) is not None:
            made, call = item
            if made.set_running_or_notify_cancel():
                try:
                    made.set_result(call())
                except BaseException as problem:  # `result` raises it in the caller's thread
                    made.set_exception(problem)
