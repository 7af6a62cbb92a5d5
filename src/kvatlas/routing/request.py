"""One request at both ends of a route: its tokens, and which blocks have their states."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import CommonStates, Ends, Int64s, StateBlocks, StateSpans
from kvatlas.routing.block_tables import RequestTables
from kvatlas.routing.compiler import GroupPair
from kvatlas.routing.token_ranges import needed_states, token_range


class BoundStates(NamedTuple):
    """States that move between two groups, and the block ids that they are in at either end."""

    states: StateSpans
    ids: tuple[Int64s, Int64s]


class RequestEnds:
    """Tokens of one request, with block tables for a source and a destination rank."""

    def __init__(self, src: RequestTables, dst: RequestTables, tokens: Any) -> None:
        self.src, self.dst = src, dst
        most = min(src.plan.max_len, dst.plan.max_len)
        self.start, self.stop = token_range(tokens, most)

    def states(self, pair: GroupPair, chunk: int | None = None) -> CommonStates:
        """The states that move between two groups, all of them or in whole chunks of states.

        Their blocks are checked at both ends.
        """
        if pair.per_state is None:
            states = self._recurrent(pair)
        elif chunk is None:
            span = needed_states(pair.visibility, pair.per_state, self.start, self.stop)
            states = CommonStates.between(*span, *pair.cells)
        else:
            states = self._chunks(pair, pair.per_state, chunk)
        if states.count:
            self.src.use(pair.groups[0], states, 0)
            self.dst.use(pair.groups[1], states, 1)
        return states

    def bind(self, pair: GroupPair, spans: StateSpans) -> BoundStates:
        """Spans of states that were checked, and the blocks that they are in."""
        src = self.src.ids(pair.groups[0], spans.src.entry)
        return BoundStates(spans, (src, self.dst.ids(pair.groups[1], spans.dst.entry)))

    def pools(self, pair: GroupPair) -> Ends:
        """The pools that two groups draw their blocks from."""
        src, dst = pair.groups
        return self.src.plan.groups[src].pool, self.dst.plan.groups[dst].pool

    def check_distinct(self) -> None:
        """Refuse a block that two entries of the request's tables would share."""
        self.src.check_distinct()
        self.dst.check_distinct()

    def _recurrent(self, pair: GroupPair) -> CommonStates:
        """The one state of a recurrent group, where it lies after the last token."""
        blocks = (StateBlocks(1), StateBlocks(1))
        if self.start == self.stop:
            return CommonStates.between(0, 0, *blocks)
        src = self.src.state_entry(pair.groups[0], self.stop)
        dst = self.dst.state_entry(pair.groups[1], self.stop)
        return CommonStates(blocks, 1, (src, dst), (1, 1))

    def _chunks(self, pair: GroupPair, per_state: int, chunk: int) -> CommonStates:
        src, dst = pair.cells
        whole = chunk * src.every if src.every == dst.every else 1
        if self.start // per_state % whole and self.start < self.stop:
            problem = f"The range starts inside a prepared chunk of {whole} states"
            hint = "Use Route.bind for a range that starts there"
            raise AtlasError(Code.BAD_TOKENS, problem, got=f"token {self.start}", hint=hint)
        first, stop = needed_states(pair.visibility, per_state, self.start, self.stop)
        if first < stop:
            first, stop = first // whole * whole, -(-stop // whole) * whole
        return CommonStates.between(first, stop, _chunked(src, chunk), _chunked(dst, chunk))


def _chunked(cells: StateBlocks, chunk: int) -> StateBlocks:
    """The same cells with each chunk as a cell of its own."""
    return cells._replace(states=chunk, split=cells.split * (cells.states // chunk))
