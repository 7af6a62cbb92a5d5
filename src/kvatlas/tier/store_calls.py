"""Calls of a store that somebody waits for, but not for ever.

A call that is late goes on in its thread, with the memory that it was given; what it had is
given back when it ends and not before. Threads are daemons: a store that hangs keeps
no process from ending.
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
    """A moment after which nobody waits any more."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; 0 afterwards."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> AtlasError:
        """What to raise when it has passed."""
        hint = "Compute the tokens instead, or give the store more time: deadline="
        problem = "The store did not answer in time"
        return AtlasError(Code.DEADLINE, problem, got=f"{self.seconds:g} seconds", hint=hint)


class StoreCalls:
    """A few threads that call a store.

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
        """With `nice`, threads leave the processor to others, as `nice` has processes do."""
        self._nice = nice
        self._waiting: OrderedDict[Future[Any], Callable[[], Any]] = OrderedDict()
        """Calls that no thread has begun, the oldest first."""
        self._closing = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvatlas-store-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Have something called; every call that is started is made, cancelled, or refused."""
        made: Future[T] = Future()
        with self._changed:
            if self._closing:
                hint = "Open the store anew"
                problem = "The store failed"
                refusal = AtlasError(Code.WIRE_FAILED, problem, got="a closed store", hint=hint)
                made.set_exception(refusal)
                return made
            self._waiting[made] = call
            self._changed.notify()
        return made

    def result(self, started: Future[T], deadline: Deadline) -> T:
        """What a call gives; `DEADLINE` where that takes too long.

        Whatever else a store raises is a failure of the store.
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
            hint = "See that the store runs, and what it says"
            raise AtlasError(Code.WIRE_FAILED, "The store failed", got=got, hint=hint) from problem

    def close(self, deadline: Deadline) -> bool:
        """End the threads when their calls end; whether all have ended in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(deadline.left)
        return not any(thread.is_alive() for thread in self._threads)

    def _withdraw(self, started: Future[Any]) -> None:
        """Forget a call that has not begun: behind a store that hangs they would pile up."""
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
        """Lower this thread's own priority; it is not raised again."""
        thread = threading.get_native_id()
        with suppress(OSError):  # a system whose threads have no priority of their own
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
                except BaseException as problem:  # told to whoever waits
                    made.set_exception(problem)
