"""Brute force: what a transfer must leave in memory, element by element.

Nothing here knows of routes, runs or folding. Every element of every field of the whole
model has a number, found from its state, its row of the cut axis and its other coordinates;
every byte of it has a value, found from that number. A rank's memory is walked one element
at a time (as long arrays of coordinates, where speed asks for it), and each address is what
`page.view(placement, field)` says of the coordinate.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry import Field, Placement
from kvatlas.planning import Plan
from kvatlas.specs import Ring

Tables = dict[int, list[int]]
"""Block ids of a request by group."""
Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

Side = Literal["source", "destination"]

GUARD = 48
_WINDOWS = ("sliding_window", "sliding_window_mla")


@dataclass(frozen=True)
class Move:
    """One request on its way: between which plans, in which blocks, and what of it."""

    source: Plan
    destination: Plan
    source_blocks: Tables
    destination_blocks: Tables
    tokens: tuple[int, int]
    layers: tuple[str, ...] | None = None

    def plan(self, side: Side) -> Plan:
        return self.source if side == "source" else self.destination

    def blocks(self, side: Side) -> Tables:
        return self.source_blocks if side == "source" else self.destination_blocks

    def only(self, *layers: str) -> Move:
        return replace(self, layers=layers)

    def between(self, start: int, stop: int) -> Move:
        return replace(self, tokens=(start, stop))


class Memory:
    """A rank's pools by index, each with guard bytes on both sides."""

    def __init__(self, plan: Plan, rank: int, rng: np.random.Generator) -> None:
        stage = rank // plan.tp
        self.whole: dict[int, Bytes] = {
            pool.index: _random(pool.nbytes + 2 * GUARD, rng)
            for pool in plan.pools
            if pool.stage == stage
        }
        self.pools: dict[int, Bytes] = {i: b[GUARD:-GUARD] for i, b in self.whole.items()}
        self.unused: dict[int, NDArray[np.bool_]] = {}
        """Bytes that may have any value: those of the request's blocks that nothing uses."""

    def copy(self) -> Memory:
        other = Memory.__new__(Memory)
        other.whole = {index: whole.copy() for index, whole in self.whole.items()}
        other.pools = {index: whole[GUARD:-GUARD] for index, whole in other.whole.items()}
        other.unused = dict(self.unused)
        return other

    def beside(self, index: int, found: Bytes) -> Bytes:
        """The pool that `found` must equal: bytes that may have any value are those of `found`."""
        if index not in self.unused:
            return self.pools[index]
        return np.where(self.unused[index], found, self.pools[index])

    def assert_equal(self, expected: Memory, what: str) -> None:
        """The same bytes everywhere, guard bytes included, except for `expected.unused`."""
        assert self.whole.keys() == expected.whole.keys()
        for index, whole in self.whole.items():
            differs = whole != expected.whole[index]
            if index in expected.unused:
                differs[GUARD:-GUARD] &= ~expected.unused[index]
            wrong = np.flatnonzero(differs) - GUARD
            assert not wrong.size, f"{what}: {wrong.size} bytes of pool {index}, {wrong[:8]}..."


def _random(size: int, rng: np.random.Generator) -> Bytes:
    words = rng.integers(0, 1 << 64, -(-size // 8), dtype=np.uint64)
    return words.view(np.uint8)[:size]


# -- which states move --------------------------------------------------------------------


def ranks(plan: Plan) -> range:
    return range(plan.tp * plan.pp)


def states(move: Move, layer: str) -> range:
    """Global states of a layer that move; of a recurrent layer its one state."""
    if move.layers is not None and layer not in move.layers:
        return range(0)
    start, stop = move.tokens
    region, slot = move.destination.region_of(layer)
    spec = region.layers[slot].spec
    groups = [
        plan.groups[plan.region_of(layer)[0].group] for plan in (move.source, move.destination)
    ]
    if groups[1].kind == "recurrent":
        return range(1 if stop > start else 0)
    if groups[1].kind == "cross_attention":
        return range(groups[1].source)
    if isinstance(spec, Ring):  # the group of the last token, complete or not
        return range(max(start, (stop - 1) // spec.group * spec.group), stop)
    for group in groups:
        if group.kind in _WINDOWS and group.window is not None:
            start = max(start, stop - (group.window - 1))
        if group.kind == "chunked_local_attention" and group.window is not None:
            start = max(start, stop // group.window * group.window)
    each = spec.tokens_per_state or 1
    return range(start // each, max(stop // each, start // each))


def place_of(plan: Plan, layer: str, part: int, state: Any, stop: int) -> tuple[Any, Any, Any]:
    """(rank among the context-parallel ones, entry of the block table, state in the block).

    The first is -1 where every rank keeps the state. States may be an array.
    """
    region, index = plan.region_of(layer, part)
    group = plan.groups[region.group]
    spec = region.layers[index].spec
    if isinstance(spec, Ring):
        return state * 0 - 1, state * 0, state % spec.rows
    if group.kind == "recurrent":
        return state * 0 - 1, state * 0 + (stop - 1) // group.block, state * 0
    each = region.layers[index].spec.tokens_per_state or 1
    states = group.block // each
    return state % plan.dcp, state // plan.dcp // states, state // plan.dcp % states


def entries(move: Move, side: Side, group: int) -> set[int]:
    """Entries of a group's table that any rank needs."""
    plan, needed = move.plan(side), set()
    for layer, part in homes(plan):
        if plan.region_of(layer, part)[0].group == group:
            moving = np.array(states(move, layer), dtype=np.int64)
            needed |= set(place_of(plan, layer, part, moving, move.tokens[1])[1].tolist())
    return needed


def homes(plan: Plan) -> list[tuple[str, int]]:
    """Every layer and part of a layer; parts may lie in groups of their own."""
    return [(layer, part) for layer in plan.layers for part in range(plan.parts(layer))]


# -- where they are -------------------------------------------------------------------------


@dataclass(frozen=True)
class Elements:
    """Elements of one field on one rank: where each lies, and its number in the model."""

    pool: int
    layer: str
    field: str
    item: int
    address: Ints
    number: Ints

    def bytes(self) -> tuple[Ints, Bytes]:
        """Every byte's address and value."""
        at = (self.address[:, None] + np.arange(self.item)).ravel()
        return at, values(self.layer, self.field, self.number, self.item).ravel()

    def write(self, pool: Bytes, marks: Bytes | None = None) -> None:
        """Write every element's bytes, or `marks`, to where the element lies."""
        if marks is None:
            marks = values(self.layer, self.field, self.number, self.item)
        self._elements(pool)[self.address] = (
            np.ascontiguousarray(marks).view(f"u{self.item}").ravel()
        )

    def mark(self, mask: NDArray[np.bool_]) -> None:
        """Set the mask of every element's bytes."""
        self._elements(mask)[self.address] = int.from_bytes(b"\1" * self.item)

    def _elements(self, pool: NDArray[Any]) -> NDArray[Any]:
        """One element for each byte that one can begin at."""
        assert int(self.address.min()) >= 0
        shape = (pool.size - self.item + 1,)
        return np.ndarray(shape, f"u{self.item}", pool, strides=(1,))


def values(layer: str, field: str, numbers: Ints, item: int = 1) -> Bytes:
    """`item` bytes for each element of a field, by a hash that mixes every bit of its number."""
    mixed = numbers.astype(np.uint64) + np.uint64(zlib.crc32(f"{layer}/{field}".encode()) << 31)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return mixed.view(np.uint8).reshape(-1, 8)[:, :item]


def moving_padding(move: Move, layer: str) -> set[str]:
    """Padding that moves like a field: both ends declare it in their pages, for each row."""
    ends = []
    for plan in (move.source, move.destination):
        fields = [field for field in plan.page(layer).fields if field.padding]
        fields = [] if plan.region_of(layer)[0].apart else fields  # a plan of fields has no padding
        ends.append({(field.name, *sorted(_global_sizes(field).items())) for field in fields})
    return {str(name) for name, *_ in ends[0] & ends[1]}


def held(
    move: Move,
    side: Side,
    rank: int,
    chosen: Mapping[str, Ints] | None = None,
    *,
    padding: bool = True,
) -> Iterator[Elements]:
    """Every element that moves and that a rank of one side keeps; of `chosen` states alone.

    Padding that both ends declare moves with the rows that it follows, unless `padding` is false.
    """
    plan = move.plan(side)
    stage, tp_rank = divmod(rank, plan.tp)
    for layer, part in homes(plan):
        region, _ = plan.region_of(layer, part)
        wanted = states(move, layer) if chosen is None else chosen.get(layer, ())
        moving = np.array(wanted, dtype=np.int64)
        if region.stage != stage or not len(moving):
            continue
        table = np.array(move.blocks(side)[region.group])
        owner, entry, within = place_of(plan, layer, part, moving, move.tokens[1])
        kept = (owner == -1) | (owner == tp_rank % plan.dcp)
        if kept.any():
            # A recurrent group's table may be its one block alone.
            entry = np.where((owner < 0) & (len(table) == 1), 0, entry)[kept]
            where = (moving[kept], table[entry], within[kept])
            also = moving_padding(move, layer) if padding else set()
            yield from _fields(plan, layer, part, tp_rank, *where, also=also)


def _fields(
    plan: Plan,
    layer: str,
    part: int,
    tp_rank: int,
    states: Ints,
    blocks: Ints,
    within: Ints,
    *,
    also: Container[str],
) -> Iterator[Elements]:
    """Elements of states that lie in these blocks, so many states into each.

    The padding named in `also` counts as a field.
    """
    page = plan.page(layer, tp_rank, part)
    region, _ = plan.region_of(layer, part)
    pool = plan.groups[region.group].pool
    for field in page.fields:
        if field.padding and field.name not in also:
            continue
        view = _view(plan, layer, field.name, part)
        first = dict.fromkeys(view.axes, 0)
        at: dict[str, Any] = {"B": blocks}
        if "N" in view.axes:
            at["N"] = within % view.size("N")
        if "k" in view.axes:
            at["k"] = within // (view.size("N") if "N" in view.axes else page.states)
        # Where each state begins, and how far on from there the coordinates of each axis are.
        other = [axis for axis in field.axes if axis.name != "N"]
        address = np.asarray(view(**{**first, **at}))
        local: dict[str, Any] = {}
        sizes = [(axis.name, axis.size) for axis in other]
        if region.apart:  # tiles are those of the placement, not those of the page
            sizes = [(a, view.size(a)) for a in view.axes if a not in "BkN"]
        for place, (name, size) in enumerate(sizes):
            shape = tuple(-1 if n == place else 1 for n in range(len(sizes)))
            local[name] = np.arange(size).reshape(shape)
            if name in view.axes:
                steps = view(**{**first, name: np.arange(size)}) - view(**first)
                address = address[..., None] + steps
            else:
                address = np.repeat(address[..., None], size, axis=-1)
        number = states.reshape(-1, *(1 for _ in sizes))
        rows = _rows(field)
        for name, size in _global_sizes(field).items():
            if name == "C" and "c" in local:
                coordinate = local["C"] * local["c"].size + local["c"]
            else:
                coordinate = rows[local[name]] if name == field.sharding.axis else local[name]
            number = number * size + coordinate
        assert number.shape == address.shape
        yield Elements(pool, layer, field.name, field.dtype.item, address.ravel(), number.ravel())


@lru_cache(maxsize=1024)
def _view(plan: Plan, layer: str, field: str, part: int) -> Placement:
    """The same on every rank of a stage."""
    return plan.view(layer, field, part)


def _rows(field: Field) -> Ints:
    """Global rows of the cut axis, by the rank's own."""
    if not field.ranges:
        size = next((axis.size for axis in field.axes if axis.name == field.sharding.axis), 1)
        return np.arange(size)
    rows = np.full(sum(held.length for held in field.ranges), -1, dtype=np.int64)
    for held in field.ranges:
        rows[held.local : held.local + held.length] = held.start + np.arange(held.length)
    return rows


def _global_sizes(field: Field) -> dict[str, int]:
    """Axes of the whole model in an order that no packing changes; tiles are elements."""
    sizes = {name: size for name, size in field.shape.items() if name != "N"}
    if "c" in sizes:
        sizes["C"] *= sizes.pop("c")
    return {name: sizes[name] for name in sorted(sizes)}


def walk_slowly(move: Move, side: Side, rank: int) -> dict[tuple[int, int], int]:
    """The same as `held`, in plain Python: (pool, address of a byte) to its value."""
    plan, tables = move.plan(side), move.blocks(side)
    stage, tp_rank = divmod(rank, plan.tp)
    found: dict[tuple[int, int], int] = {}
    for layer, part in homes(plan):
        region, _ = plan.region_of(layer, part)
        group = plan.groups[region.group]
        page = plan.page(layer, tp_rank, part)
        placement = plan.placement(layer, part)
        views = {field.name: page.view(placement, field.name) for field in page.fields}
        wanted = states(move, layer) if region.stage == stage else ()
        also = moving_padding(move, layer)
        for state, field in product(wanted, page.fields):
            owner, entry, within = place_of(plan, layer, part, state, move.tokens[1])
            unused = field.padding and field.name not in also
            if unused or owner not in (-1, tp_rank % plan.dcp):
                continue
            ids = tables[region.group]
            block = ids[0] if group.kind == "recurrent" and len(ids) == 1 else ids[entry]
            view = views[field.name]
            names = [axis.name for axis in field.axes if axis.name != "N"]
            shape = [axis.size for axis in field.axes if axis.name != "N"]
            for values_ in product(*map(range, shape)):
                local = dict(zip(names, values_, strict=True))
                at = {"B": block, "N": within % page.states, "k": within // page.states, **local}
                address = view(**{name: at[name] for name in view.axes})
                number = state
                for name, size in _global_sizes(field).items():
                    coordinate = local[name]
                    if name == "C" and "c" in local:
                        coordinate = local["C"] * shape[names.index("c")] + local["c"]
                    if name == field.sharding.axis and field.ranges:
                        coordinate = next(
                            piece.start + coordinate - piece.local
                            for piece in field.ranges
                            if 0 <= coordinate - piece.local < piece.length
                        )
                    number = number * size + coordinate
                item = field.dtype.item
                for byte, mark in enumerate(_value(layer, field.name, number, item)):
                    assert (group.pool, address + byte) not in found
                    found[group.pool, address + byte] = mark
    return found


def _value(layer: str, field: str, number: int, item: int) -> bytes:
    """`values` of one element, in plain Python."""
    word = (1 << 64) - 1
    mixed = number + (zlib.crc32(f"{layer}/{field}".encode()) << 31)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> shift) * factor & word
    return (mixed ^ mixed >> 31).to_bytes(8, "little")[:item]


# -- what happens to memory -------------------------------------------------------------------


def fill(move: Move, rng: np.random.Generator) -> dict[int, Memory]:
    """Each source rank's memory: the request's values where it has them, junk elsewhere."""
    found = {}
    for rank in ranks(move.source):
        found[rank] = Memory(move.source, rank, rng)
        for elements in held(move, "source", rank):
            elements.write(found[rank].pools[elements.pool])
    return found


def expected(move: Move, rank: int, poison: Memory) -> tuple[Memory, dict[int, NDArray[np.bool_]]]:
    """A destination rank's memory after the transfer, and which bytes of it have arrived.

    Wherever nothing arrives there is poison, or anything in bytes that nothing uses.
    """
    after = poison.copy()
    arrived = {index: np.zeros(pool.size, dtype=bool) for index, pool in after.pools.items()}
    for elements in held(move, "destination", rank):
        elements.write(after.pools[elements.pool])
        elements.mark(arrived[elements.pool])
    after.unused = unused(move, "destination", rank)
    return after, arrived


def unused(move: Move, side: Side, rank: int) -> dict[int, NDArray[np.bool_]]:
    """Which bytes of a rank's pools belong to blocks of the request, and are in none of its fields.

    A pool whose blocks all have one stride is divided into cells of that size, and cell i belongs
    to block i % blocks. Nothing is known of who uses the gaps of other pools and of foreign memory.
    """
    plan = move.plan(side)
    stage = rank // plan.tp
    fields = own_blocks(move, rank, side)
    found = {}
    for pool in plan.pools:
        if pool.stage != stage:
            continue
        mine = [r for r in plan.regions if plan.groups[r.group].pool == pool.index]
        mine = [r for r in mine if r.stage == stage]
        (cell, *others) = {region.block_stride for region in mine}
        free = np.zeros(pool.nbytes, dtype=bool)
        if not others and plan.policy != "foreign" and not any(r.apart for r in mine):
            blocks = {
                block
                for group in {region.group for region in mine}
                for block in used_blocks(move, side, group)
            }
            owners = np.arange(-(-pool.nbytes // cell)) % pool.blocks
            owned = np.repeat(np.isin(owners, list(blocks)), cell)[: pool.nbytes]
            free = owned & ~fields[pool.index]
        found[pool.index] = free
    return found


def used_blocks(move: Move, side: Side, group: int) -> list[int]:
    """The blocks of a group from which, or to which, states move."""
    table = move.blocks(side)[group]
    return [table[-1 if len(table) == 1 else entry] for entry in entries(move, side, group)]


def own_blocks(move: Move, rank: int, side: Side = "destination") -> dict[int, NDArray[np.bool_]]:
    """Which bytes of a rank's pools are fields in the blocks that are used."""
    plan = move.plan(side)
    stage, tp_rank = divmod(rank, plan.tp)
    found = {p.index: np.zeros(p.nbytes, dtype=bool) for p in plan.pools if p.stage == stage}
    for layer, part in homes(plan):
        region, slot = plan.region_of(layer, part)
        used = used_blocks(move, side, region.group)
        each = region.layers[slot].spec.tokens_per_state
        inside = np.arange(region.block // each if each else 1)
        spec = region.layers[slot].spec
        if isinstance(spec, Ring):
            inside = np.arange(spec.rows)
        blocks = np.repeat(np.array(used, dtype=np.int64), len(inside))
        within = np.tile(inside, len(used))
        if region.stage == stage and len(blocks):
            also = moving_padding(move, layer)
            for elements in _fields(plan, layer, part, tp_rank, within, blocks, within, also=also):
                elements.mark(found[elements.pool])
    return found


def carry_out(copies: Sequence[Any], src: Memory, dst: Memory) -> int:
    """The copies, one by one; how many bytes they moved."""
    moved = 0
    for copy in copies:
        here, there = src.pools[copy.source_pool], dst.pools[copy.destination_pool]
        assert len(copy.source) == len(copy.destination) == len(copy.length)
        for a, b, n in zip(
            copy.source.tolist(), copy.destination.tolist(), copy.length.tolist(), strict=True
        ):
            assert n > 0
            assert 0 <= a <= here.size - n, f"reads {a}..{a + n} of {here.size}"
            assert 0 <= b <= there.size - n, f"writes {b}..{b + n} of {there.size}"
            there[b : b + n] = here[a : a + n]
            moved += n
    return moved


def spelled_out(starts: Ints, lengths: Ints) -> Ints:
    """Every byte of a list of stretches, in its order."""
    if not len(starts):
        return np.zeros(0, np.int64)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    return np.asarray(np.repeat(starts, lengths) + within, dtype=np.int64)


def minimum(copy: Any) -> int:
    """The fewest descriptors that move these bytes: stretches without a gap on both sides."""
    src, dst = spelled_out(copy.source, copy.length), spelled_out(copy.destination, copy.length)
    order = np.argsort(dst, kind="stable")
    joined = (np.diff(dst[order]) == 1) & (np.diff(src[order]) == 1)
    return int(dst.size > 0) + int(np.count_nonzero(~joined))


def times_named(stretches: Sequence[tuple[Ints, Ints]], size: int) -> NDArray[np.int8]:
    """How often each of `size` bytes is named by lists of starts and lengths."""
    change = np.zeros(size + 1, np.int8)
    for starts, lengths in stretches:
        assert len(starts) == len(lengths)
        assert (lengths > 0).all()
        np.add.at(change, starts, 1)
        np.add.at(change, starts + lengths, -1)
    return np.cumsum(change, dtype=np.int8)[:-1]
