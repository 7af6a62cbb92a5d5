"""`kvatlas move`: move a request between two processes and verify every byte."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import typer
from rich.console import Console, RenderableType
from rich.text import Text

from kvatlas.cli.failures import plain
from kvatlas.cli.options import PlanOptions
from kvatlas.cli.tables import both_ends, indented, table
from kvatlas.copying import copy_request
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.byte_sizes import size
from kvatlas.planning import Plan
from kvatlas.routing import Route, scattered
from kvatlas.wire import (
    TRANSPORT_NAMES,
    How,
    Node,
    Session,
    make_transport,
    memory_of,
    pools_for,
)
from kvatlas.wire.sample_server import (
    SAMPLE_IDENTITY,
    SampleTask,
    converting,
    random_bytes,
    run_sample_server,
)

TRANSPORTS = tuple(name for name in TRANSPORT_NAMES if name not in ("cuda", "memory"))
"""Transports that copy between the host memory of two processes."""
_SEED = 20260
_LEAST, _MOST = 1 << 26, 1 << 33
_REQUEST = "moved"


@dataclass(frozen=True)
class MovedRank:
    """Measurements of the transfer to one destination rank."""

    rank: int
    sources: tuple[int, ...]
    nbytes: int
    descriptors: int
    seconds: float
    wrong: int
    """Number of wrong bytes, including changed bytes outside the request's blocks."""
    way: str

    def as_dict(self) -> dict[str, Any]:
        """Return the measurements as a JSON object."""
        facts = dict(vars(self))
        return facts | {"staged": facts.pop("way") == "staged"}


def small_plan(options: PlanOptions, tokens: int) -> Plan:
    """Return a plan with just enough memory for one request of `tokens` tokens.

    The memory is a power of two, and leaves room to scatter the request's blocks.
    """
    memory = _LEAST
    while True:
        try:
            made = options.plan(memory=memory, max_len=tokens)
            scattered(made, tokens)
        except AtlasError as refusal:
            small = refusal.code in (Code.NOT_ENOUGH_MEMORY, Code.MISSING_BLOCKS)
            if not small or memory >= _MOST:
                raise
            memory *= 2
        else:
            return made


def choose_transport(name: str | None) -> str:
    """Validate a transport's name; if `name` is None, return the first that works on this host."""
    if name is not None and name not in TRANSPORTS:
        raise typer.BadParameter(
            f"{plain(name)!r} is not one of {', '.join(TRANSPORTS)}.", param_hint="'--transport'"
        )
    return name or next(filter(_runs_here, TRANSPORTS), "shm")


def _runs_here(name: str) -> bool:
    try:
        make_transport(name).close()
    except AtlasError:
        return False
    return True


def move_request(
    source: Plan,
    destination: Plan,
    tokens: int,
    transport: str,
    how: How,
    convert: str | None = None,
) -> Iterator[MovedRank]:
    """Move one request from a second process to each destination rank.

    Yield the measurements of each destination rank.
    """
    task = SampleTask(
        plan=source, transport=transport, seed=_SEED, requests=(_REQUEST,), tokens=tokens,
        convert=convert,
    )  # fmt: skip
    scales = None if convert is None else 1.0
    way = Route(
        source, destination, convert=convert, source_scales=scales, destination_scales=scales
    )
    with run_sample_server(task) as endpoints:
        for rank in range(destination.ranks):
            near = make_transport(transport)
            pools = pools_for(destination, rank, near)
            for index, pool in pools.items():
                pool[:] = random_bytes(pool.nbytes, _SEED + 1, rank, index)
            node = Node(
                destination, rank=rank, memory=memory_of(pools), transport=near,
                name=f"destination-{rank}", identity=SAMPLE_IDENTITY, **converting(convert),
            )  # fmt: skip
            with node, Session(node, endpoints) as session:
                blocks = scattered(destination, tokens)
                transfer = session.pull(
                    _REQUEST, destination_blocks=blocks, tokens=tokens, how=how, timeout=120
                )
                transfer.wait()
                yield MovedRank(
                    rank,
                    way.sources(rank),
                    transfer.moved,
                    node.metrics.values["descriptors"],
                    transfer.seconds,
                    _wrong(way, rank, pools, tokens),
                    _way(node),
                )


def _way(node: Node) -> str:
    """Return how a node moved the bytes of its only transfer: staged, coalesced or direct."""
    ways = ("staged", "coalesced")
    return next((way for way in ways if node.metrics.seconds[way] > 0), "direct")


def _wrong(way: Route, rank: int, pools: dict[int, Bytes], tokens: int) -> int:
    """Return the number of wrong bytes in a destination rank's pools after a transfer.

    The expected bytes are computed by copying the same request within this process.
    """
    expected = {i: random_bytes(p.nbytes, _SEED + 1, rank, i) for i, p in pools.items()}
    tables = scattered(way.source, tokens), scattered(way.destination, tokens)
    about = {"source_blocks": tables[0], "destination_blocks": tables[1], "tokens": tokens}
    sent = {
        source: {
            index: random_bytes(pool.nbytes, _SEED, source, index)
            for index, pool in way.source.rank_pools(source).items()
        }
        for source in way.sources(rank)
    }
    if way.conversion is not None:
        copy_request(way, sent, {rank: expected}, **about)
    else:
        _copy_ranges(way, rank, sent, expected, about)
    return sum(int(np.count_nonzero(expected[i] != pools[i])) for i in pools)


def _copy_ranges(
    way: Route,
    rank: int,
    sent: dict[int, dict[int, Bytes]],
    expected: dict[int, Bytes],
    about: dict[str, Any],
) -> None:
    """Copy a request within this process, from the pools `sent` to the pools `expected`.

    Afterwards, `expected` contains the bytes that a transport must deliver. `about` contains the
    request's block tables and its number of tokens.
    """
    for source, pools in sent.items():
        for copy in way.bind(source_rank=source, destination_rank=rank, **about).copies:
            here, there = pools[copy.source_pool], expected[copy.destination_pool]
            for start, to, length in zip(copy.source, copy.destination, copy.length, strict=True):
                there[to : to + length] = here[start : start + length]


@contextmanager
def quiet(doing: str) -> Iterator[None]:
    """Show the status `doing` if stderr is a terminal, and silence the logs of transports."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    logging.disable(logging.INFO)
    try:
        with Console(stderr=True).status(doing):
            yield
    finally:
        logging.disable(logging.NOTSET)


def move_parts(
    source: Plan, destination: Plan, transport: str, moved: list[MovedRank]
) -> list[RenderableType]:
    """Return a table with each rank's transfer, and a sentence on whether all bytes are correct."""
    columns = ("to rank", "from ranks", "bytes", "descriptors", "ms", "GB/s", "way", "wrong bytes")
    made = table(*columns, words=(1, 6))
    for one in moved:
        made.add_row(
            str(one.rank),
            ", ".join(map(str, one.sources)),
            size(one.nbytes),
            f"{one.descriptors:,}",
            f"{one.seconds * 1e3:.1f}",
            f"{one.nbytes / max(one.seconds, 1e-9) / 1e9:.2f}",
            one.way,
            str(one.wrong),
        )
    wrong = sum(one.wrong for one in moved)
    word = Text(
        f"All bytes arrived correctly over {transport}; no other byte changed.", style="green"
    )
    if wrong:
        word = Text(f"{wrong:,} bytes have a wrong value.", style="bold red")
    return [both_ends(source, destination), indented(made), word]
