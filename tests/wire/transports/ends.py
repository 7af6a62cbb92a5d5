"""Both ends of a conformance test, and the oracle that says what a copy does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.routing import Copy
from tests.wire.forking import forked, until_stopped
from tests.wire.transports.peer import SIZES, End, main


@dataclass(frozen=True)
class Kind:
    """A transport under test, and what may be expected of it."""

    label: str
    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    remote: bool = True
    """Its peers are other processes, which can be killed."""
    needs_peer: bool = False
    """The peer's processor takes part, so that one that stands still stops everything."""
    """Nobody can write to another's memory."""


# NIXL's wheel brings its own libibverbs. Where the system has one too, UCX loads both, and
# the process then crashes as it exits. Nothing here needs InfiniBand.
_NO_IB = {"UCX_MODULES": "^ib"}

KINDS = [
    Kind("memory", "memory", remote=False),
    Kind("shm", "shm"),
    Kind("nixl", "nixl", _NO_IB),
    Kind("mooncake", "mooncake", needs_peer=True),
    Kind("tcp", "tcp", needs_peer=True),
]
OVER_TCP = Kind(
    "nixl-tcp", "nixl", {**_NO_IB, "UCX_TLS": "tcp"}, {"over_tcp": True}, needs_peer=True
)
"""NIXL where the peer's processor has to serve."""


class Peer:
    """The other end, in a process of its own."""

    def __init__(
        self, kind: Kind, options: dict[str, Any], sizes: dict[int, int] | None = None
    ) -> None:
        self.kind, self.options = kind, {**kind.options, **options}
        here = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
        self.process, self._pipe = forked(
            main, kind.name, self.options, sizes or SIZES, here | dict(kind.settings)
        )
        self.metadata, self.regions = self.hear()

    def hear(self, seconds: float = 30) -> Any:
        assert self._pipe.poll(seconds), "the peer says nothing"
        return self._pipe.recv()

    def ask(self, *words: Any) -> Any:
        self._pipe.send(words)
        return self.hear()

    def fill(self, seed: int) -> NDArray[np.uint8]:
        self.ask("fill", seed)
        return self.held()

    def held(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.ask("bytes"), np.uint8).copy()

    def close(self) -> int:
        return int(self.ask("close"))

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)
        if number is signal.SIGKILL:
            self.process.join()
        elif number is signal.SIGSTOP:
            until_stopped(self.process.pid)

    def end(self) -> None:
        """Let it close and exit; end it where it does not."""
        with suppress(OSError):
            self._pipe.send(["exit"])
        self.process.join(5)
        self.process.kill()
        self.process.join()
        self._pipe.close()


class Here:
    """The other end in this process, for the transport that has no other."""

    def __init__(self, kind: Kind, options: dict[str, Any]) -> None:
        self._end = End(kind.name, options, SIZES)
        self.metadata, self.regions = self._end.transport.publish(), self._end.regions

    def fill(self, seed: int) -> NDArray[np.uint8]:
        self._end.fill(seed)
        return self.held()

    def held(self) -> NDArray[np.uint8]:
        return self._end.bytes.copy()

    def close(self) -> int:
        return self._end.close()

    def end(self) -> None:
        self._end.close()


def soon(seconds: float = 20) -> float:
    return time.monotonic() + seconds


def eventually(ask: Callable[[], Any], seconds: float = 10) -> Any:
    """The first answer that is not empty, or the last one."""
    deadline = soon(seconds)
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return answer


def scattered(
    rng: np.random.Generator, sizes: Mapping[int, int], most: int, *, lengths: str
) -> list[Copy]:
    """Random runs between random regions; no byte is written twice."""
    copies = []
    for target in sizes:
        source = int(rng.choice(list(sizes)))
        src: list[int] = []
        dst: list[int] = []
        length: list[int] = []
        place = int(rng.integers(0, 40))
        while len(src) < most:
            size = {"alike": 96, "mixed": int(rng.integers(1, 300)), "long": 4500}[lengths]
            size += int(rng.integers(0, 5000)) if lengths == "long" else 0
            if place + size > sizes[target] or size > sizes[source]:
                break
            src.append(int(rng.integers(0, sizes[source] - size + 1)))
            dst.append(place)
            length.append(size)
            place += size + int(rng.choice([0, 1, 32, 200]))
        if src:
            order = rng.permutation(len(src))
            rows = [np.array(column, dtype=np.int64)[order] for column in (src, dst, length)]
            copies.append(Copy(source, target, *rows))
    return copies


def expected(
    src: NDArray[np.uint8], dst: NDArray[np.uint8], copies: Sequence[Copy], offsets: dict[int, int]
) -> NDArray[np.uint8]:
    """What the destination's whole buffer holds after some copies, byte by byte."""
    want = bytearray(dst.tobytes())
    have = src.tobytes()
    for copy in copies:
        rows = zip(
            copy.source.tolist(), copy.destination.tolist(), copy.length.tolist(), strict=True
        )
        for start, to, size in rows:
            start += offsets[copy.source_pool]
            to += offsets[copy.destination_pool]
            want[to : to + size] = have[start : start + size]
    return np.frombuffer(bytes(want), np.uint8)
