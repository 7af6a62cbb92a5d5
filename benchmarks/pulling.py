"""Many pulls at once, and the smallest there is: what a session costs beside its bytes."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.timing import show
from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.planning import Plan, plan
from kvatlas.routing import scattered
from kvatlas.wire import Node, Session, Transfer, make_transport, memory_of, pools_for
from kvatlas.wire.sample_server import SAMPLE_IDENTITY, SampleTask, run_sample_server

MODEL = "Qwen3-8B"
TRANSPORTS = ("shm", "tcp", "nixl", "mooncake")
REQUESTS, HELD, PULLED = 96, 32, 31
"""Requests, tokens of each that the source holds, and those that are pulled.

More requests than are ever in flight, so that so many are. One token less, so
that the source does not let go of what has been read.
"""
TOKENS = REQUESTS * HELD
IN_FLIGHT = (4, 64)
TURNS = 6
SMALL_PULLS = 200


def planned(layout: str) -> Plan:
    return plan(MODEL, memory="480MiB", layout=layout, max_len=TOKENS)


@contextmanager
def connected(transport: str) -> Iterator[tuple[Session, dict[int, list[int]]]]:
    """A session with a source in another process, and blocks for all requests at this end."""
    names = tuple(map(str, range(REQUESTS)))
    src, dst = planned("LBNHC"), planned("BHLNC")
    near = make_transport(transport)
    pools = pools_for(dst, 0, near)
    task = SampleTask(plan=src, transport=transport, seed=1, requests=names, tokens=TOKENS)
    with (
        run_sample_server(task) as endpoints,
        Node(dst, memory=memory_of(pools), transport=near, identity=SAMPLE_IDENTITY) as node,
        Session(node, endpoints) as session,
    ):
        yield session, scattered(dst, TOKENS)


def pull_all(session: Session, blocks: Any, in_flight: int) -> float:
    """MB/s of all requests, each its own tokens, with so many under way at a time."""
    running: deque[Transfer] = deque()
    moved = 0

    def finish() -> int:
        return running.popleft().wait().moved

    begun = time.perf_counter()
    for number in range(REQUESTS):
        if len(running) == in_flight:
            moved += finish()
        tokens = number * HELD, number * HELD + PULLED
        pulled = session.pull(str(number), destination_blocks=blocks, tokens=tokens, timeout=60)
        running.append(pulled)
    while running:
        moved += finish()
    return moved / (time.perf_counter() - begun) / 1e6


def measure(transport: str) -> list[str]:
    with connected(transport) as (session, blocks):
        pull_all(session, blocks, max(IN_FLIGHT))  # starts the session's threads
        turns = []
        for turn in range(TURNS):
            # By turns, and first one of them, then the other, so that a busy moment meets both.
            order = IN_FLIGHT if turn % 2 else IN_FLIGHT[::-1]
            speeds = {n: pull_all(session, blocks, n) for n in order}
            turns.append([speeds[n] for n in IN_FLIGHT])
    few, many = (statistics.median(column) for column in zip(*turns, strict=True))
    low, ratio, high = statistics.quantiles([more / less for less, more in turns])
    shown = f"{ratio:.2f} ({low:.2f} - {high:.2f})"
    return [transport, f"{few:.0f}", f"{many:.0f}", shown, _met(high >= 1)]


def in_flight() -> None:
    rows = []
    for transport in TRANSPORTS:
        try:
            rows.append(measure(transport))
        except AtlasError as refusal:
            if refusal.code is not Code.MISSING_EXTRA:
                raise
            rows.append([f"{transport} (not installed here)", "-", "-", "-", "-"])
    show(
        f"{REQUESTS} requests of {PULLED} tokens of {MODEL}, LBNHC -> BHLNC, two processes, MB/s",
        ["transport", *(f"{n} in flight" for n in IN_FLIGHT), "ratio (quartiles)", "bar"],
        rows,
    )
    print(
        f"Medians of {TURNS} turns. The bar: a ratio of at least 1.00, within the noise: met where "
        "a quarter of the turns reach it.\n"
    )


def small() -> None:
    """One token at a time on a session that is warm: control messages alone, and all of it."""
    asking, whole = [], []
    with connected("shm") as (session, blocks):
        seconds = session.node.metrics.seconds

        def asked() -> float:
            return seconds["open"] + seconds["confirm"]

        for _ in range(SMALL_PULLS):
            before, begun = asked(), time.perf_counter()
            session.pull("0", destination_blocks=blocks, tokens=1).wait()
            whole.append(1e3 * (time.perf_counter() - begun))
            asking.append(1e3 * (asked() - before))
    rows = [
        ["open and close", *_middle_and_best(asking)],
        ["the whole pull", *_middle_and_best(whole)],
    ]
    show(f"One token of {MODEL} over shm, a warm session", ["ms", "median", "best tenth"], rows)
    bar = _met(float(rows[0][1]) <= 1)
    print(f"The bar: open and close in at most 1 ms, by the median: {bar}.\n")


def _met(reached: bool) -> str:
    return "met" if reached else "missed"


def _middle_and_best(taken: list[float]) -> list[str]:
    warm = taken[len(taken) // 10 :]
    return [f"{statistics.median(warm):.2f}", f"{statistics.quantiles(warm, n=10)[0]:.2f}"]


def main() -> None:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    in_flight()
    small()


if __name__ == "__main__":
    main()
