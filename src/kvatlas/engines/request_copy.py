"""Copy a request between the host memory of two engines, along a route.

This is the plainest way to move a cache: one call of memmove for each run. Use `kvatlas.wire`
between processes and for the memory of GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvatlas.engines.engine_memory import EngineMemory
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import route


class CopiedRequest(NamedTuple):
    """The number of bytes and of contiguous runs that were copied."""

    nbytes: int
    runs: int


def copy_request(
    source: EngineMemory,
    destination: EngineMemory,
    *,
    source_blocks: Any,
    destination_blocks: Any,
    tokens: Any,
    source_rank: int = 0,
    destination_rank: int = 0,
    layers: Iterable[str] | None = None,
) -> CopiedRequest:
    """Copy the first `tokens` tokens of a request between two ranks' host memory.

    `source_blocks` and `destination_blocks` are as in `Route.bind`. `layers` restricts the copy to
    the named layers. Both memories must stay allocated during the call.

    >>> import numpy as np
    >>> from kvatlas.engines.sglang import page_buffer
    >>> from kvatlas.planning import plan
    >>> pages = page_buffer("Qwen3-8B", "page_first", pages=3, page=16, max_len=64)
    >>> ours = plan("Qwen3-8B", memory="32MiB", max_len=64)
    >>> pool = {0: np.zeros(ours.pools[0].nbytes, np.uint8)}
    >>> copy_request(
    ...     pages.memory, EngineMemory.of_pools(ours, pool), source_blocks=[0, 1, 2],
    ...     destination_blocks=[5, 1, 3], tokens=40,
    ... )
    CopiedRequest(nbytes=5898240, runs=23040)
    """
    for end, memory in (("source", source), ("destination", destination)):
        devices = {one.device for held in memory.allocations for one in held} - {"host"}
        if devices:
            raise AtlasError(
                Code.WRONG_DEVICE,
                f"The {end} is not host memory",
                got=", ".join(sorted(devices)),
                hint="Copy the memory to the host first, or use kvatlas.wire",
            )
    bound = route(source.plan, destination.plan, layers=layers).bind(
        source_rank=source_rank,
        destination_rank=destination_rank,
        source_blocks=source_blocks,
        destination_blocks=destination_blocks,
        tokens=tokens,
    )
    moved = runs = 0
    for copy in bound.copies:
        starts = source.addresses(copy.source_pool, copy.source).tolist()
        places = destination.addresses(copy.destination_pool, copy.destination).tolist()
        lengths = copy.length.tolist()
        for place, start, nbytes in zip(places, starts, lengths, strict=True):
            ctypes.memmove(place, start, nbytes)
        moved, runs = moved + sum(lengths), runs + len(lengths)
    return CopiedRequest(moved, runs)
