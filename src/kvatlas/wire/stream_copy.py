"""Streams into and out of pools, converted on the way where the route converts.

A piece travels in one format. The source fills it from its pools and the destination puts it
into its own; where the route converts, the end that has the other format does so in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvatlas.routing import ConvertedPart, ConvertedStream, Route, Stream
from kvatlas.wire.memory_copy import Bytes, copy_pools
from kvatlas.wire.staging import gather, scatter

AnyStream = Stream | ConvertedStream
"""A request's bytes as they are, or formats changed on the way."""


def piece_spans(stream: AnyStream, piece: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a stream start and stop."""
    if isinstance(stream, ConvertedStream):
        return stream.spans(piece)
    total = stream.nbytes
    return ((start, min(total, start + piece)) for start in range(0, total, piece))


def fill_piece(
    stream: AnyStream, start: int, stop: int, pools: Mapping[int, Bytes], piece: Bytes
) -> None:
    """Bytes start .. stop - 1 of a stream, out of the source's pools."""
    if isinstance(stream, Stream):
        gather(stream.copies(start, stop), pools, piece)
        return
    done = 0
    for part in stream.parts(start, stop):
        into = piece[done : done + part.travelling]
        if part.converted_at(0):
            cells = np.empty(part.nbytes(0), dtype=np.uint8)
            gather([part.copy(0)], pools, cells)
            into[:] = _converted(part, cells)
        else:
            gather([part.copy(0)], pools, into)
        done += part.travelling


def deliver_piece(
    stream: AnyStream, start: int, stop: int, piece: Bytes, pools: Mapping[int, Bytes]
) -> int:
    """Put bytes start .. stop - 1 of a stream into the destination's pools; how many there."""
    if isinstance(stream, Stream):
        return scatter(stream.copies(start, stop), piece, pools)
    done = arrived = 0
    for part in stream.parts(start, stop):
        cells = piece[done : done + part.travelling]
        done += part.travelling
        if part.converted_at(1):
            cells = _converted(part, cells)
        arrived += scatter([part.copy(1)], cells, pools)
    return arrived


def copy_request(
    route: Route,
    src: Mapping[int, Mapping[int, Bytes]],
    dst: Mapping[int, Mapping[int, Bytes]],
    *,
    src_blocks: Any,
    dst_blocks: Any,
    tokens: Any,
) -> int:
    """Copy a request between ranks that are all in this process; how many bytes.

    `src` and `dst` are byte arrays by rank, and by pool within it; a route that converts does so.

    >>> import numpy as np
    >>> from kvatlas.planning import plan
    >>> from kvatlas.routing import route
    >>> made = plan("Qwen3-8B", memory="64MiB", max_len=64)
    >>> pools = [{0: {0: np.full(made.pools[0].nbytes, n, np.uint8)}} for n in (1, 2)]
    >>> copy_request(route(made, made), *pools, src_blocks=[3], dst_blocks=[0], tokens=16)
    2359296
    >>> int((pools[1][0][0] == 1).sum())
    2359296
    """
    blocks = {"src_blocks": src_blocks, "dst_blocks": dst_blocks, "tokens": tokens}
    moved = 0
    for dst_rank, pools in dst.items():
        for src_rank in route.sources(dst_rank):
            ranks = {"src_rank": src_rank, "dst_rank": dst_rank}
            if route.conversion is not None:
                moved += _convert_pools(route.converted(**ranks, **blocks), src[src_rank], pools)
                continue
            bound = route.bind(**ranks, **blocks)
            copy_pools(bound.copies, src[src_rank], pools)
            moved += bound.nbytes
    return moved


def _convert_pools(
    stream: ConvertedStream, src: Mapping[int, Bytes], dst: Mapping[int, Bytes]
) -> int:
    """Carry out a converting transfer between pools; how many bytes arrived."""
    arrived = 0
    for part in stream.parts():
        cells = np.empty(part.nbytes(0), dtype=np.uint8)
        gather([part.copy(0)], src, cells)
        arrived += scatter(
            [part.copy(1)], cells if part.box.copied else _converted(part, cells), dst
        )
    return arrived


def _converted(part: ConvertedPart, cells: Bytes) -> Bytes:
    """Cells in the source's format as they are in the destination's."""
    from kvatlas.kernels import convert_cells  # torch, where something is converted

    src, dst = part.formats
    return convert_cells(cells.reshape(-1, src.nbytes), src, dst).reshape(-1)
