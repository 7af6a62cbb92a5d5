"""Copies between any two placements, blocks scattered on both sides, in one launch.

What moves is folded first: axes that are gapless on both sides become one row of words.
Rows of 32 bytes and more are copied as they are, whatever orders they lie in; shorter
ones, where the sides step through memory along unlike axes, in tiles that are turned on
the way. Layers whose pages fold alike share a launch, whichever pools they lie in.

One side may be pinned host memory, which a kernel reaches directly: few programs are
enough to fill the link, and the rest of the chip stays free.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement, fold_together
from kvatlas.kernels.page_match import cells_alike
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton.addresses import VECTOR, common
from kvatlas.kernels.triton.copy_device import copy_rows, copy_turned

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_SHORT = 32
"""Bytes of a row below which a copy that can be turned is turned."""


class Side(NamedTuple):
    """One layer's blocks on one side of a copy: bytes, and where in them the blocks lie."""

    buffer: torch.Tensor
    placement: Placement
    """With an axis B, that ids count."""

    @property
    def address(self) -> int:
        """Where block 0 starts in memory."""
        return self.buffer.data_ptr() + self.placement.offset


class Moves(NamedTuple):
    """How the blocks of two placements move, wherever they start."""

    sizes: tuple[int, int, int]
    source: tuple[int, ...]
    """Steps of the block and the axes, in units of words; then of a turned tile's two axes."""
    target: tuple[int, ...]
    word: int
    unit: int
    words: int
    """Words of a row that is contiguous on both sides; 0 for a copy that is turned."""
    turned: tuple[int, int] = (1, 1)
    """Items along the target's innermost axis, and along the source's."""


@lru_cache(maxsize=4096)
def moves(source: Placement, target: Placement, alignment: int = VECTOR) -> Moves:
    """How blocks move between two placements whose memory starts at multiples of `alignment`.

    State-major to head-major pages: rows of one cell, 512 bytes or 64 words of 8 each.

    >>> from kvatlas import Layout
    >>> page = {"B": 9, "L": 1, "H": 8, "N": 16, "C": 512}
    >>> nhd, hnd = (Layout(order).place(**page).select("L", 0) for order in ("NHD", "HND"))
    >>> moves(nhd, hnd)
    Moves(sizes=(1, 16, 8), source=(4096, 0, 256, 32), target=(4096, 0, 32, 512), word=8, unit=2, words=64, turned=(1, 1))
    """  # noqa: E501
    a, b = fold_together(source.select("B", 0), target.select("B", 0))
    axes = list(zip(a.sizes, a.strides, b.strides, strict=True))
    blocks = source.stride("B"), target.stride("B")
    turned = _turned(a, b, blocks)
    if turned is not None:
        axes = [axis for axis in axes if axis not in turned]
    if len(axes) > 3:
        raise AtlasError(
            Code.NOT_FOLDABLE,
            "A copy steps through at most three axes beside the block",
            got=f"{a} to {b}",
            hint="Copy the fields one by one",
        )
    axes = [(1, 0, 0)] * (3 - len(axes)) + axes
    steps = [blocks, *((s, t) for _, s, t in axes)]
    sizes = (axes[0][0], axes[1][0], axes[2][0])
    if turned is not None:
        down, across = turned
        steps += [down[1:], across[1:]]
        word, unit, words, shape = a.item, 1, 0, (down[0], across[0])
    else:
        numbers = (alignment, a.item, *(number for pair in steps for number in pair))
        align = common(numbers, VECTOR)
        word = min(align, 8)
        unit, words, shape = align // word, a.item // word, (1, 1)
    step = word * unit
    return Moves(
        sizes,
        tuple(pair[0] // step for pair in steps),
        tuple(pair[1] // step for pair in steps),
        word,
        unit,
        words,
        shape,
    )


def _turned(
    a: Placement, b: Placement, blocks: tuple[int, int]
) -> tuple[tuple[int, int, int], ...] | None:
    """The target's innermost axis and the source's, where a copy is better turned."""
    axes = list(zip(a.sizes, a.strides, b.strides, strict=True))
    across = next((axis for axis in axes if axis[1] == a.item), None)
    down = next((axis for axis in axes if axis[2] == b.item), None)
    if a.item >= _SHORT or a.item not in _WORDS or across is None or down is None or across == down:
        return None
    whole = (a.offset, b.offset, *blocks, *(s for axis in axes for s in axis[1:]))
    return (down, across) if all(number % a.item == 0 for number in whole) else None


class _Group(NamedTuple):
    """Layers that fold alike."""

    moves: Moves
    pairs: list[tuple[Side, Side]]
    tables: tuple[torch.Tensor, torch.Tensor] | None


class Copy:
    """A copy of blocks between layers, prepared once and launched with ids.

    >>> import torch
    >>> page = Placement.packed([("B", 4), ("C", 64)])
    >>> Copy([Side(torch.zeros(256, dtype=torch.uint8), page)] * 2,
    ...      [Side(torch.zeros(256, dtype=torch.uint8), page)] * 2).launches
    1
    """

    def __init__(self, sources: Sequence[Side], targets: Sequence[Side]) -> None:
        pairs = list(zip(sources, targets, strict=True))
        sides = [*sources, *targets]
        on_device = [side.buffer for side in sides if side.buffer.is_cuda]
        self.device = (on_device or [sides[0].buffer])[0].device
        for side in sides:
            checks.reachable(side.buffer, self.device)
        self.hosted = len({side.buffer.device for side in sides}) > 1
        self.limits = tuple(
            min(side.placement.size("B") for side in some) for some in (sources, targets)
        )
        found: dict[Moves, list[tuple[Side, Side]]] = {}
        for source, target in pairs:
            align = common((source.address, target.address), VECTOR)
            found.setdefault(moves(source.placement, target.placement, align), []).append(
                (source, target)
            )
        self._groups = [_Group(how, some, self._tables(some)) for how, some in found.items()]

    @property
    def launches(self) -> int:
        """Kernels that one call launches: one for all layers that fold alike."""
        return len(self._groups)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block moves."""
        return sum(
            source.placement.nbytes // source.placement.size("B")
            for group in self._groups
            for source, _ in group.pairs
        )

    def __call__(self, ids: torch.Tensor, places: torch.Tensor, **choice: Any) -> None:
        """Blocks `ids` of the sources into blocks `places` of the targets.

        Both lists are on the device that copies. No block may be written twice, or be both
        read and written. `choice` overrides what the tuner says.
        """
        if ids.numel() != places.numel():
            raise AtlasError(
                Code.UNLIKE_PLACEMENTS,
                "Every block has one place to go to",
                got=f"{ids.numel()} blocks for {places.numel()} places",
                hint="Pass two lists of one length",
            )
        for name, chosen, limit in (("ids", ids, 0), ("places", places, 1)):
            checks.integers(chosen, name, axes=1)
            checks.same_device(self.device, **{name: chosen})
            checks.in_range(chosen, self.limits[limit])
        if checks.debugging():
            self._refuse_clash(ids, places)
        if ids.numel():
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                for group in self._groups:
                    self._launch(group, ids, places, choice)

    def _refuse_clash(self, ids: torch.Tensor, places: torch.Tensor) -> None:
        """Refuse a block that is written twice, or both read and written: programs race."""
        twice = torch.unique(places).numel() < places.numel()
        pairs = [pair for group in self._groups for pair in group.pairs]
        here = any(a.address == b.address and a.placement == b.placement for a, b in pairs)
        if twice or (here and bool(torch.isin(ids, places).any())):
            raise AtlasError(
                Code.OVERLAP,
                "One copy writes a block once, and does not read what it writes",
                got="a block that is written twice" if twice else "a block, read and written",
                hint="Copy in two steps",
            )

    def _tables(self, pairs: list[tuple[Side, Side]]) -> tuple[torch.Tensor, torch.Tensor] | None:
        if len(pairs) == 1:
            return None
        first, second = (
            torch.tensor([pair[side].address for pair in pairs], device=self.device)
            for side in (0, 1)
        )
        return first, second

    def _launch(
        self, group: _Group, ids: torch.Tensor, places: torch.Tensor, choice: dict[str, Any]
    ) -> None:
        how, (source, target) = group.moves, group.pairs[0]
        begins, ends = group.tables or (ids, places)
        given = (
            source.address, target.address, begins, ends, ids, places, ids.numel(),
            len(group.pairs), how.source, how.target,
        )  # fmt: skip
        table = group.tables is not None
        if not how.words:
            self._turn(how, given, table, ids.numel() * len(group.pairs), choice)
            return
        launch_rows(how, given, table, self.device, hosted=self.hosted, choice=choice)

    def _turn(
        self, how: Moves, given: tuple[Any, ...], table: bool, blocks: int, choice: dict[str, Any]
    ) -> None:
        use = {**tune.choose("turn", self.device, hosted=self.hosted), **choice}
        rows = min(use["rows"], triton.next_power_of_2(how.turned[0]))
        columns = min(use["columns"], triton.next_power_of_2(how.turned[1]))
        tiles = triton.cdiv(how.turned[0], rows) * triton.cdiv(how.turned[1], columns)
        total = tiles * blocks * how.sizes[0] * how.sizes[1] * how.sizes[2]
        copy_turned[(min(total, 16) if self.hosted else total,)](
            *given, SIZES=how.sizes, WORD=_WORDS[how.word], DOWN=how.turned[0],
            ACROSS=how.turned[1], ROWS=rows, COLUMNS=columns, TABLE=table, num_warps=use["warps"],
        )  # fmt: skip


def launch_rows(
    how: Moves,
    given: tuple[Any, ...],
    table: bool,
    device: torch.device,
    *,
    hosted: bool = False,
    fill: bool = False,
    choice: dict[str, Any],
) -> None:
    """Start `copy_rows` with as many programs as the tuner says."""
    use = {**tune.choose("copy_host" if hosted else "copy", device), **choice}
    columns, rows = tile_of(how.words, how.word, use["tile"])
    blocks, layers = given[6], given[7]
    count = blocks * how.sizes[0] * how.sizes[1] * how.sizes[2]
    tiles = triton.cdiv(count, rows) * layers * triton.cdiv(how.words, columns)
    most = use.get("programs") or use.get("per_sm", 0) * tune.processors(device) or tiles
    copy_rows[(min(tiles, most),)](
        *given, SIZES=how.sizes, WORDS=how.words, WORD=_WORDS[how.word], UNIT=how.unit,
        ROWS=rows, COLUMNS=columns, TABLE=table, FILL=fill, EVICT=use["evict"],
        LOAD=use.get("load", ""), STORE=use.get("store", ""), STAGES=use.get("stages", 1),
        num_warps=use["warps"],
    )  # fmt: skip


def tile_of(words: int, word: int, nbytes: int) -> tuple[int, int]:
    """Columns and rows of a tile of about `nbytes`, little of it wasted past a row's end.

    >>> tile_of(64, 8, 16384), tile_of(144, 8, 16384), tile_of(8192, 8, 16384), tile_of(3, 8, 64)
    ((64, 32), (16, 128), (2048, 1), (4, 2))
    """
    most = max(1, nbytes // word)
    whole = words & -words
    columns = min(whole if whole * word >= 128 else triton.next_power_of_2(words), most)
    return columns, max(1, most // columns)


def copy_blocks(
    source: LayerCache | Sequence[LayerCache],
    ids: torch.Tensor,
    target: LayerCache | Sequence[LayerCache],
    places: torch.Tensor,
    **choice: Any,
) -> None:
    """Whole blocks of layers into others', across orders, pools and devices."""
    between(source, target)(ids, places, **choice)


def between(
    source: LayerCache | Sequence[LayerCache], target: LayerCache | Sequence[LayerCache]
) -> Copy:
    """The copy from some layers to as many others, ready to be launched with ids.

    Whole cells move where fields lie alike in them; fields by their names where the same
    fields are packed in another way, or lie flat over pages of another order.
    """
    sources = [source] if isinstance(source, LayerCache) else list(source)
    targets = [target] if isinstance(target, LayerCache) else list(target)
    if len(sources) != len(targets) or not sources:
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            "Every layer is copied into one other",
            got=f"{len(sources)} layers into {len(targets)}",
            hint="Pass two lists of one length",
        )
    from_sides, to_sides = [], []
    for a, b in zip(sources, targets, strict=True):
        shared = _shared_fields(a, b)
        if cells_alike(a, b):
            from_sides.append(Side(a.buffer, a.kernel_blocks))
            to_sides.append(Side(b.buffer, b.kernel_blocks))
            continue
        for name in shared:
            first, second = a.place(name), b.place(name)
            from_sides.append(Side(a.buffer, _tiled_like(second, first)))
            to_sides.append(Side(b.buffer, _tiled_like(first, second)))
    return Copy(from_sides, to_sides)


def _tiled_like(other: Placement, mine: Placement) -> Placement:
    """A field whose rows are in tiles where the other side's are."""
    if "c" in other.axes and "c" not in mine.axes:
        return mine.split("C", into=("C", "c"), inner=other.size("c"))
    return mine


def _shared_fields(a: LayerCache, b: LayerCache) -> list[str]:
    """The fields of both, refused where they are not the same numbers."""
    mine, other = (
        {f.name: (f.dtype, f.sizes) for f in layer.page.fields if not f.padding} for layer in (a, b)
    )
    if mine != other:
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            "Blocks are copied between caches of the same fields, of one shape and dtype",
            got=f"{sorted(mine)} of {a.page} and {sorted(other)} of {b.page}",
            hint="Convert the cache dtype first; route between unlike block sizes or ranks",
        )
    return list(mine)


def zero_blocks(layer: LayerCache, ids: torch.Tensor, **choice: Any) -> None:
    """Clear blocks of a layer: a new owner must not read what the last one left."""
    side = Side(layer.buffer, layer.kernel_blocks)
    device = checks.same_device(layer.buffer.device, ids=ids)
    checks.integers(ids, "ids", axes=1)
    checks.in_range(ids, side.placement.size("B"))
    how = moves(side.placement, side.placement, common((side.address,), VECTOR))
    given = (
        side.address, side.address, ids, ids, ids, ids, ids.numel(), 1, how.source, how.target,
    )  # fmt: skip
    if ids.numel():
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            launch_rows(how, given, False, device, fill=True, choice=choice)
