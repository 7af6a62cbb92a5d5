"""`Route`: the compiled copy from any plan to any plan of the same model.

A route knows, for every pair of ranks, which bytes of the one are which bytes of the
other. It holds no memory and no block ids; `bind` takes those and gives byte ranges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s, join_ranges
from kvatlas.planning import Plan
from kvatlas.routing.binding import Copy, Runs, Sheet, joined, ranges, sheet_of
from kvatlas.routing.block_tables import Blocks, End, checked_rank
from kvatlas.routing.compatibility import reasons, refuse
from kvatlas.routing.compiler import Compiler
from kvatlas.routing.costs import Costs, Report, report
from kvatlas.routing.feasibility import Check, check
from kvatlas.routing.plan_ends import Side
from kvatlas.routing.prepared import Base, Place, Prepared
from kvatlas.routing.request import Request
from kvatlas.routing.token_ranges import reach_of

_SHEETS = 4096
"""Pairs of ranks, and choices of layers, that a route keeps compiled; the oldest go first."""


@dataclass(frozen=True, eq=False)
class Bound:
    """A route bound to block ids and tokens: byte ranges, ready for a transport."""

    src_rank: int
    dst_rank: int
    copies: tuple[Copy, ...]

    def __len__(self) -> int:
        return sum(map(len, self.copies))

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return sum(copy.nbytes for copy in self.copies)

    def report(self, costs: Costs | None = None) -> Report:
        """How many descriptors, how long they are, and whether staging them would be faster."""
        return report(self.copies, costs)


class Route:
    """The copy from one plan to another.

    >>> from kvatlas.planning import plan
    >>> prefill = plan("Qwen3-8B", memory="4GiB", tp=2, layout="LBNHC", max_len=512)
    >>> decode = plan("Qwen3-8B", memory="8GiB", layout="BLHNC", block_size=32, max_len=512)
    >>> way = route(prefill, decode)
    >>> way.sources(dst_rank=0)
    (0, 1)
    >>> bound = way.bind(src_rank=1, dst_rank=0, src_blocks=[7, 4], dst_blocks=[2], tokens=32)
    >>> len(bound), bound.nbytes
    (4608, 2359296)
    """

    def __init__(
        self, src: Plan, dst: Plan, *, layers: Collection[str] | None = None, renamed: bool = False
    ) -> None:
        for end in (src, dst):
            if not isinstance(end, Plan):
                raise AtlasError(
                    Code.BAD_PLAN,
                    "Routes go from plan to plan",
                    got=type(end).__name__,
                    hint="Make both with kvatlas.planning, or describe memory with plan.foreign",
                )
        self.src, self.dst = src, dst
        ends = Side(src), Side(dst)
        refuse(reasons(*ends, renamed=renamed, layers=layers))
        self.layers = tuple(name for name in dst.layers if layers is None or name in layers)
        groups = [(src.groups[ends[0].group(n)], dst.groups[ends[1].group(n)]) for n in self.layers]
        reaches = {n: reach_of(*pair) for n, pair in zip(self.layers, groups, strict=True)}
        self._compiler = Compiler(*ends, reaches)
        self._echo = Compiler(ends[1], ends[1], reaches)
        self._sheets: dict[tuple[object, ...], list[Sheet]] = {}

    def __repr__(self) -> str:
        return f"<Route from {self.src} to {self.dst}>"

    def sources(self, dst_rank: int) -> tuple[int, ...]:
        """The source ranks that a destination rank reads; each byte from one of them."""
        return self._compiler.sources(checked_rank(self.dst, dst_rank, "destination"))

    def compile(self, *, src_rank: int, dst_rank: int) -> int:
        """Compile one pair of ranks ahead of its first transfer; how many strips it has."""
        src_rank = self._source(src_rank, dst_rank)
        sheets = self._sheets_of(self._compiler, src_rank, int(dst_rank), None)
        return sum(len(family.rows[0]) for sheet in sheets for family in sheet.states)

    def bind(
        self,
        *,
        src_rank: int,
        dst_rank: int,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        tokens: Any,
        layers: Collection[str] | None = None,
    ) -> Bound:
        """Byte ranges that carry a request's tokens from one rank to another.

        Blocks are those of the request in the order of its tokens, for each group;
        entries that are not needed may hold anything. A group of recurrent layers has
        either one id, or a table in which the entry of the last token has the state.
        `layers` moves some layers alone, to stream them as they are computed.
        """
        src_rank = self._source(src_rank, dst_rank)
        request = Request(
            End(self.src, src_rank, src_blocks, "source"),
            End(self.dst, int(dst_rank), dst_blocks, "destination"),
            tokens,
        )
        copies = self._copies(self._compiler, request, layers)
        return Bound(src_rank, int(dst_rank), copies)

    def needs(
        self,
        *,
        dst_rank: int,
        dst_blocks: Blocks,
        tokens: Any,
        layers: Collection[str] | None = None,
    ) -> dict[int, tuple[Int64s, Int64s]]:
        """Every byte that must arrive at a destination rank: starts and lengths by pool.

        It follows from the destination's plan alone, so that what has arrived can be held
        against it: a block is ready when all of its bytes are.
        """
        rank = checked_rank(self.dst, dst_rank, "destination")
        end = End(self.dst, rank, dst_blocks, "destination")
        copies = self._copies(self._echo, Request(end, end, tokens), layers)
        return {copy.dst_pool: join_ranges(copy.dst, copy.length) for copy in copies}

    def prepare(
        self,
        *,
        src_rank: int,
        dst_rank: int,
        src_base: Base = 0,
        dst_base: Base = 0,
        src_device: int = 0,
        dst_device: int = 0,
        layers: Collection[str] | None = None,
    ) -> Prepared:
        """Descriptors of all blocks of two ranks, for transports that register them once."""
        src_rank = self._source(src_rank, dst_rank)
        lanes = self._compiler.lanes(src_rank, int(dst_rank), self._known(layers))
        return Prepared(
            lanes,
            Place(self.src, src_rank, src_base, src_device),
            Place(self.dst, int(dst_rank), dst_base, dst_device),
        )

    def check(self, *, tokens: int | None = None, costs: Costs | None = None) -> Check:
        """How many descriptors a request takes, for every pair of ranks, and how long they are."""
        return check(
            self.src, self.dst, tokens=tokens, layers=self.layers, renamed=True, costs=costs
        )

    # -- inside -----------------------------------------------------------------------

    def _copies(
        self, compiler: Compiler, request: Request, layers: Collection[str] | None
    ) -> tuple[Copy, ...]:
        sheets = self._sheets_of(compiler, request.src.rank, request.dst.rank, layers)
        placed = [(sheet, request.place(sheet.lane)) for sheet in sheets]
        request.refuse_twice()
        parts: dict[tuple[int, int], list[Runs]] = defaultdict(list)
        for sheet, place in placed:
            pools = (
                request.src.pool(sheet.lane.src_group),
                request.dst.pool(sheet.lane.dst_group),
            )
            parts[pools] += ranges(sheet, place)
        return joined(parts)

    def _sheets_of(
        self, compiler: Compiler, src_rank: int, dst_rank: int, layers: Collection[str] | None
    ) -> list[Sheet]:
        names = self._known(layers)
        key = (compiler is self._echo, src_rank, dst_rank, names)
        found = self._sheets.get(key)
        if found is None:
            lanes = compiler.lanes(src_rank, dst_rank, names)
            found = [sheet_of(lane, strips) for lane, strips in lanes.items()]
            self._sheets[key] = found
            for old in list(self._sheets)[:-_SHEETS]:
                self._sheets.pop(old, None)
        return found

    def _source(self, src_rank: int, dst_rank: int) -> int:
        src_rank = checked_rank(self.src, src_rank, "source")
        sources = self.sources(dst_rank)
        if src_rank not in sources:
            raise AtlasError(
                Code.NOT_A_SOURCE,
                f"Destination rank {dst_rank} reads from ranks {sources}",
                got=f"source rank {src_rank}",
                hint="Ask Route.sources for the ranks to read",
            )
        return src_rank

    def _known(self, layers: Collection[str] | None) -> frozenset[str] | None:
        if layers is None:
            return None
        for name in layers:
            if name not in self.layers:
                self.dst.region_of(name)
                raise AtlasError(
                    Code.UNKNOWN_LAYER,
                    "A layer is one that the route moves",
                    got=repr(name),
                    hint=f"It moves {len(self.layers)} layers",
                )
        return frozenset(layers)


def route(
    src: Plan, dst: Plan, *, layers: Collection[str] | None = None, renamed: bool = False
) -> Route:
    """The route from one plan to another, or a coded refusal where they are unlike.

    `layers` routes some layers alone; `renamed` accepts two names for one model.
    """
    return Route(src, dst, layers=layers, renamed=renamed)
