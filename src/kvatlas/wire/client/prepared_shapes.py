"""Fast path: reads that were prepared for the shapes of earlier requests.

The shape of a request is everything except its block ids.

A pull computes which bytes to read. This depends on the two plans, the tokens and the block tables.
For the next request with the same tokens and the same number of blocks, only the block ids are new,
and the link may have prepared the launches (`Link.prepare`). Such a pull starts at once, in the
calling thread: it finds the offer on the peer's board (shared memory), checks that the caller's
blocks are inside their pools, and launches the copy. All other work of the pull happens while the
copy runs.

The offer is checked during the copy. If its content does not match its digest, or it names a block
that does not exist or names a block twice, the result is discarded, and the pull takes the normal
path. For a new shape, the fast path first computes the runs, which takes some tenths of a
millisecond, and caches them.

Unusual requests do not take the fast path. The normal path reports their errors and waits where
that is necessary.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvatlas.copying.stream_pieces import AnyStream
from kvatlas.errors import AtlasError
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import RequestShape
from kvatlas.routing.block_tables import block_table
from kvatlas.routing.request_shape import Lengths, table_lengths
from kvatlas.routing.run_grids import BlockIds
from kvatlas.wire.rpc import log
from kvatlas.wire.transports.base import Link, PreparedRead
from kvatlas.wire.transports.handles import Handle
from kvatlas.wire.transports.offer_board import SeenOffer

_KEPT = 128
"""The maximum number of cached shapes per peer; the least recently used is dropped first."""

_MOST_SPANS = 1 << 12
"""The maximum number of blocks in a table, and of `RequestShape.spans`, of a cached shape.

For longer requests the gain is negligible.
"""

_TOLD = np.dtype("<u4")
"""The dtype of the block ids on an offer board."""

_WHOLE = np.dtype(np.int64)

_Key = tuple[tuple[int, int], Lengths, Lengths]
"""(Tokens, lengths of the source's block tables, lengths of the destination's block tables)."""

MakeStream = Callable[[Mapping[int, Int64s], Mapping[int, Int64s], tuple[int, int]], AnyStream]
"""Returns the stream of a token range, given the blocks of this node and of the peer."""


class PreparedShape(NamedTuple):
    """The shape of a request (all but its block ids), and the prepared read for it."""

    shape: RequestShape
    read: PreparedRead
    total: int | None
    """The bytes that must arrive at this node from all ranks; None before they are counted."""


class StartedRead(NamedTuple):
    """A read in flight."""

    key: _Key
    seen: SeenOffer
    handle: Handle
    prepared: PreparedShape
    tables: tuple[Mapping[int, BlockIds], Mapping[int, BlockIds]]
    """(The source's block tables, this node's block tables)."""

    @property
    def sound(self) -> bool:
        """Whether the offer is `genuine`, its blocks exist, and no table contains a block twice.

        The check runs during the read. That is safe: even an unsound read accesses only the pools.
        """
        (source, destination), shape = self.tables, self.prepared.shape
        distinct = shape.source.distinct(source) and shape.destination.distinct(destination)
        return self.seen.genuine and shape.source.in_range(source) and distinct


class PreparedShapes:
    """The shapes of requests that were pulled over one link. Any thread may use them."""

    def __init__(self, link: Link, stream: MakeStream) -> None:
        self._link, self._stream = link, stream
        self._kept: OrderedDict[_Key, PreparedShape] = OrderedDict()
        self._pulled = 0
        self._lock = threading.Lock()

    def learn(self, tokens: tuple[int, int], stream: AnyStream, total: int) -> None:
        """Prepare the fast path for requests of this shape.

        The first call for a link has no effect, because there may be no second pull over the link.
        """
        key = (tokens, *stream.table_lengths)
        with self._lock:
            self._pulled += 1
            if self._pulled < 2 or key in self._kept:
                return
        self._prepare(key, stream, total)

    def count(self, key: _Key, total: int) -> None:
        """Store how many bytes must arrive for requests with this key."""
        with self._lock:
            if key in self._kept:
                self._kept[key] = self._kept[key]._replace(total=total)

    def start(self, request: str, tokens: Any, blocks: Mapping[int, Int64s]) -> StartedRead | None:
        """Start to read a request into `blocks`. Return None if the fast path does not apply."""
        if not self._kept:
            return None
        try:
            return self._start(request, tokens, blocks)
        except AtlasError:
            return None
        except Exception:
            log.exception("the fast path of a pull failed request=%r", request)
            return None

    def _start(self, request: str, tokens: Any, mine: Mapping[int, Int64s]) -> StartedRead | None:
        board, span = self._link.board, (0, tokens) if type(tokens) is int else tokens
        if type(span) is not tuple or len(span) != 2 or type(span[0]) is not int:
            return None
        seen = None if board is None else board.glimpse(request)
        if seen is None:
            return None
        offer = seen.offer
        if not offer.start <= span[0] or span[1] is True or span[1] != offer.stop:
            return None
        theirs = {group: np.frombuffer(ids, _TOLD) for group, ids in offer.blocks.items()}
        key = (span, table_lengths(theirs), table_lengths(mine))
        prepared = self._kept.get(key)
        if prepared is None:
            prepared = self._prepare_new(key, theirs, mine)
        elif not prepared.shape.destination.in_range(mine):
            return None
        if prepared is None:
            return None
        handle = prepared.read.begin(theirs, mine, offer.mark)
        with self._lock:
            if handle is None and prepared.read.stale:
                self._kept.pop(key, None)
            elif key in self._kept:
                self._kept.move_to_end(key)
        if handle is None:
            return None
        # Copied, because the caller may reuse its arrays after this returns.
        copied = {group: table.copy() for group, table in mine.items()}
        return StartedRead(key, seen, handle, prepared, (theirs, copied))

    def _prepare_new(
        self, key: _Key, theirs: Mapping[int, BlockIds], mine: Mapping[int, Int64s]
    ) -> PreparedShape | None:
        """Check the block tables of a new shape, prepare its read, and return the prepared shape.

        Returns None if the request has no bytes, if it has too many blocks or spans (see `Copy`),
        or if the link cannot prepare the read.
        """
        if max(map(len, theirs.values()), default=0) > _MOST_SPANS:
            return None
        wide = {group: ids.astype(np.int64) for group, ids in theirs.items()}
        stream = self._stream(mine, wide, key[0])
        return self._prepare(key, stream, None)

    def _prepare(self, key: _Key, stream: AnyStream, total: int | None) -> PreparedShape | None:
        shape = stream.shape() if stream.nbytes else None
        if shape is None or shape.spans > _MOST_SPANS:
            return None
        read = self._link.prepare(shape)
        if read is None:
            return None
        made = PreparedShape(shape, read, total)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made


def plain_tables(blocks: Any) -> dict[int, Int64s]:
    """Return each group's block table as an int64 array. Int64 arrays are not copied.

    >>> plain_tables([2, 5])
    {0: array([2, 5])}
    """
    if type(blocks) is not dict:
        blocks = blocks if isinstance(blocks, Mapping) else {0: blocks}
    return {group: _plain_table(table, group) for group, table in blocks.items()}


def _plain_table(table: Any, group: Any) -> Int64s:
    if type(table) is np.ndarray and table.dtype == _WHOLE and table.ndim == 1:
        return table
    return block_table(table, f"group {group} at the destination")
