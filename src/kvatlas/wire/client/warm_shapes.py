"""Pulls that are launched by who asks for them, because others went before them over the link.

A pull works out, from two plans, tokens and block tables, what is read from where. For the
next request of the same tokens, in as many blocks, all of that is known but the block ids, and
a transport may have prepared launches for it. Then it is begun before anything else is done:
the offer is seen on the peer's board, the caller's blocks are seen to lie in their pools, and
the copy is launched. Everything that a pull consists of beside that happens while it runs. Should
the offer not be genuine then, name blocks that are not there, or one twice, the copy counts for
nothing, and the pull goes its whole way. A request of other tokens is begun in the same way
once its shape was worked out, which takes some tenths of a millisecond and is kept.

Whatever is unusual is not begun here: the pull then goes its whole way, which says what is
wrong, or waits where something has to be waited for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvatlas.errors import AtlasError
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.routing import RequestShape, Stream
from kvatlas.routing.block_tables import block_table
from kvatlas.routing.request_shape import Lengths, table_lengths
from kvatlas.routing.run_grids import BlockIds
from kvatlas.wire.rpc import log
from kvatlas.wire.stream_copy import AnyStream
from kvatlas.wire.transports.base import Handle, Link, PreparedRead
from kvatlas.wire.transports.offer_board import SeenOffer

_KEPT = 128
"""Shapes that are kept ready for one peer; those that were used longest ago go first."""

_MOST_SPANS = 1 << 12
"""Spans of a shape that is kept: longer requests take so long that it would not be noticed."""

_TOLD = np.dtype("<u4")
"""Block ids as they stand on a board."""

_WHOLE = np.dtype(np.int64)

_Key = tuple[tuple[int, int], Lengths, Lengths]
"""Tokens, and how long the block tables of source and destination are."""


class WarmShape(NamedTuple):
    """A shape of requests, and what a transport has prepared for it."""

    shape: RequestShape
    read: PreparedRead
    total: int | None
    """Bytes that must arrive at this node, of all ranks; None before anybody has counted."""


MakeStream = Callable[[Mapping[int, Int64s], Mapping[int, Int64s], tuple[int, int]], AnyStream]
"""What moves of some tokens, between blocks of this node and of the peer."""


class StartedRead(NamedTuple):
    """A read that is under way."""

    key: _Key
    seen: SeenOffer
    handle: Handle
    warm: WarmShape
    tables: tuple[Mapping[int, BlockIds], Mapping[int, BlockIds]]
    """Block ids at the source and here."""

    @property
    def sound(self) -> bool:
        """Whether it reads what was offered, all of it is there, and no block was named twice.

        Looked at while it is read, and not before: no other memory is touched if it is not so.
        """
        (src, dst), shape = self.tables, self.warm.shape
        distinct = shape.src.distinct(src) and shape.dst.distinct(dst)
        return self.seen.genuine and shape.src.in_range(src) and distinct


class WarmShapes:
    """Shapes that are pulled over one link; any thread may use them."""

    def __init__(self, link: Link, stream: MakeStream) -> None:
        self._link, self._stream = link, stream
        self._kept: OrderedDict[_Key, WarmShape] = OrderedDict()
        self._pulled = 0
        self._lock = threading.Lock()

    def learn(self, tokens: tuple[int, int], stream: Stream, total: int) -> None:
        """Get ready for requests like one that was pulled, unless it is the first of the link."""
        key = (tokens, *stream.table_lengths)
        with self._lock:
            self._pulled += 1
            if self._pulled < 2 or key in self._kept:
                return
        self._prepare(key, stream, total)

    def count(self, key: _Key, total: int) -> None:
        """Remember how many bytes must arrive of requests like one that was started."""
        with self._lock:
            if key in self._kept:
                self._kept[key] = self._kept[key]._replace(total=total)

    def start(self, request: str, tokens: Any, blocks: Mapping[int, Int64s]) -> StartedRead | None:
        """Read what is offered under a name into blocks; None where nothing was begun."""
        if not self._kept:
            return None
        try:
            return self._start(request, tokens, blocks)
        except AtlasError:
            return None
        except Exception:
            log.exception("a warm pull was not begun request=%r", request)
            return None

    def _start(self, request: str, tokens: Any, mine: Mapping[int, Int64s]) -> StartedRead | None:
        span = (0, tokens) if type(tokens) is int else tokens
        if type(span) is not tuple or len(span) != 2 or type(span[0]) is not int:
            return None
        seen = self._link.glimpse_offer(request)
        if seen is None:
            return None
        offer = seen.offer
        if not offer.start <= span[0] or span[1] is True or span[1] != offer.stop:
            return None
        theirs = {group: np.frombuffer(ids, _TOLD) for group, ids in offer.blocks.items()}
        key = (span, table_lengths(theirs), table_lengths(mine))
        warm = self._kept.get(key)
        if warm is None:
            warm = self._foreseen(key, theirs, mine)
        elif not warm.shape.dst.in_range(mine):
            return None
        if warm is None:
            return None
        handle = warm.read.begin(theirs, mine, offer.mark)
        with self._lock:
            if handle is None and warm.read.stale:
                self._kept.pop(key, None)
            elif key in self._kept:
                self._kept.move_to_end(key)
        if handle is None:
            return None
        # The caller may use its arrays for something else once it has been answered.
        copied = {group: table.copy() for group, table in mine.items()}
        return StartedRead(key, seen, handle, warm, (theirs, copied))

    def _foreseen(
        self, key: _Key, theirs: Mapping[int, BlockIds], mine: Mapping[int, Int64s]
    ) -> WarmShape | None:
        """What a request is read by that is the first of its shape; its tables are checked."""
        if max(map(len, theirs.values()), default=0) > _MOST_SPANS:
            return None
        wide = {group: ids.astype(np.int64) for group, ids in theirs.items()}
        stream = self._stream(mine, wide, key[0])
        return self._prepare(key, stream, None) if isinstance(stream, Stream) else None

    def _prepare(self, key: _Key, stream: Stream, total: int | None) -> WarmShape | None:
        if not stream.nbytes:
            return None
        shape = stream.shape()
        read = self._link.prepare(shape) if shape.spans <= _MOST_SPANS else None
        if read is None:
            return None
        made = WarmShape(shape, read, total)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made


def plain_tables(blocks: Any) -> dict[int, Int64s]:
    """Block tables by group as arrays; those that are such already are not copied.

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
