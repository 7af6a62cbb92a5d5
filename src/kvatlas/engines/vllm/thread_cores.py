"""On which cores the threads run that move bytes.

vLLM binds the threads of a CPU worker to the cores that they compute on, and threads that are
made later inherit that: they would take turns with those that compute, beside cores that
vLLM has left free for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_BOUND_BY = ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""What vLLM sets for the processes whose threads it binds."""


def free_cores() -> set[int]:
    """Cores of the process that started this one, where vLLM has bound this one to some of them.

    No others: threads then run wherever this one does.

    >>> sorted(free_cores())
    []
    """
    bound = any(name in os.environ for name in _BOUND_BY)
    if not bound or not hasattr(os, "sched_getaffinity"):  # which only Linux has
        return set()
    with suppress(OSError):
        cores = os.sched_getaffinity(os.getppid())
        if cores > os.sched_getaffinity(0):
            return cores
    return set()


def run_on(cores: set[int]) -> None:
    """Have the calling thread, and those that it makes, run on some cores, if any are named."""
    if cores:
        with suppress(OSError):  # cores that were taken away meanwhile
            os.sched_setaffinity(0, cores)


@contextmanager
def making_threads_for(cores: set[int]) -> Iterator[None]:
    """Threads that the calling one makes meanwhile run on some cores; it goes back to its own."""
    own = os.sched_getaffinity(0) if cores else set()
    run_on(cores)
    try:
        yield
    finally:
        run_on(own)
