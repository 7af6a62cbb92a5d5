"""`Route`: the compiled copy from any plan to any plan of the same model.

A route maps, for every pair of ranks, bytes of the source to bytes of the destination. It holds
no memory and no block ids. `bind` takes block ids and returns byte ranges.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s, join_ranges
from kvatlas.planning import Plan
from kvatlas.planning.plans import checked_plan
from kvatlas.routing.binding import (
    CompiledPair,
)
from kvatlas.routing.block_tables import Blocks, RequestTables, checked_rank
from kvatlas.routing.bound_route import BoundRoute, bind_copies
from kvatlas.routing.compatibility import reasons, refuse
from kvatlas.routing.compiled_route import CompiledRoute
from kvatlas.routing.compiler import Compiler
from kvatlas.routing.conversion import Conversion, Scales, conversion_between, refuse_rescaling
from kvatlas.routing.plan_ends import PlanEnd, padding_between
from kvatlas.routing.request import RequestEnds
from kvatlas.routing.token_ranges import shared_visibility
from kvatlas.routing.unused_bytes import UnusedBytesOfBlocks, UnusedRuns, no_unused_runs

if TYPE_CHECKING:
    from kvatlas.routing.converted_stream import ConvertedStream
    from kvatlas.routing.converting_compiler import ConvertingCompiler
    from kvatlas.routing.prepared import Base, PreparedRoute
    from kvatlas.routing.streams import Stream


class Route:
    """The copy from one plan to another.

    >>> from kvatlas.planning import plan
    >>> prefill = plan("Qwen3-8B", memory="4GiB", tp=2, layout="LBNHC", max_len=512)
    >>> decode = plan("Qwen3-8B", memory="8GiB", layout="BLHNC", block_size=32, max_len=512)
    >>> way = route(prefill, decode)
    >>> way  # doctest: +NORMALIZE_WHITESPACE
    <Route of Qwen3-8B, 36 layers: tp 2, pp 1, LBNHC, blocks of 16
    -> tp 1, pp 1, BLHNC, blocks of 32>
    >>> way.sources(destination_rank=0)
    (0, 1)
    >>> blocks = {"source_blocks": [7, 4], "destination_blocks": [2]}
    >>> bound = way.bind(source_rank=1, destination_rank=0, **blocks, tokens=32)
    >>> len(bound), bound.nbytes
    (4608, 2359296)
    """

    def __init__(
        self,
        source: Plan,
        destination: Plan,
        *,
        layers: Iterable[str] | None = None,
        convert: str | None = None,
        source_scales: Scales = None,
        destination_scales: Scales = None,
        padding: bool = True,
    ) -> None:
        self.source, self.destination = checked_plan(source), checked_plan(destination)
        ends = PlanEnd(source), PlanEnd(destination)
        names = None if layers is None else frozenset(layers)
        refuse(reasons(*ends, layers=names, converting=convert is not None))
        self.layers = tuple(name for name in destination.layers if names is None or name in names)
        visibilities = {name: shared_visibility(source, destination, name) for name in self.layers}
        self.conversion: Conversion | None = None
        """The format changes of the route; None if nothing is converted."""
        self._converter: ConvertingCompiler | None = None
        scales = (source_scales, destination_scales)
        if convert is None:
            refuse_rescaling(ends[0].specs, ends[1].specs, self.layers, scales)
        else:
            from kvatlas.routing.converting_compiler import ConvertingCompiler

            self.conversion = conversion_between(*ends, self.layers, convert, scales)
            self._converter = ConvertingCompiler(*ends, visibilities, self.conversion)
        plain = padding and self._converter is None
        joined = padding_between(*ends, self.layers) if plain else {}
        self._compiler = self._converter or Compiler(*ends, visibilities, joined)
        self._arrivals = Compiler(ends[1], ends[1], visibilities, joined)
        self._unused = UnusedBytesOfBlocks(self._compiler) if plain else None
        """Finds the unused bytes to copy; None if the route copies none."""
        self._compiled = CompiledRoute()

    def __repr__(self) -> str:
        source, destination = (
            f"tp {plan.tp}, pp {plan.pp}, {plan.layout}, blocks of {plan.block_size}"
            for plan in (self.source, self.destination)
        )
        converting = f", {self.conversion.name}" if self.conversion else ""
        layers = f"{self.destination.model}, {len(self.layers)} layers"
        return f"<Route of {layers}: {source} -> {destination}{converting}>"

    def sources(self, destination_rank: int) -> tuple[int, ...]:
        """Return the source ranks from which a destination rank reads."""
        return self._compiler.sources(
            checked_rank(self.destination, destination_rank, "destination")
        )

    def compile(self, *, source_rank: int, destination_rank: int) -> int:
        """Compile the copy between two ranks before its first transfer.

        Return the number of compiled runs for one state. If the route converts, return the number
        of boxes instead.
        """
        source_rank = self._checked_source(source_rank, destination_rank)
        if self._converter is not None:
            return len(
                self._compiled.boxes(self._converter, source_rank, int(destination_rank), None)
            )
        pairs = self._pairs(self._compiler, source_rank, int(destination_rank), None)
        return sum(len(runs.starts.source) for pair in pairs for runs in pair.states)

    def bind(
        self,
        *,
        source_rank: int,
        destination_rank: int,
        source_blocks: Blocks,
        destination_blocks: Blocks,
        tokens: Any,
        layers: Iterable[str] | None = None,
    ) -> BoundRoute:
        """Return the byte ranges that copy a request's tokens from one rank to another.

        `source_blocks` and `destination_blocks` are the request's block ids in token order, by
        group. Entries that are not needed may have any value. A recurrent group takes either one
        id, or a table whose entry for the last token holds the state. `layers` restricts the copy
        to the named layers, for example to send layers as they are computed.
        """
        self._refuse_converting()
        request = self._request(
            source_rank, destination_rank, source_blocks, destination_blocks, tokens
        )
        pairs = self._pairs(self._compiler, request.source.rank, request.destination.rank, layers)
        return BoundRoute(
            request.source.rank, request.destination.rank, bind_copies(pairs, request)
        )

    def stream(
        self,
        *,
        source_rank: int,
        destination_rank: int,
        source_blocks: Blocks,
        destination_blocks: Blocks,
        tokens: Any,
        layers: Iterable[str] | None = None,
    ) -> Stream:
        """Return a stream of the bytes that `bind` copies; its runs are computed piece by piece.

        Memory use does not grow with the number of tokens. Both ends of a transfer derive the
        same stream from the same arguments.

        >>> from kvatlas.planning import plan
        >>> orders = ("LBNHC", "BHLNC")
        >>> ends = [plan("Qwen3-8B", memory="200GiB", layout=o, max_len=1 << 20) for o in orders]
        >>> blocks = dict.fromkeys(("source_blocks", "destination_blocks"), range(65536))
        >>> long = route(*ends).stream(
        ...     source_rank=0, destination_rank=0, **blocks, tokens=1 << 20
        ... )
        >>> long.nbytes >> 30, long.runs
        (144, 301989888)
        >>> sum(map(len, long.copies(100 << 30, (100 << 30) + (4 << 20))))
        8192
        """
        from kvatlas.routing.streams import Stream

        self._refuse_converting()
        request = self._request(
            source_rank, destination_rank, source_blocks, destination_blocks, tokens
        )
        pairs = self._pairs(self._compiler, request.source.rank, request.destination.rank, layers)
        return Stream(pairs, request)

    def converted(
        self,
        *,
        source_rank: int,
        destination_rank: int,
        source_blocks: Blocks,
        destination_blocks: Blocks,
        tokens: Any,
        layers: Iterable[str] | None = None,
    ) -> ConvertedStream:
        """Return the converted bytes of a request as a stream, for a route with `convert=`.

        >>> from kvatlas.planning import plan
        >>> ends = (plan("Qwen3-8B", memory="8GiB", kv_dtype=d) for d in ("fp8", "bf16"))
        >>> way = route(*ends, convert="fp8->bf16", source_scales=0.5)
        >>> blocks = {"source_blocks": [7], "destination_blocks": [2]}
        >>> way.converted(source_rank=0, destination_rank=0, **blocks, tokens=16)
        <ConvertedStream of 1,179,648 bytes that arrive as 2,359,296>
        """
        if self._converter is None:
            problem = "Route.converted needs a route with a conversion"
            hint = "Use Route.stream, or pass convert= to route()"
            raise AtlasError(Code.BAD_CONVERSION, problem, got=self, hint=hint)
        request = self._request(
            source_rank, destination_rank, source_blocks, destination_blocks, tokens
        )
        names = self._checked_layers(layers)
        boxes = self._compiled.boxes(
            self._converter, request.source.rank, request.destination.rank, names
        )
        from kvatlas.routing.converted_stream import ConvertedStream

        casts = partial(self._compiled.cast_patterns, self._converter, request, names)
        return ConvertedStream(boxes, request, casts)

    def by_element(self, *, source_rank: Any, destination_rank: Any) -> bool:
        """Return whether elements can be converted one by one; True if nothing is converted."""
        if self._converter is None:
            return True
        boxes = self._compiled.boxes(self._converter, int(source_rank), int(destination_rank), None)
        return all(box.by_element for box in boxes)

    def needs(
        self,
        *,
        destination_rank: int,
        destination_blocks: Blocks,
        tokens: Any,
        layers: Iterable[str] | None = None,
    ) -> dict[int, tuple[Int64s, Int64s]]:
        """Return (starts, lengths) of all bytes that must arrive at a destination rank, by pool.

        These bytes include the padding that the route copies.

        The result depends only on the two plans, so a receiver can compare it with the bytes that
        arrived: a block is ready when all its bytes have arrived. A layer with a window needs all
        tokens if both plans keep all tokens of the layer. Otherwise it needs the tokens to which
        the next token attends, according to the destination's spec (see `needed_states`). Earlier
        blocks are not written, and no later token attends to them.
        """
        copies = bind_copies(*self._arriving(destination_rank, destination_blocks, tokens, layers))
        return {
            copy.destination_pool: join_ranges(copy.destination, copy.length) for copy in copies
        }

    def needed_bytes(
        self,
        *,
        destination_rank: int,
        destination_blocks: Blocks,
        tokens: Any,
        layers: Iterable[str] | None = None,
    ) -> int:
        """Return the total number of bytes that `needs` lists, without listing them."""
        from kvatlas.routing.streams import Stream

        return Stream(*self._arriving(destination_rank, destination_blocks, tokens, layers)).nbytes

    def filled_blocks(
        self,
        *,
        destination_rank: int,
        destination_blocks: Blocks,
        tokens: Any,
        layers: Iterable[str] | None = None,
    ) -> dict[int, Int64s]:
        """Return the indices of the block table entries that a request fills, by group.

        >>> from kvatlas.planning import plan
        >>> ends = [plan("Qwen3-8B", memory="1GiB", max_len=512, layout=o) for o in ("NHD", "HND")]
        >>> way = route(*ends)
        >>> way.filled_blocks(destination_rank=0, destination_blocks=[7, 4, 9, 8], tokens=(16, 40))
        {0: array([1, 2])}
        """
        pairs, arriving = self._arriving(destination_rank, destination_blocks, tokens, layers)
        for compiled in pairs:
            arriving.states(compiled.pair)
        arriving.check_distinct()
        return arriving.destination.used_entries()

    def prepare(
        self,
        *,
        source_rank: int,
        destination_rank: int,
        source_base: Base = 0,
        destination_base: Base = 0,
        source_device: int = 0,
        destination_device: int = 0,
        layers: Iterable[str] | None = None,
    ) -> PreparedRoute:
        """Return descriptors of all blocks of two ranks, for transports that register them."""
        from kvatlas.routing.prepared import PreparedRoute, RankMemory

        self._refuse_converting()
        source_rank = self._checked_source(source_rank, destination_rank)
        chosen = source_rank, int(destination_rank), self._checked_layers(layers)
        return PreparedRoute(
            self._compiler.strips(*chosen),
            self._unused_runs(self._compiler)(*chosen),
            RankMemory(self.source, source_rank, source_base, source_device),
            RankMemory(
                self.destination, int(destination_rank), destination_base, destination_device
            ),
        )

    # -- internals --------------------------------------------------------------------

    def _request(
        self,
        source_rank: int,
        destination_rank: int,
        source_blocks: Blocks,
        destination_blocks: Blocks,
        tokens: Any,
    ) -> RequestEnds:
        source_rank = self._checked_source(source_rank, destination_rank)
        return RequestEnds(
            RequestTables(self.source, source_rank, source_blocks, "source"),
            RequestTables(
                self.destination, int(destination_rank), destination_blocks, "destination"
            ),
            tokens,
        )

    def _arriving(
        self,
        destination_rank: int,
        destination_blocks: Blocks,
        tokens: Any,
        layers: Iterable[str] | None,
    ) -> tuple[list[CompiledPair], RequestEnds]:
        """Return the runs and tables of a copy from the destination rank to itself.

        The bytes of this copy are the bytes that must arrive at the rank.
        """
        rank = checked_rank(self.destination, destination_rank, "destination")
        tables = RequestTables(self.destination, rank, destination_blocks, "destination")
        request = RequestEnds(tables, tables, tokens)
        return self._pairs(self._arrivals, rank, rank, layers), request

    def _pairs(
        self,
        compiler: Compiler,
        source_rank: int,
        destination_rank: int,
        layers: Iterable[str] | None,
    ) -> list[CompiledPair]:
        names = self._checked_layers(layers)
        return self._compiled.pairs(
            compiler, source_rank, destination_rank, names, self._unused_runs(compiler)
        )

    def _unused_runs(self, compiler: Compiler) -> UnusedRuns:
        if self._unused is None:
            return no_unused_runs
        if compiler is self._arrivals:
            return partial(self._unused.arriving, compiler)
        return self._unused.copied

    def _refuse_converting(self) -> None:
        """Raise an error if the route converts: source and destination bytes then differ."""
        if self.conversion is not None:
            problem = "A converting route cannot copy bytes unchanged"
            got, hint = f"convert={self.conversion.name!r}", "Use Route.converted"
            raise AtlasError(Code.BAD_CONVERSION, problem, got=got, hint=hint)

    def _checked_source(self, source_rank: int, destination_rank: int) -> int:
        source_rank = checked_rank(self.source, source_rank, "source")
        sources = self.sources(destination_rank)
        if source_rank not in sources:
            raise AtlasError(
                Code.NOT_A_SOURCE,
                f"Destination rank {destination_rank} does not read from this source rank",
                got=f"source_rank={source_rank}",
                hint=f"Pass one of the ranks of Route.sources({destination_rank}): {list(sources)}",
            )
        return source_rank

    def _checked_layers(self, layers: Iterable[str] | None) -> frozenset[str] | None:
        names = None if layers is None else frozenset(layers)
        unknown = sorted(map(str, names - set(self.layers))) if names else []
        if unknown:
            problem = "The route does not contain this layer"
            some = ", ".join(self.layers[:2])
            hint = f"Use one of the route's {len(self.layers)} layers: {some}, ..."
            raise AtlasError(Code.UNKNOWN_LAYER, problem, got=repr(unknown[0]), hint=hint)
        return names


def route(
    source: Plan,
    destination: Plan,
    *,
    layers: Iterable[str] | None = None,
    convert: str | None = None,
    source_scales: Scales = None,
    destination_scales: Scales = None,
    padding: bool = True,
) -> Route:
    """Compile the route from one plan to another; raise an error if they are incompatible.

    Compatibility depends on what the layers store, not on the model's name. `layers` restricts the
    route to the named layers. `convert` names the conversions between different formats, for
    example "fp8->bf16". To convert from fp8 or nvfp4, pass the source's per-tensor scales as
    `source_scales`; to convert to fp8 or nvfp4, pass the destination's scales as
    `destination_scales`. A layer that has the same format at both ends is copied unchanged, so its
    source scales and destination scales must be equal if both are given.

    Padding is copied in two cases, in which runs would be split without it. The padding after a row
    is copied if both plans declare it. The unused bytes of a block are copied if the block is
    copied whole and both plans store the pages of its group at the same offsets in a block. Two
    equal plans thus need only one run for contiguous blocks. All byte counts include this padding.
    Pass `padding=False` to skip it, for example to store only content.
    """
    return Route(
        source,
        destination,
        layers=layers,
        convert=convert,
        source_scales=source_scales,
        destination_scales=destination_scales,
        padding=padding,
    )
