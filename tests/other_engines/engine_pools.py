"""Requests that move between an engine's memory and a plan of kvatlas, along a compiled route."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.engines.engine_memory import EngineMemory
from kvatlas.planning import Plan
from kvatlas.routing import route

Bytes = NDArray[np.uint8]


def at(address: int, nbytes: int) -> Bytes:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def move(
    source: EngineMemory | tuple[Plan, list[Bytes]],
    destination: EngineMemory | tuple[Plan, list[Bytes]],
    blocks: tuple[dict[int, list[int]], dict[int, list[int]]],
    tokens: int,
    rank: int = 0,
    layers: Any = None,
) -> tuple[int, int]:
    """Copy a request; the engine's side by addresses. Returns the bytes and the number of runs."""
    way = route(source[0], destination[0], layers=layers)
    bound = way.bind(
        source_rank=rank, destination_rank=0, source_blocks=blocks[0],
        destination_blocks=blocks[1], tokens=tokens,
    )  # fmt: skip
    moved = runs = 0
    for copy in bound.copies:
        starts = (
            addresses(source, copy.source_pool, copy.source).tolist(),
            addresses(destination, copy.destination_pool, copy.destination).tolist(),
        )
        for start, to, nbytes in zip(*starts, copy.length.tolist(), strict=True):
            at(to, nbytes)[:] = at(start, nbytes)
            moved += nbytes
            runs += 1
    return moved, runs


def addresses(end: Any, pool: int, offsets: Any) -> Any:
    if isinstance(end, EngineMemory):
        return end.addresses(pool, offsets)
    return offsets + end[1][pool].ctypes.data
