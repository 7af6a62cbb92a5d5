"""Copy pieces of streams into and out of pools, and convert them if the route converts.

The source gathers a piece from its pools, and the destination scatters it into the destination's
pools. If the route converts, pieces are sent in the smaller of the two formats: the source converts
them before they are sent if its format is larger; otherwise, the destination converts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvatlas.copying.checksum import crc32
from kvatlas.copying.gather_scatter import gather, scatter
from kvatlas.copying.memory_copy import rank_pools
from kvatlas.copying.nested_copy import copy_pools
from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import ConvertedStream, Copy, Route, Stream
from kvatlas.routing.block_tables import checked_rank
from kvatlas.routing.converted_stream import ConvertedPart

AnyStream = Stream | ConvertedStream
"""A stream of unchanged bytes, or a stream that the source or the destination converts."""

MoveRuns = Callable[[Sequence[Copy], Any], object]
"""Gathers the runs of the given copies into a buffer, or scatters a buffer into them."""

SOURCE, DESTINATION = 0, 1

_CONVERTED = 1 << 20
"""The maximum size of a converted piece in bytes: conversion is slow, and the other end waits."""


class StreamPiece(NamedTuple):
    """The runs of a piece of a stream, in the pools of the source or of the destination."""

    copies: Sequence[Copy]
    parts: Sequence[ConvertedPart] = ()
    """The converted part that each copy belongs to; empty if the route does not convert."""

    @classmethod
    def of(cls, stream: AnyStream, start: int, stop: int, end: int) -> StreamPiece:
        """Return the runs of bytes `start .. stop - 1` of a stream.

        The runs are in the source's pools if `end` is `SOURCE`, in the destination's pools if it
        is `DESTINATION`.
        """
        if isinstance(stream, Stream):
            return cls(stream.copies(start, stop))
        parts = list(stream.parts(start, stop))
        return cls([part.copy(end) for part in parts], parts)

    def fill(self, gather: MoveRuns, piece: Any) -> None:
        """Gather from the source's pools into `piece`, in the format in which the piece is sent."""
        if not self.parts:
            gather(self.copies, piece)
        done = 0
        for copy, part in zip(self.copies, self.parts, strict=bool(self.parts)):
            into = piece[done : done + part.travelling]
            done += part.travelling
            if part.converted_at(SOURCE):
                cells = _bytes_like(piece, part.nbytes(SOURCE))
                gather([copy], cells)
                into[:] = _converted(part, cells)
            else:
                gather([copy], into)

    def deliver(self, piece: Any, scatter: MoveRuns) -> int:
        """Scatter `piece` into the destination's pools. Return the number of bytes written."""
        if not self.parts:
            scatter(self.copies, piece)
        done = 0
        for copy, part in zip(self.copies, self.parts, strict=bool(self.parts)):
            cells = piece[done : done + part.travelling]
            done += part.travelling
            scatter([copy], _converted(part, cells) if part.converted_at(DESTINATION) else cells)
        return sum(copy.nbytes for copy in self.copies)


def piece_spans(stream: AnyStream, piece: int) -> Iterator[tuple[int, int]]:
    """Yield the byte offsets (start, stop) of each piece of at most `piece` bytes of a stream."""
    if isinstance(stream, ConvertedStream):
        return stream.spans(min(piece, _CONVERTED))
    total = stream.nbytes
    return ((start, min(total, start + piece)) for start in range(0, total, piece))


def piece_checksum(piece: Any) -> int:
    """Return the CRC-32 of a piece, which may be on the host or on a GPU."""
    return crc32((piece if isinstance(piece, np.ndarray) else piece.cpu().numpy()).data)


def copy_request(
    route: Route,
    source: Mapping[int, Mapping[int, Bytes]],
    destination: Mapping[int, Mapping[int, Bytes]],
    *,
    source_blocks: Any,
    destination_blocks: Any,
    tokens: Any,
) -> int:
    """Copy a request between ranks in this process. Return the number of bytes written.

    `source` and `destination` map each rank to a dict, which maps each pool index to a byte array.
    If the route converts the cache's format, the bytes are converted.

    >>> import numpy as np
    >>> from kvatlas.planning import plan
    >>> from kvatlas.routing import route
    >>> made = plan("Qwen3-8B", memory="64MiB", max_len=64)
    >>> pools = [{0: {0: np.full(made.pools[0].nbytes, n, np.uint8)}} for n in (1, 2)]
    >>> way = route(made, made)
    >>> copy_request(way, *pools, source_blocks=[3], destination_blocks=[0], tokens=16)
    2359296
    >>> int((pools[1][0][0] == 1).sum())
    2359296
    """
    moved = 0
    for destination_rank in destination:
        pools = rank_pools(
            route.destination,
            checked_rank(route.destination, destination_rank, "destination"),
            destination[destination_rank],
        )
        for source_rank in route.sources(destination_rank):
            if source_rank not in source:
                problem, hint = (
                    "The memory of a source rank is missing",
                    "Pass the pools of every source rank",
                )
                got = f"ranks {list(source)}, without rank {source_rank}"
                raise AtlasError(Code.BAD_RANK, problem, got=got, hint=hint)
            held = rank_pools(route.source, source_rank, source[source_rank])
            ask: dict[str, Any] = {
                "source_rank": source_rank,
                "destination_rank": destination_rank,
                "tokens": tokens,
            }
            ask.update(source_blocks=source_blocks, destination_blocks=destination_blocks)
            if route.conversion is not None:
                moved += _convert_pools(route.converted(**ask), held, pools)
                continue
            bound = route.bind(**ask)
            copy_pools(bound.copies, held, pools)
            moved += bound.nbytes
    return moved


def _convert_pools(
    stream: ConvertedStream, source: Mapping[int, Bytes], destination: Mapping[int, Bytes]
) -> int:
    """Copy and convert a stream between pools. Return the number of bytes written."""
    return convert_parts(
        stream.parts(),
        lambda copies, cells: gather(copies, source, cells),
        lambda copies, cells: scatter(copies, cells, destination),
    )


def convert_parts(parts: Iterable[ConvertedPart], gather: MoveRuns, scatter: MoveRuns) -> int:
    """Gather, convert and scatter the parts of a stream, one after the other.

    Return the number of bytes written.
    """
    arrived = 0
    for part in parts:
        cells = np.empty(part.nbytes(SOURCE), dtype=np.uint8)
        gather([part.copy(SOURCE)], cells)
        made = cells if part.box.copied else _converted(part, cells)
        scatter([part.copy(DESTINATION)], made)
        arrived += part.nbytes(DESTINATION)
    return arrived


def _bytes_like(piece: Any, nbytes: int) -> Any:
    """Return an uninitialized buffer of `nbytes` on the device of `piece`."""
    return np.empty(nbytes, np.uint8) if isinstance(piece, np.ndarray) else piece.new_empty(nbytes)


def _converted(part: ConvertedPart, cells: Any) -> Any:
    """Return the bytes of `cells` converted from the source's format to the destination's.

    A cell contains the bytes that one head stores for one token.
    """
    from kvatlas.kernels.cell_conversion import convert_cells  # imports torch

    source, destination = part.formats
    return convert_cells(cells.reshape(-1, source.nbytes), source, destination).reshape(-1)
