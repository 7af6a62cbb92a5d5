"""One request at both ends of a route: its tokens, and which blocks of each lane have them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s, SpanStarts, StateBlocks, StateSpans
from kvatlas.routing.block_tables import End
from kvatlas.routing.compiler import Lane
from kvatlas.routing.token_ranges import token_range


class Placed(NamedTuple):
    """The stretches of a lane, and the block ids that they are in at either end."""

    found: StateSpans
    src: Int64s
    dst: Int64s


class Request:
    """Tokens of one request, with block tables for two ranks."""

    def __init__(self, src: End, dst: End, tokens: Any) -> None:
        self.src, self.dst = src, dst
        most = min(src.plan.max_len, dst.plan.max_len)
        self.start, self.stop = token_range(tokens, most)

    def place(self, lane: Lane, chunk: int | None = None) -> Placed:
        """Where the states of a lane are, in stretches or in whole chunks of states."""
        if lane.per_state is None:
            found = self._state(lane)
        elif chunk is None:
            reach = lane.reach.states(lane.per_state, self.start, self.stop)
            found = StateSpans.between(*reach, lane.src, lane.dst)
        else:
            found = self._chunks(lane, lane.per_state, chunk)
        if not len(found.length):
            return Placed(found, found.length, found.length)
        return Placed(
            found,
            self.src.ids(lane.src_group, found.src.entry),
            self.dst.ids(lane.dst_group, found.dst.entry),
        )

    def refuse_twice(self) -> None:
        """Refuse a block that two places of the request would share."""
        self.src.refuse_twice()
        self.dst.refuse_twice()

    def _state(self, lane: Lane) -> StateSpans:
        """The one state of a recurrent lane, where it lies after the last token."""
        if self.start == self.stop:
            return StateSpans.between(0, 0, lane.src, lane.dst)
        zero = np.zeros(1, dtype=np.int64)
        src = SpanStarts(zero + self.src.state_entry(lane.src_group, self.stop), zero, zero)
        dst = SpanStarts(zero + self.dst.state_entry(lane.dst_group, self.stop), zero, zero)
        return StateSpans(src, dst, zero + 1)

    def _chunks(self, lane: Lane, per_state: int, chunk: int) -> StateSpans:
        whole = chunk * lane.src.every if lane.src.every == lane.dst.every else 1
        if self.start // per_state % whole and self.start < self.stop:
            raise AtlasError(
                Code.BAD_TOKENS,
                f"Prepared transfers start at a whole chunk of {whole} states",
                got=f"token {self.start}",
                hint="Use Route.bind for a range that starts elsewhere",
            )
        first, stop = lane.reach.states(per_state, self.start, self.stop)
        if first < stop:
            first, stop = first // whole * whole, -(-stop // whole) * whole
        return StateSpans.between(first, stop, _chunked(lane.src, chunk), _chunked(lane.dst, chunk))


def _chunked(cells: StateBlocks, chunk: int) -> StateBlocks:
    """The same cells with each chunk as a cell of its own."""
    return cells._replace(states=chunk, split=cells.split * (cells.states // chunk))
