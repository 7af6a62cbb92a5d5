"""On which cores the threads run that move bytes.

vLLM binds the threads of a CPU worker to the cores that they compute on, and threads that are
made later inherit that: they would take turns with those that compute, beside cores that
vLLM has left free for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from pathlib import Path

_BOUND_BY = ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""What vLLM sets for the processes whose threads it binds."""
_BEHIND = 5
"""Steps of priority that leave a quarter of a core to a thread that shares it."""


def free_cores() -> set[int]:
    """Cores of the engine that started this worker, where vLLM has bound it to some of them.

    None are named otherwise: threads then run wherever the calling one does.
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
    """Have a thread, or the calling one, and those that it makes, run on some cores, if named."""
    if cores:
        with suppress(OSError):  # cores that were taken away meanwhile, or a thread that has ended
            os.sched_setaffinity(thread, cores)


class ReadingThreads:
    """Threads that read for an engine: behind what it computes on this host, and beside it.

    They come after threads that compute, wherever they meet them. While the engine computes they
    also keep off its own cores, where vLLM has bound it to some.

    >>> reading = ReadingThreads(set(), behind=False)
    >>> reading.join()
    >>> reading.make_room(computing=True)
    """

    def __init__(self, cores: set[int], *, behind: bool) -> None:
        """`cores` are those that the engine was started with, where it is bound to fewer."""
        self._cores, self._behind = cores, behind
        self._beside = (cores - _computing_cores(cores)) or cores
        self._computing = False
        self._threads: set[int] = set()
        self._lock = threading.Lock()

    def join(self) -> None:
        """Make the calling thread one of them."""
        thread = threading.get_native_id()
        if self._behind:
            with suppress(OSError):
                own = os.getpriority(os.PRIO_PROCESS, thread)
                os.setpriority(os.PRIO_PROCESS, thread, own + _BEHIND)
        with self._lock:
            self._threads.add(thread)
            run_on(self._now, thread)

    def make_room(self, *, computing: bool) -> None:
        """Keep off the cores that the engine computes on, as long as it does."""
        if computing == self._computing or self._cores == self._beside:
            return
        with self._lock:
            self._computing = computing
            for thread in self._threads:
                run_on(self._now, thread)

    def leave(self) -> None:
        """All of them have ended: their numbers may be others'."""
        with self._lock:
            self._threads.clear()

    @property
    def _now(self) -> set[int]:
        return self._beside if self._computing else self._cores


def _computing_cores(cores: set[int]) -> set[int]:
    """The cores to which threads of this process are bound, of some: each thread to one or few."""
    bound = set[int]()
    for thread in Path("/proc/self/task").iterdir() if cores else ():
        with suppress(OSError):  # it has ended
            own = os.sched_getaffinity(int(thread.name))
            bound |= own if own < cores else set()
    return bound & cores


@contextmanager
def making_threads_for(cores: set[int]) -> Iterator[None]:
    """Threads that the calling one makes meanwhile run on some cores; it goes back to its own."""
    own = os.sched_getaffinity(0) if cores else set()
    run_on(cores)
    try:
        yield
    finally:
        run_on(own)
