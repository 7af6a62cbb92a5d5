"""A process that puts all ranks of a plan on the wire, with bytes that anybody can recompute.

`python -m kvatlas.wire.sample_server` reads one task from stdin, says where its nodes listen, and
serves until stdin ends. It is the far end of `kvatlas move`, of benchmarks and of tests.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import scattered
from kvatlas.wire.rpc import zmq
from kvatlas.wire.server.node import Node, pools_for
from kvatlas.wire.staging import Bytes
from kvatlas.wire.transports.base import Memory
from kvatlas.wire.transports.registry import make

_MARK = b"kvatlas serves "
_NOT_STARTED = "the helper process did not start"


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the process is to serve."""

    plan: Plan
    transport: str
    seed: int
    requests: tuple[str, ...]
    tokens: int
    seconds: float = 300.0
    secret: bytes | None = None


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What it says once it is ready: where its nodes listen, rank by rank."""

    endpoints: tuple[str, ...]


def noise(nbytes: int, *seed: int) -> Bytes:
    """Bytes that look like nothing and can be made again."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def memory_of(pools: dict[int, Bytes]) -> dict[int, Memory]:
    """Where pools are in this process."""
    return {index: Memory(pool.ctypes.data, pool.nbytes) for index, pool in pools.items()}


def main() -> None:
    """Serve one task."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    with ExitStack() as stack:
        endpoints, kept = [], []
        for rank in range(task.plan.tp * task.plan.pp):
            transport = make(task.transport)
            pools = pools_for(task.plan, rank, transport)
            for index, pool in pools.items():
                pool[:] = noise(pool.nbytes, task.seed, rank, index)
            kept.append(pools)  # a node knows where its memory is, and does not own it
            node = Node(
                task.plan, rank=rank, memory=memory_of(pools), transport=transport,
                name=f"source-{rank}", secret=task.secret,
            )  # fmt: skip
            stack.enter_context(node)
            blocks = scattered(task.plan, task.tokens)
            for request in task.requests:
                node.offer(request, blocks, task.tokens, seconds=task.seconds)
            endpoints.append(node.endpoint)
        said = msgspec.json.encode(Said(endpoints=tuple(endpoints)))
        sys.stdout.buffer.write(_MARK + said + b"\n")
        sys.stdout.buffer.flush()
        sys.stdin.buffer.read()


@dataclass(frozen=True)
class Served:
    """A process that serves a task."""

    process: subprocess.Popen[bytes]
    endpoints: tuple[str, ...]


@contextmanager
def served(task: Task) -> Iterator[Served]:
    """The process, from when it is ready until it is no longer needed.

    What it says on stderr is kept for the error, should it fail to start.
    """
    try:
        zmq()
    except AtlasError as missing:
        problem, hint = f"{_NOT_STARTED}: pyzmq is missing", "Try: pip install 'kvatlas[wire]'"
        raise AtlasError(missing.code, problem, got=missing.got, hint=hint) from None
    command = [sys.executable, "-m", "kvatlas.wire.sample_server"]
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed below, with the process
    process = subprocess.Popen(  # noqa: S603  # this very program
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
    )
    assert process.stdin is not None  # noqa: S101
    assert process.stdout is not None  # noqa: S101
    try:
        with suppress(BrokenPipeError):  # it has ended already; why is read below
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            process.stdin.flush()
        # Transports print to stdout too: what is said to us is marked.
        line = next((said for said in process.stdout if said.startswith(_MARK)), b"")
        if not line:
            status = process.wait(10)
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise AtlasError(
                Code.WIRE_FAILED,
                _NOT_STARTED,
                got=f"exit code {status}, {last[:300] or 'without a word'}",
                hint="Run python -m kvatlas.wire.sample_server to see more",
            )
        yield Served(process, msgspec.json.decode(line[len(_MARK) :], type=Said).endpoints)
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        errors.close()


if __name__ == "__main__":
    main()
