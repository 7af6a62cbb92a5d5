"""Kernels compiled on all cores before anything is timed, and without being launched.

Workers build cases small and make their calls, which compile and launch nothing. A kernel that
several cases have is compiled by the first worker that comes to it. All others find it in
Triton's cache on disk, and so does the process that times.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton import knobs
from triton.runtime import jit

from benchmarks.gpu.cells import Cell

Work = Callable[[], Any]
"""Something that launches kernels; a worker is sent it."""
_TOLD = 10.0
"""Seconds between lines that say how far it is."""


class Claims:
    """Who compiles what: a file for each kernel, made by the first who wants it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, kernel: str) -> bool:
        """Whether nobody had it before."""
        try:
            (self.folder / hashlib.sha256(kernel.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def taken(self) -> int:
        """Kernels that somebody has compiled, or is about to."""
        return sum(1 for _ in self.folder.iterdir())


class Failed(NamedTuple):
    """Work that could not be compiled."""

    work: str
    problem: str


@contextmanager
def compiling_only(claims: Claims) -> Iterator[None]:
    """Meanwhile, in this process, calls of kernels compile and launch nothing."""
    run, compiled = jit.JITFunction.run, jit.JITFunction._do_compile

    def run_without_launch(self: Any, *given: Any, warmup: bool, **more: Any) -> None:  # noqa: ARG001
        # What is returned would be launched again, without this.
        run(self, *given, warmup=True, **more)

    def compile_once(self: Any, key: Any, *more: Any) -> Any:
        name = f"{self.fn.__module__}.{self.fn.__qualname__} {key}"
        return compiled(self, key, *more) if claims.take(name) else None

    with (
        patch.object(jit.JITFunction, "run", run_without_launch),
        patch.object(jit.JITFunction, "_do_compile", compile_once),
    ):
        yield


def compile_cell(cell: Cell, choice: dict[str, Any]) -> None:
    """The kernels of a cell's calls, of what fills its pools, and of no check."""
    cell.build(choice).calls[0]()


_WHOLE_LIFE = ExitStack()
"""Of a worker."""


def _begin(folder: Path) -> None:
    os.environ["KVATLAS_BENCH_SMALL"] = "1"
    torch.set_num_threads(1)
    _WHOLE_LIFE.enter_context(compiling_only(Claims(folder)))


def _do(work: Work) -> Failed | None:
    try:
        work()
    except Exception as problem:
        return Failed(str(work)[:200], f"{type(problem).__name__}: {str(problem)[:300]}")
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return None


def compile_all(works: Sequence[Work], jobs: int | None = None) -> None:
    """Compile what each launches, side by side; those that take longest had better come first."""
    if not works:
        return
    begun = told = time.monotonic()
    # Workers are forked from a process that has imported everything, and has not seen the GPU.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu.run"])
    with tempfile.TemporaryDirectory() as folder:
        claims = Claims(Path(folder))
        workers = ProcessPoolExecutor(
            jobs or os.cpu_count(), context, initializer=_begin, initargs=(claims.folder,)
        )
        try:
            with workers as pool:
                futures = [pool.submit(_do, work) for work in works]
                for done, future in enumerate(as_completed(futures), 1):
                    if failed := future.result():
                        print(f"cannot be compiled: {failed.work}: {failed.problem}", flush=True)
                    if (now := time.monotonic()) - told > _TOLD or done == len(works):
                        told, kernels = now, claims.taken()
                        print(
                            f"compiled {kernels} kernels, {done} of {len(works)} calls, "
                            f"{now - begun:.0f} s", flush=True,
                        )  # fmt: skip
        except BrokenProcessPool as problem:
            print(f"not all is compiled: {problem}", flush=True)


@contextmanager
def compiled_late() -> Iterator[list[str]]:
    """Names of kernels that are compiled meanwhile, and are not in Triton's cache."""
    late: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            late.append(src.name)

    with patch.object(knobs.compilation, "listener", listen):
        yield late
