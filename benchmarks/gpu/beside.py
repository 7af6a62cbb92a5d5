"""Decode attention alone, and while pulls or offloads run on the same GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.attention import decode
from benchmarks.gpu.pull_ends import (
    DEVICE,
    TOKENS,
    Json,
    filled,
    grids_of,
    planned,
    source_process,
)
from benchmarks.gpu.tables import show
from kvatlas.cache import allocate
from kvatlas.routing import scattered
from kvatlas.specs import FullAttention
from kvatlas.tier import Tier
from kvatlas.wire import Node, Session, make_transport
from kvatlas.wire.sample_server import SAMPLE_IDENTITY

_SECONDS = 0.5
_WAYS: list[tuple[str, Json]] = [
    ("the default", {}),
    ("a fifth of the time", {"share": 0.2}),
    ("no limit", {"share": 1.0}),
    ("1 multiprocessor", {"share": 1.0, "multiprocessors": 1}),
    ("4 multiprocessors", {"share": 1.0, "multiprocessors": 4}),
    ("16 multiprocessors", {"share": 1.0, "multiprocessors": 16}),
]
"""How pulls are held back."""


def beside() -> None:
    """Decode alone and beside pulls, by how those are held back; and beside a tier."""
    spec = FullAttention(heads=8, head_dim=128)
    case = decode(spec, "LBNHC", 16, (64, 4096), 4, 2, {})
    rows: list[list[str]] = []
    stream: Any = torch.cuda.Stream
    for own, what in ((stream(), ""), (stream(priority=-5), ", decode first")):
        decoding = Decoding(case, own)
        alone = decoding.rate()
        print(f"Decode of 64 x 4,096 tokens, one layer{what}: {64 * alone:,.0f} tokens/s alone")
        with source_process() as far:
            endpoints = far.serve(planned("LBNHC"), 7)
            for name, given in _WAYS if not what else _WAYS[:3]:
                rows.append(
                    [f"pulls, {name}{what}", *_beside_pulls(decoding, alone, endpoints, given)]
                )
        rows.append([f"a tier that stores and fetches{what}", *_beside_tier(decoding, alone)])
    head = ["beside", "GB/s alone", "GB/s beside", "kept", "tokens/s", "slower"]
    show("\nDecode beside transfers", [*head, "ms of decode that a GiB costs"], rows)


def _beside_pulls(decoding: Decoding, alone: float, endpoints: Any, given: Json) -> list[str]:
    mine = planned("BHLNC", block=32)
    cache = allocate(mine, device=DEVICE)
    transport = make_transport("cuda", **given)
    with (
        Node(mine, memory=cache, transport=transport, buffers=0, identity=SAMPLE_IDENTITY) as node,
        Session(node, endpoints) as session,
    ):
        link, grids = grids_of(node, session, 0)
        nbytes: int = sum(grid.nbytes for grid in grids)

        def pull() -> int:
            link.read(grids).wait(time.monotonic() + 30)
            return nbytes

        return _compared(decoding, alone, pull)


def _beside_tier(decoding: Decoding, alone: float) -> list[str]:
    made = planned("LBNHC")
    cache, keys = filled(made, 0, 7), [f"{number}".encode() for number in range(TOKENS // 16)]
    about: Json = {"blocks": scattered(made, TOKENS), "tokens": TOKENS, "keys": keys}
    with Tier(planned("BLHNC")) as tier:

        def offload() -> int:
            tier.store(cache.pools, made, **about)
            tier.fetch(cache.pools, made, **about)
            tier.drop(about["keys"])
            return 2 << 30

        return _compared(decoding, alone, offload)


def _compared(decoding: Decoding, alone: float, move: Callable[[], int]) -> list[str]:
    for _ in range(3):
        move()
    moving = Moving(move)
    time.sleep(_SECONDS)
    speed = moving.stop()
    moving = Moving(move)
    there = decoding.rate()
    moved = moving.stop()
    slower = 1 - there / alone
    return [
        f"{speed / 1e9:,.0f}", f"{moved / 1e9:,.0f}", f"{moved / speed:.0%}", f"{64 * there:,.0f}",
        f"{slower:.1%}", f"{slower * (1 << 30) / moved * 1e3:.2f}",
    ]  # fmt: skip


_STEPS = 16
"""Decode steps in a graph."""
_AHEAD = 4
"""Graphs that wait to be played: the host is never late, whoever else keeps it busy."""


class Decoding:
    """Decode steps as a graph that is played again and again, one always waiting to begin."""

    def __init__(self, case: Any, stream: Any) -> None:
        for call in case.calls:
            call()
        torch.cuda.synchronize()
        self._graph, self._stream = torch.cuda.CUDAGraph(), stream
        with torch.cuda.graph(self._graph, stream=stream):
            for _ in range(_STEPS // len(case.calls)):
                for call in case.calls:
                    call()
        self.rate(0.05)

    def rate(self, seconds: float = _SECONDS) -> float:
        """Steps per second."""
        played: list[Any] = []
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.cuda.stream(self._stream):
            while time.perf_counter() - begun < seconds:
                self._graph.replay()
                played.append(self._stream.record_event())
                if len(played) > _AHEAD:
                    played[-_AHEAD].synchronize()
            self._stream.synchronize()
        return len(played) * _STEPS / (time.perf_counter() - begun)


class Moving:
    """Moves again and again, in a thread of its own, until it is told to stop."""

    def __init__(self, move: Callable[[], int]) -> None:
        self._move, self._stop = move, threading.Event()
        self._moved, self._begun = 0, time.perf_counter()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._moved += self._move()

    def stop(self) -> float:
        """Bytes per second since it was made."""
        self._stop.set()
        self._thread.join()
        return self._moved / (time.perf_counter() - self._begun)
