"""Engines one after the other in a single process, which imports vLLM once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.vllm.engine_process import START_SECONDS, Engine, EngineStartError, _Running, _start

COUNTED = (
    "vllm:external_prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:kvatlas_tier_loads_total",
    "vllm:kvatlas_tier_tokens_total",
    "vllm:kvatlas_tier_stores_total",
    "vllm:kvatlas_tier_failures_total",
)


@dataclass
class EngineHost:
    """The test's end of the process."""

    pipe: Connection
    process: Any

    @contextmanager
    def engine(self, model: Path, connector: Any = None, **options: Any) -> Iterator[Engine]:
        """An engine, until the next; `connector` is its kv_transfer_config."""
        self.pipe.send(("start", str(model), connector, options))
        made = Engine(self.pipe, self.process)
        assert self.pipe.poll(START_SECONDS), "an engine does not start"
        said, *what = self.pipe.recv()
        if said != "ready":
            raise EngineStartError(what[0])
        made.started = made.facts()
        try:
            yield made
        finally:
            self.pipe.send(("stop",))
            assert self.pipe.poll(START_SECONDS), "an engine does not stop"
            assert self.pipe.recv() == ("stopped",)


@contextmanager
def engine_host() -> Iterator[EngineHost]:
    """A process for engines, one at a time."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=host_engines, args=(there,), name="host")
    process.start()
    there.close()
    try:
        yield EngineHost(here, process)
    finally:
        here.close()
        process.join(20)
        process.kill()
        process.join()


def host_engines(pipe: Connection) -> None:
    """The process: engines as they are asked for, until nobody asks any more."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    try:
        while True:
            _, model, connector, options = pipe.recv()
            try:
                running = _CountingEngine(pipe, _start(model, connector, options))
            except Exception as problem:
                pipe.send(("failed", f"{type(problem).__name__}: {problem}"))
                cleanup_dist_env_and_memory()
                continue
            pipe.send(("ready",))
            running.loop()
            cleanup_dist_env_and_memory()
            pipe.send(("stopped",))
    except EOFError:
        return


class _CountingEngine(_Running):
    """Also tells what vLLM's own statistics have counted since it started."""

    def __init__(self, pipe: Connection, made: Any) -> None:
        super().__init__(pipe, made)
        self.before = _counted()

    def facts(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        found = {"free": pool.get_num_free_blocks(), "requests": len(self.scheduler.requests)}
        counted = {name: value - self.before.get(name, 0) for name, value in _counted().items()}
        self.pipe.send(("facts", found | counted))


def _counted() -> dict[str, float]:
    """What Prometheus would be told now."""
    from prometheus_client import REGISTRY

    return {
        sample.name.removeprefix("vllm:").removesuffix("_total"): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name in COUNTED
    }
