"""An engine with data-parallel ranks, each in processes of its own, behind one front."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.vllm.engine_arguments import answer_of, engine_config, sampling
from tests.vllm.engine_process import ANSWER_SECONDS, FOR_ALL, Answer
from tests.vllm.engine_process import started as started_process


@dataclass
class Asked:
    """A request, and which rank it goes to; without one vLLM balances."""

    prompt: Sequence[int]
    rank: int | None = None
    tokens: int = 8
    params: dict[str, Any] | None = None


@dataclass
class DataParallelEngine:
    """The test's end of it."""

    pipe: Connection

    def generate(self, *asked: Asked) -> list[Answer]:
        """What it answers to requests that come at once."""
        return [Answer(**one) for one in self._ask("generate", asked)]

    def prefill(self, prompt: Sequence[int], rank: int) -> Answer:
        (begun,) = self.generate(Asked(prompt, rank, 1, {"do_remote_decode": True}))
        return begun

    def pulls(self) -> list[int]:
        """Requests that each rank has read, by vLLM's own statistics."""
        found: list[int] = self._ask("pulls")
        return found

    def wait_until_nothing_is_held(self, seconds: float = 30.0) -> None:
        """All blocks of all ranks are free again."""
        deadline = time.monotonic() + seconds
        while not all(free := self._ask("all_free")):
            assert time.monotonic() < deadline, free
            time.sleep(0.02)

    def _ask(self, question: str, *what: Any) -> Any:
        self.pipe.send((question, *what))
        assert self.pipe.poll(ANSWER_SECONDS), f"no answer to {question}"
        return self.pipe.recv()


@contextmanager
def data_parallel_engine(
    model: Path, *, name: str, connector: dict[str, Any], ranks: int = 2, **options: Any
) -> Iterator[DataParallelEngine]:
    """An engine of so many data-parallel ranks, ready to be asked."""
    about = (str(model), connector, {"data_parallel_size": ranks, **options})
    with started_process(serve, about, name) as (pipe, _):
        yield DataParallelEngine(pipe)


def serve(pipe: Connection, model: str, connector: Any, options: dict[str, Any]) -> None:
    """The front's process."""
    workers = options["data_parallel_size"] * options.get("tensor_parallel_size", 1)
    cores = sorted(os.sched_getaffinity(0))
    bound = (str(cores[number % len(cores)]) for number in range(workers))
    os.environ |= FOR_ALL | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(bound)}
    try:
        config = engine_config(model, connector, options)
        asyncio.run(_Front(pipe, config).answer())
    except BaseException as problem:
        pipe.send(("failed", f"{type(problem).__name__}: {problem}"))
        raise


class _Front:
    def __init__(self, pipe: Connection, config: Any) -> None:
        self.pipe, self.config = pipe, config
        self.counter = 0
        self.engine: Any = None

    async def answer(self) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_vllm_config(self.config)
        try:
            self.pipe.send(("ready",))
            while (what := await asyncio.to_thread(self.pipe.recv))[0] != "stop":
                self.pipe.send(await getattr(self, what[0])(*what[1:]))
        finally:
            self.engine.shutdown()

    async def generate(self, asked: Sequence[Asked]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self._one, asked))

    async def _one(self, asked: Asked) -> dict[str, Any]:
        self.counter += 1
        given = {"prompt_token_ids": list(asked.prompt)}
        about = (given, sampling(asked.tokens, asked.params), f"request-{self.counter}")
        made = self.engine.generate(*about, data_parallel_rank=asked.rank)
        *_, last = [output async for output in made]
        return answer_of(last)

    async def all_free(self) -> list[bool]:
        """Whether each rank has nothing but free blocks: only then can it forget prefixes."""
        found: list[bool] = await self.engine.engine_core.call_utility_all_async(
            "reset_prefix_cache", False, False
        )
        return found

    async def pulls(self) -> list[int]:
        from prometheus_client import REGISTRY

        found = [0] * self.config.parallel_config.data_parallel_size
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                if sample.name == "vllm:kvatlas_pulls_total":
                    found[int(sample.labels["engine"])] += int(sample.value)
        return found
