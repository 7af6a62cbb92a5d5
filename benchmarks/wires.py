"""How fast transports move scattered runs between two processes, beside the raw calls below them.

`python -m benchmarks.wires`: the same runs, the same memory and the same peer for both, in turns.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.timing import median_ms, show
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire import Link, Memory, Transport, make_transport
from kvatlas.wire.transports.mooncake import make_engine
from kvatlas.wire.transports.nixl_strided import describe
from kvatlas.wire.transports.shared_memory import create_segment

POOL = 128 << 20
RUNS = (64, 4 << 10, 64 << 10, 1 << 20)
MOVED = {64: 4 << 20, 4 << 10: 64 << 20, 64 << 10: 64 << 20, 1 << 20: 64 << 20}
"""Bytes by length of run; Mooncake is slower by so much that it moves less."""
MOVED_BY_MOONCAKE = {64: 64 << 10, 4 << 10: 4 << 20, 64 << 10: 32 << 20, 1 << 20: 64 << 20}
TURNS = 11
NAMES = ("memory", "shm", "nixl", "mooncake")
Act = Callable[[], Any]


def _memory(name: str) -> tuple[Any, int]:
    """A pool that is written once, so that every page of it exists, and its address."""
    pool: Any = create_segment(POOL) if name == "shm" else np.empty(POOL, np.uint8)
    seen = np.frombuffer(pool, np.uint8)
    seen[:] = 1
    return pool, seen.ctypes.data


def serve(name: str) -> None:
    """The peer's process: registers a pool, says where, and waits."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    transport = make_transport(name)
    _pool, address = _memory(name)
    transport.register({0: Memory(address, POOL)})
    said = [base64.b64encode(transport.publish()).decode(), transport.memory[0].address]
    out.write(json.dumps(said) + "\n")
    out.flush()
    sys.stdin.readline()
    transport.close()


@contextmanager
def peer(name: str) -> Iterator[tuple[bytes, int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.wires", "--serve", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    if process.stdout is None:
        raise SystemExit("no pipe to the peer")
    try:
        metadata, address = json.loads(process.stdout.readline())
        yield base64.b64decode(metadata), address
    finally:
        process.communicate(b"\n", timeout=30)


def scattered(size: int, moved: int) -> Copy:
    rng = np.random.default_rng(size)
    count = moved // size
    src, dst = (rng.permutation(POOL // size)[:count] * size for _ in range(2))
    return Copy(0, 0, src, dst, np.broadcast_to(np.int64(size), count))


def in_turns(acts: list[Act]) -> list[float]:
    """Least seconds of each, taken in turns so that the machine's moods hit all alike."""
    taken: list[list[float]] = [[] for _ in acts]
    for turn in range(TURNS + 1):
        for act, times in zip(acts, taken, strict=True):
            start = time.perf_counter()
            act()
            if turn:
                times.append(time.perf_counter() - start)
    return [min(times) for times in taken]


def through(link: Link, copy: Copy) -> Act:
    def act() -> None:
        handle = link.read([copy])
        handle.wait(time.monotonic() + 60)
        handle.release()

    return act


def memcpy(src: int, dst: int, copy: Copy) -> Act:
    """One call for each run, its arguments at hand."""
    size = int(copy.length[0])
    ends = list(zip((copy.destination + dst).tolist(), (copy.source + src).tolist(), strict=True))

    def act() -> None:
        move = ctypes.memmove
        for to, start in ends:
            move(to, start, size)

    return act


def nixl_rows(starts: Any, base: int, size: Any) -> Any:
    rows = np.zeros((len(starts), 3), np.uint64)
    rows[:, 0] = starts + base
    rows[:, 1] = size
    return rows


def raw_nixl(agent: Any, remote: str, src: int, dst: int, copy: Copy) -> Act:
    near, far = (
        nixl_rows(copy.destination, dst, copy.length),
        nixl_rows(copy.source, src, copy.length),
    )
    every = np.arange(len(copy), dtype=np.int32)

    def act() -> None:
        local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", near, "DRAM")
        there = agent.prep_xfer_dlist(remote, far, "DRAM")
        posted = agent.make_prepped_xfer("READ", local, every, there, every, b"")
        state = agent.transfer(posted)
        while state != "DONE":
            state = agent.check_xfer_state(posted)
        for handle in (posted, local, there):
            handle.release()

    return act


def raw_mooncake(engine: Any, session: str, src: int, dst: int, copy: Copy) -> Act:
    near, far, length = (copy.destination + dst), (copy.source + src), copy.length
    parts = [
        [column[first : first + 1_000].tolist() for column in (near, far, length)]
        for first in range(0, len(copy), 1_000)
    ]

    def act() -> None:
        for part in parts:
            if engine.batch_transfer_sync_read(session, *part) != 0:
                raise SystemExit("Mooncake failed")

    return act


def raw(name: str, end: Transport, link: Any) -> Any:
    """Makes the raw counterpart of a copy."""
    near = end.memory[0].address
    far = link.peer_memory[0].address
    if name == "nixl":
        return lambda copy: raw_nixl(link.agent, link.peer, far, near, copy)
    if name == "mooncake":
        engine, session = make_engine(link.owner.host), link.peer.session
        return lambda copy: raw_mooncake(engine, session, far, near, copy)
    if name == "shm":
        return lambda copy: memcpy(link.mapped[0].ctypes.data, near, copy)
    return lambda copy: memcpy(far, near, copy)


def measure(name: str) -> list[list[str]]:
    try:
        end = make_transport(name)
    except AtlasError as refusal:
        if refusal.code is not Code.MISSING_EXTRA:
            raise
        return [[f"{name} (not installed here)", *["-"] * 4]]
    _pool, address = _memory(name)
    end.register({0: Memory(address, POOL)})
    if name == "memory":
        other = make_transport("memory")
        _, theirs = held = _memory(name)
        other.register({0: Memory(theirs, POOL)})
        rows = _rows(name, end, other.publish(), theirs)
        del held
    else:
        with peer(name) as (metadata, theirs):
            rows = _rows(name, end, metadata, theirs)
    end.close()
    return rows


def _rows(name: str, end: Transport, metadata: bytes, far: int) -> list[list[str]]:
    link = end.connect(metadata, {0: Memory(far, POOL)})
    beside = raw(name, end, link)
    rows = []
    for size in RUNS:
        moved = (MOVED_BY_MOONCAKE if name == "mooncake" else MOVED)[size]
        copy = scattered(size, moved)
        ours, theirs = in_turns([through(link, copy), beside(copy)])
        speeds = [moved / seconds / 1e9 for seconds in (ours, theirs)]
        ratio = speeds[0] / speeds[1]
        run = f"{size >> 10} KiB" if size >> 10 else f"{size} B"
        rows.append([name, run, *(f"{s:.2f}" for s in speeds), f"{ratio:.2f}"])
    if name == "nixl":
        preparing(link)
    link.close()
    return rows


def preparing(link: Any) -> None:
    """A million descriptors, from runs to what NIXL transfers by."""
    count, size = 1 << 20, POOL >> 20
    shuffled = scattered(size, POOL)
    row = np.arange(count) * size
    in_order = Copy(0, 0, row, row, shuffled.length)
    half = np.where(np.arange(count) % 2, size, size - 32)
    lines = []
    for what, runs in (
        ("in order", in_order),
        ("shuffled", shuffled),
        ("shuffled, of two lengths", Copy(0, 0, shuffled.source, shuffled.destination, half)),
    ):
        limit, taken = (1e3 * seconds for seconds in in_turns(list(_preparations(link, runs))))
        lines.append([what, f"{taken:.1f}", f"{limit:.1f}", f"{taken / limit:.2f}"])
    columns = ["runs", "ms", "NIXL alone", "of it"]
    show(f"{count:,} descriptors prepared at both ends", columns, lines)
    print("NIXL alone: from arrays that are at hand. The bar: at most 2.00.\n")


def _preparations(link: Any, runs: Copy) -> Iterator[Act]:
    agent = link.agent
    near = nixl_rows(runs.destination, link.own_memory[0].address, runs.length)
    far = nixl_rows(runs.source, link.peer_memory[0].address, runs.length)

    def prepare(mine: Any, theirs: Any) -> None:
        agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine, "DRAM").release()
        agent.prep_xfer_dlist(link.peer, theirs, "DRAM").release()

    def described() -> None:
        prepare(
            describe([runs], link.own_memory, source=False)[0],
            describe([runs], link.peer_memory, source=True)[0],
        )

    yield lambda: prepare(near, far)
    yield described


def main() -> None:
    rows = [row for name in NAMES for row in measure(name)]
    columns = ["transport", "run", "GB/s", "raw GB/s", "of raw"]
    show("Scattered runs between two processes, beside the raw calls", columns, rows)
    whole = [np.ones(POOL, np.uint8) for _ in range(2)]
    ends = [one.ctypes.data for one in whole]
    speed = POOL / median_ms(lambda: ctypes.memmove(ends[0], ends[1], POOL), 7) / 1e6
    print("Raw: for memory and shm one memcpy for each run.")
    print(f"One memcpy of {POOL >> 20} MiB in this run: {speed:.1f} GB/s.")
    print("The bar: at least 0.90 of raw for 64 KiB and more.\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
