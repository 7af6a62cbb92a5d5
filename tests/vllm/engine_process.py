"""A vLLM engine in a process of its own, which steps by itself and answers over a pipe.

Engines are forked from a process that has imported vLLM, compile nothing, and have small
caches: they start in seconds.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.vllm.connector_pulls import bytes_on_their_way, bytes_pulled, pulls
from tests.vllm.engine_arguments import answer_of, engine_config, sampling

START_SECONDS = 300.0
ANSWER_SECONDS = 180.0

FOR_ALL = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # Engines share the cores: threads that wait for each other would spin on them.
    "OMP_NUM_THREADS": "1",
}
"""The environment of every engine."""


@dataclass
class Answer:
    """What an engine says of a finished request."""

    tokens: list[int]
    logprobs: list[float]
    params: dict[str, Any] | None
    reason: str
    cached: int = 0
    drafts: list[list[int]] = field(default_factory=list)
    """What a drafter has guessed after each step."""
    samples: list[list[int]] = field(default_factory=list)
    """The tokens of every sample, if the request asked for several."""
    reasons: list[str] = field(default_factory=list)
    """Why each of them ended."""


@dataclass
class Engine:
    """The test's end of an engine."""

    pipe: Connection
    process: Any
    answers: dict[str, Answer] = field(default_factory=dict)
    counter: int = 0
    started: dict[str, Any] = field(default_factory=dict)
    """Its facts before the first request."""

    def add(
        self, prompt: Sequence[int], *, tokens: int = 8, params: Any = None, samples: int = 1
    ) -> str:
        self.counter += 1
        name = f"{self.process.name}-{self.counter}"
        self.pipe.send(("add", name, list(prompt), tokens, params, samples))
        return name

    def wait(self, name: str, seconds: float = ANSWER_SECONDS) -> Answer:
        deadline = time.monotonic() + seconds
        while name not in self.answers:
            assert self.pipe.poll(max(0.0, deadline - time.monotonic())), f"no answer to {name}"
            said, *what = self.pipe.recv()
            assert said == "done", what
            self.answers[what[0]] = Answer(**what[1])
        return self.answers.pop(name)

    def generate(self, prompt: Sequence[int], *, tokens: int = 8, params: Any = None) -> Answer:
        return self.wait(self.add(prompt, tokens=tokens, params=params))

    def sample(
        self, prompt: Sequence[int], samples: int, *, tokens: int = 8, params: Any = None
    ) -> Answer:
        """Ask for several seeded samples of one prompt."""
        return self.wait(self.add(prompt, tokens=tokens, params=params, samples=samples))

    def prefill(self, prompt: Sequence[int], *, samples: int = 1) -> Answer:
        params = {"do_remote_decode": True}
        return self.wait(self.add(prompt, tokens=1, params=params, samples=samples))

    def abort(self, name: str) -> None:
        self.pipe.send(("abort", name))

    def sleep_and_wake_up(self) -> None:
        """Give the memory of its caches back, and get other memory."""
        self._ask("nap")

    def forget(self) -> None:
        """Have no prefix be found any more."""
        self.pipe.send(("forget",))

    def facts(self) -> dict[str, Any]:
        """Free blocks, requests that hold some, or were preempted, and what was warned."""
        found: dict[str, Any] = self._ask("facts")
        return found

    def steps(self) -> list[tuple[float, int, bool]]:
        """Steps since the last look: seconds, requests that got a token, whether others came."""
        found: list[tuple[float, int, bool]] = self._ask("steps")
        return found

    def _ask(self, question: str) -> Any:
        self.pipe.send((question,))
        while True:
            assert self.pipe.poll(ANSWER_SECONDS)
            said, *what = self.pipe.recv()
            if said == question:
                return what[0]
            self.answers[what[0]] = Answer(**what[1])

    def idle(self, seconds: float = 30.0) -> dict[str, Any]:
        """Wait until no request holds blocks any more."""
        deadline = time.monotonic() + seconds
        while (facts := self.facts())["requests"]:
            assert time.monotonic() < deadline, facts
            time.sleep(0.02)
        return facts

    def until(self, what: Callable[[dict[str, Any]], bool], seconds: float = 30.0) -> None:
        """Wait until its facts are so."""
        deadline = time.monotonic() + seconds
        while not what(facts := self.facts()):
            assert time.monotonic() < deadline, facts

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def engine(
    model: Path,
    *,
    name: str,
    core: str = "0",
    connector: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[Engine]:
    """An engine, ready to be asked; `connector` is its kv_transfer_config."""
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    cores = core if ranks == 1 else "|".join(map(str, range(ranks)))  # one for each rank
    about = (str(model), cores, connector, environment or {}, options)
    with started(serve, about, name) as (pipe, process):
        made = Engine(pipe, process)
        made.started = made.facts()
        yield made


@contextmanager
def started(
    serve: Callable[..., None], about: tuple[Any, ...], name: str
) -> Iterator[tuple[Connection, Any]]:
    """A process that has imported vLLM and is ready, and a pipe to it; it ends when told to stop.

    `serve` is called in it with the pipe's other end and `about`.
    """
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.vllm.preloaded"])
    os.environ |= FOR_ALL  # of the process that imports vLLM
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    process = context.Process(target=serve, args=(there, *about), name=name)
    process.start()
    there.close()
    with until_stopped(here, process):
        yield here, process


@contextmanager
def until_stopped(here: Connection, process: Any) -> Iterator[None]:
    """Wait until the process at the pipe's other end is ready; in the end, stop it."""
    name = process.name
    try:
        deadline = time.monotonic() + START_SECONDS
        while not here.poll(0.2):
            assert process.is_alive(), f"{name} ended with {process.exitcode}"
            assert time.monotonic() < deadline, f"{name} does not start"
        said, *what = here.recv()
        if said != "ready":
            raise EngineStartError(what[0])
        yield
    finally:
        if process.is_alive():
            try:
                here.send(("stop",))
                process.join(20)
            except OSError:
                pass
            process.kill()
        process.join()
        here.close()


class EngineStartError(Exception):
    """Why an engine did not start."""


def serve(
    pipe: Connection, model: str, core: str, connector: Any, environment: Any, options: Any
) -> None:
    """The engine's process."""
    # The server that it was forked from may have been there before `engine` was asked for any.
    os.environ |= FOR_ALL | environment | {"VLLM_CPU_OMP_THREADS_BIND": core}
    if core.isdecimal():
        _bind(int(core))
    try:
        if "TEST_IMPORTS" in environment:
            import_module(environment["TEST_IMPORTS"])
        running = _Running(pipe, _start(model, connector, options))
    except BaseException as problem:
        pipe.send(("failed", f"{type(problem).__name__}: {problem}"))
        raise
    pipe.send(("ready",))
    running.loop()


def _bind(core: int) -> None:
    """Compute on one core, as vLLM has it in engines of several processes, which these are not."""
    with suppress(OSError):  # there is no such core
        os.sched_setaffinity(0, {core})
        os.environ["OMP_PLACES"] = f"{{{core}}}"


def _start(model: str, connector: Any, options: dict[str, Any]) -> Any:
    from vllm import LLMEngine

    config = engine_config(model, connector, options)
    # vLLM removes the handlers of its loggers while it makes the config.
    logger = logging.getLogger("vllm.kvatlas.planner")
    logger.addHandler(_PLANNER)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return LLMEngine.from_vllm_config(config)


class _Running:
    def __init__(self, pipe: Connection, made: Any) -> None:
        self.pipe, self.engine = pipe, made
        _copy_requests(made.engine_core)
        self.scheduler = made.engine_core.engine_core.scheduler
        self.fits = _requests_that_fit(made.vllm_config, self.scheduler.kv_cache_config)
        self.taken: list[tuple[float, int, bool]] = []
        self.preempted: set[str] = set()
        self.drafts: defaultdict[str, list[list[int]]] = defaultdict(list)
        self.warned = _Warned()
        logging.getLogger("kvatlas.vllm").addHandler(self.warned)

    def loop(self) -> None:
        while True:
            busy = self.engine.has_unfinished_requests() or self.scheduler.has_requests()
            while self.pipe.poll(0.0 if busy else 0.005):
                what = self.pipe.recv()
                if what[0] == "stop":
                    self.engine.engine_core.shutdown()
                    return
                getattr(self, what[0])(*what[1:])
                busy = True
            if busy:
                self._step()

    def _step(self) -> None:
        pulling, begun = bool(pulls()), time.perf_counter()
        outputs = self.engine.step()
        self.taken.append((time.perf_counter() - begun, len(outputs), pulling))
        requests = self.scheduler.requests.items()
        self.preempted |= {name for name, request in requests if request.num_preemptions}
        for name, request in requests:
            if request.spec_token_ids:  # vLLM adds a suffix to names
                self.drafts[name.rpartition("-")[0]].append(list(request.spec_token_ids))
        for output in outputs:
            if output.finished:
                self._tell(output)
        if not outputs:
            time.sleep(0.001)

    def _tell(self, output: Any) -> None:
        drafts = self.drafts.pop(output.request_id, [])
        self.pipe.send(("done", output.request_id, answer_of(output) | {"drafts": drafts}))

    def add(self, name: str, prompt: list[int], tokens: int, params: Any, samples: int) -> None:
        how = sampling(tokens, params, samples)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, how)

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])

    def nap(self) -> None:
        core = self.engine.engine_core.engine_core
        core.sleep(level=1)
        assert core.is_sleeping()
        core.wake_up()
        self.pipe.send(("nap", None))

    def forget(self) -> None:
        assert self.engine.reset_prefix_cache(), "a request still holds blocks"

    def facts(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        found = {
            "free": pool.get_num_free_blocks(),
            "requests": len(self.scheduler.requests),
            "moving": bytes_on_their_way(),
            "pulled": bytes_pulled(),
            "warned": self.warned.said,
            "preempted": len(self.preempted),
            "block": self.engine.vllm_config.cache_config.block_size,
            "blocks": pool.num_gpu_blocks,
            "groups": len(self.scheduler.kv_cache_config.kv_cache_groups),
            "fits": self.fits,
            "planner": _PLANNER.said,
            "version": import_module("vllm").__version__,
        }
        self.pipe.send(("facts", found))

    def steps(self) -> None:
        self.pipe.send(("steps", self.taken))
        self.taken = []


def _requests_that_fit(vllm_config: Any, kv_cache_config: Any) -> float:
    """Requests of max_model_len, as vLLM counts them."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    return float(get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config))


def _copy_requests(core: Any) -> None:
    """Copy every request, as messages between vLLM's processes do: none share parameters."""
    add = core.add_request
    core.add_request = lambda request: add(copy.deepcopy(request))


class _Warned(logging.Handler):
    """The last that was logged, such as what the connector has warned of."""

    said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said = record.getMessage()


_PLANNER = _Warned()
"""The last that the planner has logged."""
