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


def run_on(cores: set[int]) -> None:
    """Have the calling thread, and those that it makes, run on some cores, if any are named."""
    if cores:
        with suppress(OSError):  # cores that were taken away meanwhile
            os.sched_setaffinity(0, cores)


def run_beside(cores: set[int]) -> None:
    """The same for a thread that reads, behind those that compute where it meets them.

    An engine that computes then keeps its core, and one that waits lends it.
    """
    run_on(cores)
    if cores:
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _BEHIND
            )


@contextmanager
def making_threads_for(cores: set[int]) -> Iterator[None]:
    """Threads that the calling one makes meanwhile run on some cores; it goes back to its own."""
    own = os.sched_getaffinity(0) if cores else set()
    run_on(cores)
    try:
        yield
    finally:
        run_on(own)
