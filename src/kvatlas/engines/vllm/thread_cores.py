"""CPU affinity and priority of the threads that move bytes.

vLLM binds the threads of a CPU worker to the cores that they compute on, and later threads inherit
this affinity. Transfer threads would then compete with compute threads while other cores are idle.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from pathlib import Path

_BOUND_BY = ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables that vLLM sets for processes whose threads it binds."""
_BEHIND = 5
"""Niceness increment; a thread that shares a core then gets about a quarter of it."""


def free_cores() -> set[int]:
    """Return the cores of the engine's process if vLLM bound this worker to a subset of them.

    Otherwise return an empty set: threads then keep the affinity that they inherit.
    """
    engine = parent_process()
    bound = any(name in os.environ for name in _BOUND_BY)
    if engine is None or not bound or not hasattr(os, "sched_getaffinity"):  # only Linux has it
        return set()
    with suppress(OSError):
        cores = os.sched_getaffinity(engine.pid or 0)
        if cores > os.sched_getaffinity(0):
            return cores
    return set()


def run_on(cores: set[int], thread: int = 0) -> None:
    """Bind a thread, given by its native id, to cores; 0 is the calling thread.

    Do nothing if `cores` is empty.
    """
    if cores:
        with suppress(OSError):  # the cores are no longer available, or the thread has ended
            os.sched_setaffinity(thread, cores)


class ReadingThreads:
    """The threads that transfer caches of an engine, and their priority and CPU cores.

    If `behind` is true, transfer threads get a lower priority. While the engine computes, transfer
    threads also avoid the cores to which vLLM bound its compute threads.

    >>> reading = ReadingThreads(set(), behind=False)
    >>> reading.join()
    >>> reading.make_room(computing=True)
    """

    def __init__(self, cores: set[int], *, behind: bool) -> None:
        """Start without threads.

        `cores` are the cores of the engine's process, or empty if vLLM binds no threads to cores.
        If `behind` is true, the transfer threads get a lower priority.
        """
        self._cores, self._behind = cores, behind
        self._spare = (cores - _computing_cores(cores)) or cores
        self._computing = False
        self._threads: set[int] = set()
        self._lock = threading.Lock()

    def join(self) -> None:
        """Add the calling thread to the transfer threads."""
        thread = threading.get_native_id()
        if self._behind:
            with suppress(OSError):
                own = os.getpriority(os.PRIO_PROCESS, thread)
                os.setpriority(os.PRIO_PROCESS, thread, own + _BEHIND)
        with self._lock:
            self._threads.add(thread)
            run_on(self._now, thread)

    def make_room(self, *, computing: bool) -> None:
        """Keep transfer threads off the compute cores if `computing` is true.

        Otherwise, transfer threads may run on all cores of the engine.
        """
        if computing == self._computing or self._cores == self._spare:
            return
        with self._lock:
            self._computing = computing
            for thread in self._threads:
                run_on(self._now, thread)

    def leave(self) -> None:
        """Forget all threads after they have ended, because the system may reuse their ids."""
        with self._lock:
            self._threads.clear()

    @property
    def _now(self) -> set[int]:
        return self._spare if self._computing else self._cores


def _computing_cores(cores: set[int]) -> set[int]:
    """Return the subset of `cores` to which individual threads of this process are bound."""
    bound = set[int]()
    for thread in Path("/proc/self/task").iterdir() if cores else ():
        with suppress(OSError):  # the thread has ended
            own = os.sched_getaffinity(int(thread.name))
            bound |= own if own < cores else set()
    return bound & cores


@contextmanager
def making_threads_for(cores: set[int]) -> Iterator[None]:
    """Bind threads that are created in this context to cores; restore the affinity afterwards."""
    own = os.sched_getaffinity(0) if cores else set()
    run_on(cores)
    try:
        yield
    finally:
        run_on(own)
