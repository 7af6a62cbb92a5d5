"""A process that serves all ranks of a plan, with pools full of reproducible random bytes.

`python -m kvatlas.wire.sample_server` reads one task from stdin, prints the endpoints of its nodes,
and serves until stdin ends. `kvatlas move`, benchmarks and tests use it as the remote peer.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec
import numpy as np

from kvatlas.copying.memory_copy import memory_of
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing import scattered
from kvatlas.wire.server.node import Node, pools_for
from kvatlas.wire.transports.registry import make_transport

_MARK = b"kvatlas serves "

SAMPLE_IDENTITY = CacheIdentity(weights="kvatlas sample")
"""The cache identity of sample servers, whose random bytes belong to no model."""


class SampleTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan and options of a sample server."""

    plan: Plan
    transport: str
    seed: int
    requests: tuple[str, ...]
    tokens: int
    seconds: float = 300.0
    secret: bytes | None = None
    convert: str | None = None
    """The conversion that both ends request, with all scales 1; None to convert nothing."""


def converting(convert: str | None) -> dict[str, Any]:
    """Return the conversion arguments of a sample server's nodes. All scales are 1.

    >>> converting("fp8->bf16"), converting(None)
    ({'convert': 'fp8->bf16', 'scales': 1.0}, {})
    """
    return {} if convert is None else {"convert": convert, "scales": 1.0}


def random_bytes(nbytes: int, *seed: int) -> Bytes:
    """Return random bytes that depend only on the seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def main() -> None:
    """Read one task from stdin, and serve it until stdin ends."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=SampleTask)
    with ExitStack() as stack:
        endpoints, kept = [], []
        for rank in range(task.plan.ranks):
            transport = make_transport(task.transport)
            pools = pools_for(task.plan, rank, transport)
            for index, pool in pools.items():
                pool[:] = random_bytes(pool.nbytes, task.seed, rank, index)
            kept.append(pools)  # a node does not keep its memory alive
            node = Node(
                task.plan, rank=rank, memory=memory_of(pools), transport=transport,
                name=f"source-{rank}", secret=task.secret, identity=SAMPLE_IDENTITY,
                **converting(task.convert),
            )  # fmt: skip
            stack.enter_context(node)
            blocks = scattered(task.plan, task.tokens)
            for request in task.requests:
                node.offer(request, blocks, task.tokens, timeout=task.seconds)
            endpoints.append(node.endpoint)
        sys.stdout.buffer.write(_MARK + msgspec.json.encode(endpoints) + b"\n")
        sys.stdout.buffer.flush()
        sys.stdin.buffer.read()


@contextmanager
def run_sample_server(task: SampleTask) -> Iterator[list[str]]:
    """Run a sample server, and yield the endpoints of its nodes by rank.

    Its stderr is captured for the error message if it fails to start.
    """
    command = [sys.executable, "-m", "kvatlas.wire.sample_server"]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(  # noqa: S603  # this very program
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        assert process.stdin is not None  # noqa: S101
        assert process.stdout is not None  # noqa: S101
        try:
            with suppress(BrokenPipeError):  # it has already exited; its output is read below
                process.stdin.write(msgspec.json.encode(task) + b"\n")
                process.stdin.flush()
            # Transports' libraries print to stdout too, so the line with the endpoints is marked.
            line = next((line for line in process.stdout if line.startswith(_MARK)), b"")
            if not line:
                status = process.wait(10)
                errors.seek(0)
                last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise AtlasError(
                    Code.WIRE_FAILED,
                    "The sample server process did not start",
                    got=f"exit code {status}, last line of stderr {last[:300]!r}",
                    hint="Run python -m kvatlas.wire.sample_server to see its output",
                )
            yield msgspec.json.decode(line[len(_MARK) :], type=list[str])
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    main()
