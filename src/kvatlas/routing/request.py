"""One request of a route: its tokens, its source blocks and its destination blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import StateBlocks, StateSpans
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.geometry.integers import natural
from kvatlas.geometry.state_spans import CommonStates
from kvatlas.geometry.strided_runs import Ends
from kvatlas.planning import Plan
from kvatlas.routing.block_tables import RequestTables, checked_rank
from kvatlas.routing.compiler import GroupPair
from kvatlas.routing.token_ranges import needed_states, ring_states, token_range


class BoundStates(NamedTuple):
    """Spans of consecutive states to copy between two groups, with their block ids.

    Each span has a block id at the source and one at the destination.
    """

    states: StateSpans
    ids: tuple[Int64s, Int64s]


class RequestEnds:
    """Tokens of one request, with block tables for a source rank and a destination rank."""

    def __init__(self, source: RequestTables, destination: RequestTables, tokens: Any) -> None:
        self.source, self.destination = source, destination
        most = min(source.plan.max_len, destination.plan.max_len)
        self.start, self.stop = token_range(tokens, most)

    def states(self, pair: GroupPair, chunk: int | None = None) -> CommonStates:
        """Return the states to copy between two groups.

        If `chunk` is given, the states are extended to whole chunks of `chunk` states. The source's
        and the destination's blocks of these states are checked and marked as used.
        """
        if pair.per_state is None:
            states = self._recurrent(pair)
        elif pair.cells[0].ring:
            states = self._ring(pair, chunk or 1)
        elif chunk is None:
            span = needed_states(pair.visibility, pair.per_state, self.start, self.stop)
            states = CommonStates.between(*span, *pair.cells)
        else:
            states = self._chunks(pair, pair.per_state, chunk)
        if states.total:
            self.source.use(pair.groups[0], states, 0)
            if not self._alike(pair):
                self.destination.use(pair.groups[1], states, 1)
        return states

    def _alike(self, pair: GroupPair) -> bool:
        """Return whether a pair has the same block table and states at source and destination."""
        return (
            self.source is self.destination
            and pair.groups[0] == pair.groups[1]
            and pair.cells[0] == pair.cells[1]
        )

    def bind(self, pair: GroupPair, spans: StateSpans) -> BoundStates:
        """Return spans of states together with their block ids.

        Call `states` first: it checks the blocks.
        """
        source = self.source.ids(pair.groups[0], spans.source.entry)
        return BoundStates(
            spans, (source, self.destination.ids(pair.groups[1], spans.destination.entry))
        )

    def pools(self, pair: GroupPair) -> Ends:
        """Return the indices of the source pool and the destination pool of a pair of groups."""
        source, destination = pair.groups
        return self.source.plan.groups[source].pool, self.destination.plan.groups[destination].pool

    def check_distinct(self) -> None:
        """Raise an error if two used entries of one pool have the same block id."""
        self.source.check_distinct()
        if self.destination is not self.source:
            self.destination.check_distinct()

    def _recurrent(self, pair: GroupPair) -> CommonStates:
        """Return the state of a recurrent group after the last token."""
        blocks = (StateBlocks(1), StateBlocks(1))
        if self.start == self.stop:
            return CommonStates.between(0, 0, *blocks)
        source = self.source.state_entry(pair.groups[0], self.stop)
        destination = self.destination.state_entry(pair.groups[1], self.stop)
        return CommonStates(blocks, 1, (source, destination), (1, 1))

    def _ring(self, pair: GroupPair, chunk: int) -> CommonStates:
        """Return the states of a ring to copy, extended to whole chunks of `chunk` states.

        The states are needed even if the last token completes its group of tokens, because an
        engine may compute the last token again.
        """
        first, stop = ring_states(pair.visibility, self.start, self.stop)
        if first < stop:
            first, stop = first // chunk * chunk, -(-stop // chunk) * chunk
        source, destination = (c if chunk == 1 else _chunked(c, chunk) for c in pair.cells)
        return CommonStates.between(first, stop, source, destination)

    def _chunks(self, pair: GroupPair, per_state: int, chunk: int) -> CommonStates:
        source, destination = pair.cells
        whole = chunk * source.every if source.every == destination.every else 1
        if self.start // per_state % whole and self.start < self.stop:
            step = whole * per_state
            problem = f"The tokens of a prepared route must start at a multiple of {step}"
            hint = "Use Route.bind for other token ranges"
            raise AtlasError(Code.BAD_TOKENS, problem, got=f"token {self.start}", hint=hint)
        first, stop = needed_states(pair.visibility, per_state, self.start, self.stop)
        if first < stop:
            first, stop = first // whole * whole, -(-stop // whole) * whole
        return CommonStates.between(
            first, stop, _chunked(source, chunk), _chunked(destination, chunk)
        )


def check_tables(
    plan: Plan,
    rank: int,
    blocks: Any,
    tokens: Any,
    *,
    end: str = "source",
    recompute: int = 0,
    layers: Collection[str] | None = None,
) -> dict[int, Int64s]:
    """Check a request's block tables at one rank of a plan, and return them by group.

    Every group of the rank needs a table that covers the tokens. Blocks that hold needed states
    must be in the pool and appear once. Entries that are not needed may have any value and are
    returned as -1. For a window, the needed states include all states to which the last `recompute`
    tokens attend. With `layers`, only the groups of those layers need a table. `end` names the plan
    in error messages.

    >>> from kvatlas.planning import plan
    >>> node = plan("Qwen3-8B", memory="1GiB", max_len=512)
    >>> check_tables(node, 0, [7, 4, 9, 8], 40)
    {0: array([ 7,  4,  9, -1])}
    """
    rank = checked_rank(plan, rank, end)
    tables = RequestTables(plan, rank, blocks, end)
    start, stop = token_range(tokens, plan.max_len)
    recompute = min(natural(recompute, "recompute"), stop - start)
    for upto in {stop, stop - recompute}:
        _use_tables(tables, (start, upto), layers, recurrent=upto == stop)
    tables.check_distinct()
    return tables.used()


def _use_tables(
    tables: RequestTables,
    tokens: tuple[int, int],
    layers: Collection[str] | None,
    *,
    recurrent: bool,
) -> None:
    """Check and mark the entries that a token range needs in every group.

    In recurrent groups, only the entry with the state after the last token is needed. These groups
    are skipped if `recurrent` is false.
    """
    kept = RequestEnds(tables, tables, tokens)
    plan, rank = tables.plan, tables.rank
    stage, tp_rank = plan.split_rank(rank)
    for index, per_state, rows in sorted(
        {
            (region.group, layer.spec.tokens_per_state or 0, getattr(layer.spec, "rows", 0))
            for region in plan.regions
            if region.stage == stage
            for layer in region.layers
            if layers is None or layer.name in layers
        }
    ):
        if not per_state and not recurrent:
            continue
        group = plan.groups[index]
        cells = StateBlocks(
            group.block // (per_state or 1), every=plan.dcp, residue=tp_rank % plan.dcp
        )
        if rows:
            cells = StateBlocks(rows, ring=True)
        pair = GroupPair((index, index), per_state or None, group.visibility, (cells, cells))
        kept.states(pair)


def _chunked(cells: StateBlocks, chunk: int) -> StateBlocks:
    """Return the same states, divided into kernel blocks of `chunk` states each."""
    return cells._replace(states=chunk, split=cells.split * (cells.states // chunk))
