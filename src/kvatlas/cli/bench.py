"""`kvatlas bench wire`: throughput of each transport between two processes on this host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from kvatlas.cli.tables import table
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.byte_sizes import size
from kvatlas.models import Layer, Model
from kvatlas.planning import Plan, plan
from kvatlas.routing import Copy
from kvatlas.specs import FullAttention
from kvatlas.wire import Link, Node, Session, Transport, make_transport, memory_of, pools_for
from kvatlas.wire.sample_server import SAMPLE_IDENTITY, SampleTask, random_bytes, run_sample_server

TRANSPORTS = ("nixl", "mooncake", "tcp", "shm")
RUNS = (4 << 10, 64 << 10, 1 << 20)
_POOL = 64 << 20
_MOVED = 16 << 20
_SEED = 7


@dataclass(frozen=True)
class TransportRate:
    """Throughput of one transport and of memcpy, in GB/s.

    The transport and memcpy copied the same runs; each run is `run` contiguous bytes.
    """

    transport: str
    run: int
    gigabytes: float
    memcpy: float
    refused: str = ""
    """The reason why the transport was not measured; empty if it was measured."""


def transport_rates() -> Iterator[TransportRate]:
    """Measure each transport with each run size, and yield one result per measurement.

    For a transport that cannot run on this host, yield one result with the reason in `refused`.
    """
    for name in TRANSPORTS:
        transport = None
        try:
            transport = make_transport(name)
            yield from _rates(name, transport)
        except AtlasError as refusal:
            # A transport that is not installed is skipped. A library that all need is an error.
            if transport is not None and refusal.code is Code.MISSING_EXTRA:
                raise
            yield TransportRate(name, 0, 0.0, 0.0, f"{refusal.code}: {refusal.got}")


def _rates(name: str, transport: Transport) -> Iterator[TransportRate]:
    made = _plan()
    pools = pools_for(made, 0, transport)
    task = SampleTask(plan=made, transport=name, seed=_SEED, requests=(), tokens=16)
    with (
        run_sample_server(task) as endpoints,
        Node(made, memory=memory_of(pools), transport=transport, identity=SAMPLE_IDENTITY) as node,
        Session(node, endpoints) as session,
    ):
        link = session.link(0)
        source = random_bytes(made.pools[0].nbytes, _SEED, 0, 0)
        for run in RUNS:
            copy = _scattered(run, made.pools[0].nbytes)
            taken = _best(partial(_read, link, copy))
            _compare(copy, source, pools[0])
            here = np.empty(_MOVED, dtype=np.uint8)
            plainly = _best(partial(np.copyto, here, source[:_MOVED]))
            yield TransportRate(name, run, copy.nbytes / taken / 1e9, _MOVED / plainly / 1e9)


def _plan() -> Plan:
    spec = FullAttention(heads=8, head_dim=128)
    layers = (Layer(name="layers.0.attn", index=0, spec=spec),)
    model = Model(
        name="bench", architecture="Bench", layers=layers, depth=1, attention_heads=8, max_len=16
    )
    return plan(model, memory=_POOL)


def _scattered(run: int, room: int) -> Copy:
    """Describe a copy of many runs of `run` bytes between two pools of `room` bytes.

    Each run has a random offset in the source pool and another one in the destination pool.
    """
    rng = np.random.default_rng(run)
    many, places = _MOVED // run, room // run
    source, destination = (rng.permutation(places)[:many].astype(np.int64) * run for _ in range(2))
    return Copy(0, 0, source, destination, np.full(many, run))


def _read(link: Link, copy: Copy) -> None:
    link.read([copy]).wait(time.monotonic() + 60)


def _compare(copy: Copy, source: Bytes, here: Bytes) -> None:
    for start, to, length in zip(copy.source, copy.destination, copy.length, strict=True):
        if not np.array_equal(source[start : start + length], here[to : to + length]):
            raise RuntimeError("the received bytes differ from the bytes that were sent")


def _best(act: Callable[[], object]) -> float:
    taken = []
    for _ in range(4):
        begun = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])


def bench_parts(rates: list[TransportRate]) -> list[RenderableType]:
    """Return a table of the rates, and a note for each transport that was not measured."""
    made = table("transport", "run size", "GB/s", "memcpy GB/s", "of memcpy", words=(0,))
    notes = []
    for rate in rates:
        if rate.refused:
            notes.append(Text(f"{rate.transport} was not measured: {rate.refused}", style="dim"))
            continue
        made.add_row(
            rate.transport,
            size(rate.run),
            f"{rate.gigabytes:.2f}",
            f"{rate.memcpy:.2f}",
            f"{rate.gigabytes / rate.memcpy:.0%}",
        )
    legend = f"Reads {size(_MOVED)} in scattered runs from another process on this host."
    return [made, *notes, Text(legend, style="dim")]
