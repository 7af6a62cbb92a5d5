"""The check that all tests of converting routes share: every number, and no byte more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.copying import copy_request
from kvatlas.planning import Plan
from kvatlas.routing import Copy, Route, route
from kvatlas.routing.conversion import row_error, spell_conversion, unlike_formats
from kvatlas.specs import CellFormat, Recurrent, Spec, content_formats
from kvatlas.specs.cell_formats import ElementCast, needs_scales
from tests.routing import conversion_oracle as formats
from tests.routing import oracle
from tests.routing.oracle import Memory, Move

Content = dict[tuple[str, str], NDArray[np.uint8]]
"""Every element of a field of the whole model, in the oracle's order, by layer and field."""

SCALES = {"fp8": (0.0314159, 0.0527183), "fp8_e5m2": (0.0229, 0.0331), "nvfp4": (0.0286, 0.041)}
"""Of whole tensors: rows are normal, so that nothing saturates, and few numbers are ties."""


def scales_of(plan: Plan) -> dict[str, tuple[float, float]] | None:
    """A plan's scales by layer, unlike from layer to layer; None where no format wants any.

    They depend on a layer's name, so that layers which are copied have equal scales at both ends.
    """
    found = {}
    for place, name in enumerate(sorted(plan.layers)):
        if needs_scales(plan.spec(name)):
            k, v = SCALES[content_formats(plan.spec(name))["rows"]]
            found[name] = k * 1.37 ** (place % 2), v * 1.19 ** (place % 3)
    return found or None


def scale_of(plan: Plan, layer: str) -> tuple[float, float]:
    return (scales_of(plan) or {}).get(layer, (1.0, 1.0))


def conversion_of(src: Plan, dst: Plan) -> str:
    """The name of what lies between two plans."""
    pairs = [unlike_formats(src.spec(name), dst.spec(name)) for name in src.layers]
    unlike = [src.spec(name) != dst.spec(name) for name in src.layers]
    found = {
        pair for own, differ in zip(pairs, unlike, strict=True) if differ for pair in own.values()
    }
    return spell_conversion({pair for pair in found if pair[0] != pair[1]})


def converting_route(src: Plan, dst: Plan) -> Route:
    return route(
        src, dst, convert=conversion_of(src, dst),
        source_scales=scales_of(src), destination_scales=scales_of(dst),
    )  # fmt: skip


def drawn_rows(spec: Spec, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """Rows of every part of a layer's content, as models make them."""
    found: dict[str, Any] = {}
    for field in CellFormat(spec).page.fields:
        sizes = field.shape
        if isinstance(spec, Recurrent):
            order = [sizes[name] for name in sorted(sizes)]
            found[field.name] = rng.standard_normal((count, *order))
    if found:
        return found
    one: Any = spec
    if hasattr(spec, "heads"):
        shape = (count, one.heads)
        dims = {"k": one.head_dim, "v": one.v_dim or one.head_dim}
        return {side: rng.standard_normal((*shape, dim)) for side, dim in dims.items()}
    if hasattr(spec, "latent"):
        dims = {"latent": one.latent, "rope": one.rope}
        return {part: rng.standard_normal((count, dim)) for part, dim in dims.items()}
    width = getattr(spec, "width", None) or one.head_dim
    return {"state" if hasattr(spec, "width") else "index": rng.standard_normal((count, width))}


def stored(spec: Spec, rows: dict[str, Any], scales: tuple[float, float], before: str) -> Any:
    """Fields of rows, by name, with their elements in the oracle's order."""
    if isinstance(spec, Recurrent):
        return {name: formats.store(data, _dtype(spec, name)) for name, data in rows.items()}
    made = formats.encode(spec, rows, scales, before)
    # The oracle numbers elements before heads.
    return {name: np.moveaxis(data, -2, 1) for name, data in made.items()}


def loaded(spec: Spec, fields: Mapping[str, Any], scales: tuple[float, float]) -> dict[str, Any]:
    if isinstance(spec, Recurrent):
        return {name: formats.load(data, _dtype(spec, name)) for name, data in fields.items()}
    return formats.decode(
        spec, {name: np.moveaxis(data, 1, -2) for name, data in fields.items()}, scales
    )


def _dtype(spec: Spec, field: str) -> str:
    return content_formats(spec)[field]


def fill_sources(move: Move, rng: np.random.Generator) -> tuple[dict[int, Memory], dict[str, Any]]:
    """Each source rank's memory, and the numbers of every layer as the source keeps them."""
    content: Content = {}
    numbers: dict[str, Any] = {}
    for layer in move.source.layers:
        spec, scales = move.source.spec(layer), scale_of(move.source, layer)
        states = oracle.states(move, layer)
        rows = drawn_rows(spec, states.stop, rng)
        before = next(iter(content_formats(spec).values()))
        fields = stored(spec, rows, scales, before)
        content |= {(layer, name): data for name, data in fields.items()}
        numbers[layer] = loaded(spec, fields, scales)
    memories = {}
    for rank in oracle.ranks(move.source):
        memory = memories[rank] = Memory(move.source, rank, rng)
        for held in oracle.held(move, "source", rank, padding=False):
            data = content[held.layer, held.field]
            held.write(memory.pools[held.pool], data.reshape(-1, held.item)[held.number])
    return memories, numbers


def assert_converts(move: Move, *, seed: int = 0) -> None:
    """Carry a move out in this process and compare every number with the oracle's."""
    rng = np.random.default_rng(seed)
    sources, numbers = fill_sources(move, rng)
    before, after = carry_out(move, sources, rng)
    assert_converted(move, numbers, before, after)


def carry_out(
    move: Move, sources: dict[int, Memory], rng: np.random.Generator
) -> tuple[dict[int, Memory], dict[int, Memory]]:
    """The destination's memory before and after a move."""
    made = converting_route(move.source, move.destination)
    before = {rank: Memory(move.destination, rank, rng) for rank in oracle.ranks(move.destination)}
    after = {rank: memory.copy() for rank, memory in before.items()}
    pools = [{rank: one.pools for rank, one in side.items()} for side in (sources, after)]
    moved = copy_request(
        made,
        *pools,
        source_blocks=move.source_blocks,
        destination_blocks=move.destination_blocks,
        tokens=move.tokens,
    )
    needed = [
        made.needed_bytes(
            destination_rank=rank, destination_blocks=move.destination_blocks, tokens=move.tokens
        )
        for rank in oracle.ranks(move.destination)
    ]
    assert moved == sum(needed)
    by_runs = {rank: memory.copy() for rank, memory in before.items()}
    if cast_in_runs(made, move, sources, by_runs):
        for rank, memory in by_runs.items():
            memory.assert_equal(after[rank], f"destination rank {rank}, cast in runs")
    return before, after


def cast_in_runs(
    made: Route, move: Move, sources: dict[int, Memory], targets: dict[int, Memory]
) -> bool:
    """Carry a move out as what copies and casts does; False where elements share scales."""
    tables: dict[str, Any] = {
        "source_blocks": move.source_blocks,
        "destination_blocks": move.destination_blocks,
    }
    for dst, target in targets.items():
        for src in made.sources(dst):
            stream = made.converted(
                source_rank=src, destination_rank=dst, tokens=move.tokens, **tables
            )
            grids = stream.grids()
            ways = {change.way for change in made.conversion.changes} if made.conversion else set()
            if grids is None:
                assert "rows" in ways
                return False
            assert sum(grid.nbytes for grid in grids) == stream.arriving
            for grid in grids:
                _cast_grid(grid, sources[src].pools, target.pools)
    return True


def _cast_grid(grid: Copy, src: Mapping[int, Any], dst: Mapping[int, Any]) -> None:
    count = np.tile(grid.length, len(grid.starts.source))
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    at, to = (
        np.repeat(np.add.outer(starts, spans).reshape(-1), count) + nth
        for starts, spans in (
            (grid.starts.source, grid.source),
            (grid.starts.destination, grid.destination),
        )
    )
    if grid.cast is None:
        dst[grid.destination_pool][to] = src[grid.source_pool][at]
        return
    items = [np.arange(item) for item in grid.cast.items]
    which = (
        np.zeros(len(grid.starts.source), int) if grid.starts.scales is None else grid.starts.scales
    )
    scales = np.repeat(np.repeat(which, len(grid.length)), count)
    data = src[grid.source_pool][at[:, None] * len(items[0]) + items[0]]
    made = cast_elements(data, grid.cast, scales)
    dst[grid.destination_pool][to[:, None] * len(items[1]) + items[1]] = made


def cast_elements(data: Any, cast: ElementCast, scales: Any) -> Any:
    """Elements [n, bytes] of one type as those of another, rounded where codecs round.

    `scales` says which of the cast's each has.
    """
    values = formats.load(data, cast.source.name).astype(np.float32)
    factors, divisors = np.array(cast.scales, dtype=np.float32).T
    exact = values * factors[scales] / divisors[scales]
    return formats.store(exact.astype(np.float64), cast.target.name)


def assert_converted(
    move: Move, numbers: dict[str, Any], before: dict[int, Memory], after: dict[int, Memory]
) -> dict[str, Any]:
    """Every number of every destination rank is the oracle's, and nothing else has changed.

    Gives the numbers of all layers as the destination keeps them.
    """
    covered: dict[tuple[str, str], Any] = {}
    found: dict[str, Any] = {}
    for rank in oracle.ranks(move.destination):
        fields: dict[str, dict[str, Any]] = {}
        left = after[rank].copy()
        for held in oracle.held(move, "destination", rank, padding=False):
            at = held.address[:, None] + np.arange(held.item)
            key = held.layer, held.field
            marks, seen = fields.setdefault(held.layer, {}).setdefault(
                held.field, _blank(move, *key)
            )
            marks[held.number], seen[held.number] = after[rank].pools[held.pool][at], True
            covered[key] = covered.get(key, False) | seen
            # What has arrived is taken back out: all else must be as it was.
            left.pools[held.pool][at] = before[rank].pools[held.pool][at]
        left.assert_equal(before[rank], f"destination rank {rank}")
        for layer, own in fields.items():
            expected = found.get(layer)
            found[layer] = _compare(move, layer, own, numbers[layer], expected)
    for (layer, field), seen in covered.items():
        states = oracle.states(move, layer)
        arrived = seen.reshape(states.stop, -1)[states.start :]
        assert arrived.all(), f"all of {field} of {layer} arrives"
    return {
        layer: loaded(move.destination.spec(layer), fields, scale_of(move.destination, layer))
        for layer, fields in found.items()
    }


def _blank(move: Move, layer: str, field: str) -> tuple[Any, Any]:
    found = CellFormat(move.destination.spec(layer)).page.field(field)
    count = oracle.states(move, layer).stop
    for name, size in found.shape.items():
        count *= 1 if name == "N" else size
    return np.zeros((count, found.dtype.item), np.uint8), np.zeros(count, bool)


def _compare(
    move: Move, layer: str, own: dict[str, Any], numbers: dict[str, Any], other_ranks: Any
) -> dict[str, Any]:
    """One rank's part of a layer held against the oracle; all ranks' fields so far."""
    src, dst = move.source.spec(layer), move.destination.spec(layer)
    scales = scale_of(move.destination, layer)
    expected = stored(dst, numbers, scales, next(iter(content_formats(src).values())))
    whole = {name: data.copy() for name, data in expected.items()}
    joined = whole if other_ranks is None else other_ranks
    for name, (marks, seen) in own.items():
        for fields in (whole, joined):
            fields[name] = np.ascontiguousarray(fields[name])
            fields[name].reshape(-1, fields[name].shape[-1])[seen] = marks[seen]
    found, right = (loaded(dst, fields, scales) for fields in (whole, expected))
    for part, values in found.items():
        pair = _pair(src, dst, part)
        what = f"{part} of {layer}, {spell_conversion([pair])}"
        assert_close(values, right[part], numbers[part], pair, what)
    return joined


def _pair(src: Spec, dst: Spec, part: str) -> tuple[str, str]:
    one, two = content_formats(src), content_formats(dst)
    return (one[part], two[part]) if part in one else (one["rows"], two["rows"])


def assert_close(found: Any, right: Any, source: Any, pair: tuple[str, str], what: str) -> None:
    """Equal to the oracle but for ties, which are no worse; and within the stated bound."""
    assert np.isfinite(found).all()
    largest = np.abs(right).max(-1, keepdims=True)
    off = (np.abs(found - right) > 1e-5 * largest).any(-1)
    assert not off.any() or pair[0] != pair[1]
    norm, error, least = (
        np.sqrt((values**2).sum(-1)) for values in (source, found - source, right - source)
    )
    worse = off & (error > 1.02 * least + 1e-4 * norm)
    assert not worse.any(), f"{what}: {worse.mean():.4f} of {off.mean():.4f} rows are worse"
    bound = row_error(*pair).outliers or 1e-6
    assert (error <= bound * norm + 1e-9).all(), f"{what}: {(error / norm).max()} > {bound}"
