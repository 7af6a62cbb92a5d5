"""Copies within one process: what a route says, carried out on byte arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvatlas.routing import Route
from kvatlas.wire.staging import Bytes, cut, gather, scatter, stream_bytes

Ranks = Mapping[int, Mapping[int, Bytes]]
"""Byte arrays by rank, and by pool within it."""

_PIECE = 1 << 20


def carry(
    way: Route, src: Ranks, dst: Ranks, *, src_blocks: Any, dst_blocks: Any, tokens: Any
) -> int:
    """A request from all source ranks to all destination ranks that are here; how many bytes.

    >>> from kvatlas.planning import plan
    >>> from kvatlas.routing import route
    >>> made = plan("Qwen3-8B", memory="64MiB", max_len=64)
    >>> pools = [{0: {0: np.full(made.pools[0].nbytes, n, np.uint8)}} for n in (1, 2)]
    >>> carry(route(made, made), *pools, src_blocks=[3], dst_blocks=[0], tokens=16)
    2359296
    >>> int((pools[1][0][0] == 1).sum())
    2359296
    """
    room = np.empty(_PIECE, dtype=np.uint8)
    moved = 0
    for dst_rank, pools in dst.items():
        for src_rank in way.sources(dst_rank):
            copies = way.bind(
                src_rank=src_rank,
                dst_rank=dst_rank,
                src_blocks=src_blocks,
                dst_blocks=dst_blocks,
                tokens=tokens,
            ).copies
            total = stream_bytes(copies)
            for start in range(0, total, _PIECE):
                part = cut(copies, start, min(total, start + _PIECE))
                many = gather(part, src[src_rank], room)
                moved += scatter(part, room[:many], pools)
    return moved
