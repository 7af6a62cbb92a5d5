"""Pulls that are launched by who asks for them, because one of the same shape went before.

A pull works out, from two plans, tokens and block tables, what is read from where. For the
next request of the same tokens, in as many blocks, all of that is known but the block ids, and
a transport may have prepared launches for it. Then it is begun before anything else is done:
the offer is seen on the peer's board, its blocks and those of the caller are checked, and the
copy is launched. Everything that a pull consists of beside that happens while it runs.

Whatever is unusual is not begun here: the pull then goes its whole way, which says what is
wrong, or waits where something has to be waited for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvatlas.errors import AtlasError
from kvatlas.geometry import Int64s
from kvatlas.routing import Lengths, RequestShape, Stream, table_lengths
from kvatlas.wire.protocol import unpack_tables
from kvatlas.wire.rpc import log
from kvatlas.wire.transports.base import Handle, Link, PreparedRead
from kvatlas.wire.transports.offer_board import SeenOffer

_KEPT = 32
"""Shapes that are kept ready for one peer; those that were used longest ago go first."""

_MOST_SPANS = 1 << 12
"""Spans of a shape that is kept: longer requests take so long that it would not be noticed."""

_Key = tuple[tuple[int, int], Lengths, Lengths]
"""Tokens, and how long the block tables of source and destination are."""


class WarmShape(NamedTuple):
    """A shape that was pulled before, and what a transport has prepared for it."""

    shape: RequestShape
    read: PreparedRead
    total: int
    """Bytes that must arrive at this node, of all ranks."""


class StartedRead(NamedTuple):
    """A read that is under way."""

    seen: SeenOffer
    handle: Handle
    warm: WarmShape


class WarmShapes:
    """Shapes that were pulled over one link; any thread may use them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._kept: OrderedDict[_Key, WarmShape | None] = OrderedDict()
        self._lock = threading.Lock()

    def learn(self, tokens: tuple[int, int], stream: Stream, total: int) -> None:
        """Get ready for the next request like one that was pulled, unless it is the first so."""
        shape = stream.shape()
        key = (tokens, shape.src.lengths, shape.dst.lengths)
        with self._lock:
            again = key in self._kept
            ready = self._kept.setdefault(key, None) is not None
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        if not again or ready or not shape.nbytes or shape.spans > _MOST_SPANS:
            return
        read = self._link.prepare(shape)
        if read is not None:
            with self._lock:
                self._kept[key] = WarmShape(shape, read, total)

    def start(self, request: str, tokens: Any, blocks: Any) -> StartedRead | None:
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

    def _start(self, request: str, tokens: Any, blocks: Any) -> StartedRead | None:
        span, mine = _plain_tokens(tokens), _plain_tables(blocks)
        if span is None or mine is None:
            return None
        seen = self._link.glimpse_offer(request)
        if seen is None or not seen.offer.start <= span[0] or span[1] != seen.offer.stop:
            return None
        theirs = unpack_tables(seen.offer.blocks)
        key = (span, table_lengths(theirs), table_lengths(mine))
        warm = self._kept.get(key)
        if warm is None or not (warm.shape.src.admits(theirs) and warm.shape.dst.admits(mine)):
            return None
        handle = warm.read.begin(theirs, mine, seen.offer.mark)
        return None if handle is None else StartedRead(seen, handle, warm)


def _plain_tokens(tokens: Any) -> tuple[int, int] | None:
    """A range of tokens that is told in the plainest way."""
    if type(tokens) is int:
        return 0, tokens
    if type(tokens) is tuple and len(tokens) == 2 and all(type(edge) is int for edge in tokens):
        return tokens
    return None


def _plain_tables(blocks: Any) -> dict[int, Int64s] | None:
    """Block tables by group, where they are arrays already."""
    tables = dict(blocks) if isinstance(blocks, Mapping) else {0: blocks}
    plain = all(
        isinstance(table, np.ndarray) and table.dtype == np.int64 and table.ndim == 1
        for table in tables.values()
    )
    return tables if plain else None
