"""The byte ranges that the ranks of a topology contribute to a tier's blocks.

A route is bound to placeholder numbers instead of block ids. Blocks that are already stored, or for
which there is no space, are left out when the numbers are replaced by block ids. The route
determines both the bytes that each rank contributes to a block and the bytes that the block needs.
A block is complete when all needed bytes have been contributed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain, count
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout
from kvatlas.geometry.address_arrays import Int64s, join_ranges
from kvatlas.geometry.integers import ceil_div
from kvatlas.planning import Plan
from kvatlas.planning.plans import checked_plan
from kvatlas.routing import Copy, route
from kvatlas.tier.request_blocks import NeededBlock, TierSpans
from kvatlas.tier.row_kinds import refuse_rings

Shape = tuple[Any, ...]
Ranges = tuple[Int64s, Int64s]


_numbers = count()
_REMEMBERED = 1024
APART = 2
"""Distance between the numbers of two blocks. The gap keeps runs from crossing blocks."""


class Delivery(NamedTuple):
    """The byte ranges of a block that one rank writes, and the ranges that the block needs.

    Ranges are a pair of arrays: starts and lengths in bytes.
    """

    brought: Ranges
    """The ranges that this rank writes."""
    needed: Ranges
    """The ranges that all ranks together must write."""


class Ingest:
    """Computes which bytes each rank of one plan contributes to a tier's blocks."""

    def __init__(self, source: Plan, tier: Plan) -> None:
        self.number = next(_numbers)
        self.spans = TierSpans(tier, source)
        # Rows have only defined bytes, so that they do not depend on who wrote them.
        self.route = route(source, with_room(tier), padding=False)
        self.block_bytes = {pool.index: pool.block_bytes for pool in tier.pools}
        self.pool_of = [group.pool for group in tier.groups]
        self._known: dict[tuple[int, Shape], Delivery] = {}
        self._whole: dict[tuple[Shape, frozenset[int]], bool] = {}
        self._lock = threading.Lock()

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks that must store their parts. All others hold only replicas of these parts."""
        return self.route.sources(0)

    def copies(
        self,
        rank: int,
        blocks: Any,
        tokens: tuple[int, int],
        ids: Mapping[NeededBlock, int],
        *,
        as_grids: bool = False,
    ) -> tuple[list[Copy], dict[Shape, Delivery]]:
        """Return the copies from a rank into the tier's blocks. `ids` contains the block ids.

        Also returns a `Delivery` for each `NeededBlock.shape`: the rank writes the same byte ranges
        of all blocks that have this shape. With `as_grids`, each `Copy` describes many runs by
        spans and starts, and single runs are computed only for a shape that was not seen before.
        """
        with self._lock:
            tables, numbers = self._number(*tokens)
            ends = _ends(rank, blocks, tables, tokens)
            single = cache(lambda: self.route.bind(**ends).copies)
            known = self._deliveries(rank, ids, single, tables, tokens)
            copies = self.route.stream(**ends).grids() if as_grids else single()
        placed = {(need.group, need.entry): block_id for need, block_id in ids.items()}
        target = {
            pool: np.array([placed.get(place, -1) for place in places], dtype=np.int64)
            for pool, places in numbers.items()
        }
        aimed = (self._aimed(copy, target[copy.destination_pool]) for copy in copies)
        return list(chain.from_iterable(aimed)), known

    def deliveries(
        self, rank: int, blocks: Any, tokens: tuple[int, int], needs: Iterable[NeededBlock]
    ) -> dict[Shape, Delivery]:
        """Return the bytes that a rank writes to a block of each shape in `needs`."""
        with self._lock:
            needs = list(needs)
            if all((rank, need.shape) in self._known for need in needs):
                return {need.shape: self._known[rank, need.shape] for need in needs}
            tables, _ = self._number(*tokens)
            ends = _ends(rank, blocks, tables, tokens)
            written = lambda: self.route.bind(**ends).copies  # noqa: E731
            return self._deliveries(rank, needs, written, tables, tokens)

    def whole(self, shape: Shape, deliveries: Mapping[int, Delivery]) -> bool:
        """Return whether the ranks' deliveries cover every byte that a block of `shape` needs."""
        ranks = frozenset(deliveries)
        with self._lock:
            if (shape, ranks) not in self._whole:
                brought = [delivery.brought for delivery in deliveries.values()]
                starts, lengths = (np.concatenate(arrays) for arrays in zip(*brought, strict=True))
                needed = next(iter(deliveries.values())).needed
                same = all(map(np.array_equal, join_ranges(starts, lengths), needed))
                self._whole[shape, ranks] = same
            return self._whole[shape, ranks]

    def _number(self, start: int, stop: int) -> tuple[dict[int, Int64s], dict[int, list[Any]]]:
        """Return a block table of placeholder numbers for each group.

        Also returns, for each pool, a list: item n is the (group, table entry) of number n.
        """
        tables: dict[int, Int64s] = {}
        numbers: dict[int, list[Any]] = {pool: [] for pool in self.block_bytes}
        for index, group in enumerate(self.spans.tier.groups):
            known, recurrent = numbers[group.pool], self.spans.recurrent(index)
            first, last = (stop - 1, stop) if recurrent else self.spans.touched(index, start, stop)
            entries = range(first // group.block, ceil_div(last, group.block))
            table = np.full(max(entries.stop, 1), -1, dtype=np.int64)
            table[entries.start :] = APART * (len(known) + np.arange(len(entries)))
            known += [(index, entry) for entry in entries]
            tables[index] = table[-1:] if recurrent else table
        return tables, numbers

    def _aimed(self, copy: Copy, target: Int64s) -> Iterable[Copy]:
        """Translate the destination of a copy from placeholder numbers to block ids.

        Runs to a placeholder number without a block id are dropped.
        """
        block_bytes = self.block_bytes[copy.destination_pool]
        number, within = np.divmod(copy.destination, APART * block_bytes)
        block_id = target[number]
        destination, kept = block_id * block_bytes + within, block_id >= 0
        if kept.all():
            yield replace(copy, destination=destination)
        elif kept.any():
            yield replace(
                copy,
                source=copy.source[kept],
                destination=destination[kept],
                length=copy.length[kept],
            )

    def _deliveries(
        self,
        rank: int,
        needs: Iterable[NeededBlock],
        written: Callable[[], Iterable[Copy]],
        tables: dict[int, Int64s],
        tokens: tuple[int, int],
    ) -> dict[Shape, Delivery]:
        """Return a `Delivery` for each `NeededBlock.shape` in `needs`.

        Deliveries are cached. For shapes that were not seen before, `written` must return the
        copies from the rank to the placeholder numbers in `tables`.
        """
        shapes = {need.shape: need for need in needs}
        unknown = [need for shape, need in shapes.items() if (rank, shape) not in self._known]
        if len(self._known) + len(unknown) > _REMEMBERED:
            self._known.clear()
            self._whole.clear()
            unknown = list(shapes.values())
        if unknown:
            copies = list(written())
            all_needs = self.route.needs(
                destination_rank=0, destination_blocks=tables, tokens=tokens
            )
            for need in unknown:
                pool = self.pool_of[need.group]
                entry = -1 if self.spans.recurrent(need.group) else need.entry
                number = int(tables[need.group][entry]) // APART
                mine = [(c.destination, c.length) for c in copies if c.destination_pool == pool]
                theirs = [all_needs[pool]] if pool in all_needs else []
                brought, needed = (self._within(all_of, pool, number) for all_of in (mine, theirs))
                self._known[rank, need.shape] = Delivery(brought, join_ranges(*needed))
        return {shape: self._known[rank, shape] for shape in shapes}

    def _within(self, ranges: Iterable[Ranges], pool: int, number: int) -> Ranges:
        """Return the ranges that are in block `number` of a pool, relative to its first byte."""
        begin = APART * number * self.block_bytes[pool]
        starts, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for start, length in ranges:
            inside = slice(*np.searchsorted(start, (begin, begin + self.block_bytes[pool])))
            starts.append(start[inside] - begin)
            lengths.append(np.array(length[inside]))
        return np.concatenate(starts), np.concatenate(lengths)


def _ends(rank: int, blocks: Any, tables: Any, tokens: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of `Route.bind` for copies from a rank to placeholder numbers."""
    ends = {"source_blocks": blocks, "destination_blocks": tables, "tokens": tokens}
    return {"source_rank": rank, "destination_rank": 0, **ends}


def with_room(plan: Plan) -> Plan:
    """Return a copy of `plan` with enough blocks for the placeholder numbers of any request."""
    pools = []
    for pool in plan.pools:
        blocks = sum(
            ceil_div(max(plan.max_len, group.source), group.block) + 1
            for group in plan.groups
            if group.pool == pool.index
        )
        pools.append(msgspec.structs.replace(pool, blocks=APART * blocks))
    nbytes = sum(pool.nbytes for pool in pools)
    return msgspec.structs.replace(plan, pools=tuple(pools), memory=nbytes)


def check_tier_plan(plan: Plan) -> None:
    """Raise an error if a plan has several ranks, blocks that are not contiguous, or rings."""
    sizes = {pool.index: pool.block_bytes for pool in checked_plan(plan).pools}
    refuse_rings(layer for region in plan.regions for layer in region.layers)
    in_one_piece = all(
        Layout(region.layout).block_outermost
        and region.block_stride == sizes[plan.groups[region.group].pool]
        for region in plan.regions
    )
    if (plan.tp, plan.pp, plan.dcp) != (1, 1, 1):
        problem = "The plan of a tier must have one rank"
        got = f"tp={plan.tp}, pp={plan.pp}, dcp={plan.dcp}"
        hint = "Make the tier's plan with tp=1, pp=1 and dcp=1"
        raise AtlasError(Code.BAD_PLAN, problem, got=got, hint=hint)
    for layer in plan.layers:
        plan.placement(layer)  # raises an error if the fields are stored apart
    if not in_one_piece:
        problem = "The plan of a tier must have contiguous blocks"
        hint = 'Make the plan with a layout that begins with B, such as layout="BLHNC"'
        raise AtlasError(Code.BAD_PLAN, problem, got=f"layout {plan.layout!r}", hint=hint)
