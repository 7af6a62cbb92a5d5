"""Copies of scattered blocks between any two placements, in one launch.

Axes that are contiguous in both source and target are first folded into one row of words. Rows of
32 bytes or more are copied directly, in any layout. Rows are shorter if source and target are
contiguous along different axes; then the kernel transposes tiles. Layers with the same folded shape
share a launch, also across pools.

The source or the target may be pinned host memory, which a kernel accesses directly. A few programs
saturate the link, and the rest of the GPU stays free.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement, fold_together
from kvatlas.kernels.fields_to_copy import placements_to_copy
from kvatlas.kernels.table_checks import check_pairs, race
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton.addresses import VECTOR, common
from kvatlas.kernels.triton.copy_device import copy_rows, copy_transposed

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_SHORT = 32
"""Minimum bytes per row for a direct copy; shorter rows are transposed if possible."""
_HOST_PROGRAMS = 16
"""Maximum number of programs of a transposed copy from or to host memory."""


class CopyEnd(NamedTuple):
    """One layer's blocks in the source or target of a copy: a buffer, and the blocks' placement."""

    buffer: torch.Tensor
    placement: Placement
    """The placement of the blocks. It has an axis B; block ids are indices along this axis."""

    @property
    def address(self) -> int:
        """Address of block 0."""
        return self.buffer.data_ptr() + self.placement.offset


class CopyShape(NamedTuple):
    """Compile-time constants of a copy."""

    sizes: tuple[int, int, int]
    """Sizes of the three axes other than the block axis."""
    word: Any
    """Type of one word."""
    unit: int
    """Words per unit of the strides."""
    words: int
    """Words per row, which is contiguous in source and target; 0 for a transposed copy."""
    transposed: tuple[int, int] = (1, 1)
    """(Items along the target's innermost axis, items along the source's innermost axis)."""


class FoldedCopy(NamedTuple):
    """The copy between two placements, independent of their base addresses."""

    shape: CopyShape
    source: tuple[int, ...]
    """Strides of the block axis, three other axes, and a transposed tile's two axes, in units."""
    target: tuple[int, ...]


class CopyTiling(NamedTuple):
    """The division of a launch into tiles; a compile-time constant."""

    rows: int
    columns: int
    evict: str = ""
    load: str = ""
    """Cache modifier of loads."""
    store: str = ""
    """Cache modifier of stores."""
    stages: int = 1


class EndAddresses(NamedTuple):
    """The addresses, block ids and strides of a copy's source or target, for kernels."""

    address: int
    table: torch.Tensor
    """Addresses of several layers; not used for a single layer."""
    ids: torch.Tensor
    steps: tuple[int, ...]


@lru_cache(maxsize=4096)
def fold_copy(source: Placement, target: Placement, alignment: int = VECTOR) -> FoldedCopy:
    """Return the copy between two placements, with contiguous axes folded into rows of words.

    Source and target must start at multiples of `alignment` bytes. The example copies state-major
    to head-major pages. A row is one cell: 512 bytes, or 64 words of 8 bytes.

    >>> from kvatlas import Layout
    >>> page = {"B": 9, "L": 1, "H": 8, "N": 16, "C": 512}
    >>> nhd, hnd = (Layout(order).place(**page).select("L", 0) for order in ("NHD", "HND"))
    >>> fold_copy(nhd, hnd).shape._replace(word=None)
    CopyShape(sizes=(1, 16, 8), word=None, unit=2, words=64, transposed=(1, 1))
    >>> fold_copy(nhd, hnd).source, fold_copy(nhd, hnd).target
    ((4096, 0, 256, 32), (4096, 0, 32, 512))
    """
    a, b = fold_together(source.select("B", 0), target.select("B", 0))
    axes = list(zip(a.sizes, a.strides, b.strides, strict=True))
    blocks = source.stride("B"), target.stride("B")
    transposed = _transposed(a, b, blocks)
    if transposed is not None:
        axes = [axis for axis in axes if axis not in transposed]
    if len(axes) > 3:
        raise AtlasError(
            Code.NOT_FOLDABLE,
            "A copy supports at most three axes besides the block axis, if contiguous axes count "
            "as one",
            got=f"{len(axes)} such axes, from {a} to {b}",
            hint="Copy the fields one by one",
        )
    axes = [(1, 0, 0)] * (3 - len(axes)) + axes
    steps = [blocks, *((s, t) for _, s, t in axes)]
    sizes = (axes[0][0], axes[1][0], axes[2][0])
    if transposed is not None:
        down, across = transposed
        steps += [down[1:], across[1:]]
        align, shape = a.item, CopyShape(sizes, _WORDS[a.item], 1, 0, (down[0], across[0]))
    else:
        numbers = (alignment, a.item, *(number for pair in steps for number in pair))
        align = common(numbers, VECTOR)
        word = min(align, 8)
        shape = CopyShape(sizes, _WORDS[word], align // word, a.item // word)
    return FoldedCopy(
        shape, tuple(pair[0] // align for pair in steps), tuple(pair[1] // align for pair in steps)
    )


def _transposed(
    a: Placement, b: Placement, blocks: tuple[int, int]
) -> tuple[tuple[int, int, int], ...] | None:
    """Return the two axes of a copy's transposed tiles; None if the copy cannot be transposed.

    The first is the innermost axis of the target, the second the innermost axis of the source. An
    axis is (size, source stride, target stride), with strides in bytes.
    """
    axes = list(zip(a.sizes, a.strides, b.strides, strict=True))
    across = next((axis for axis in axes if axis[1] == a.item), None)
    down = next((axis for axis in axes if axis[2] == b.item), None)
    if a.item >= _SHORT or a.item not in _WORDS or across is None or down is None or across == down:
        return None
    whole = (a.offset, b.offset, *blocks, *(s for axis in axes for s in axis[1:]))
    return (down, across) if all(number % a.item == 0 for number in whole) else None


class _Launch(NamedTuple):
    """One launch for all layers with the same folded shape.

    If there are several layers, `tables` contains their source and target addresses.
    """

    copy: FoldedCopy
    pairs: list[tuple[CopyEnd, CopyEnd]]
    tables: tuple[torch.Tensor, torch.Tensor] | None


class BlockCopy:
    """Copies blocks between layers: prepared once, then called with block ids.

    >>> import torch
    >>> page = Placement.packed([("B", 4), ("C", 64)])
    >>> BlockCopy([CopyEnd(torch.zeros(256, dtype=torch.uint8), page)] * 2,
    ...           [CopyEnd(torch.zeros(256, dtype=torch.uint8), page)] * 2).launches
    1
    """

    def __init__(self, sources: Sequence[CopyEnd], targets: Sequence[CopyEnd]) -> None:
        ends = [*sources, *targets]
        on_device = [end.buffer for end in ends if end.buffer.is_cuda]
        self.device = (on_device or [ends[0].buffer])[0].device
        for end in ends:
            checks.reachable(end.buffer, self.device)
        self.hosted = len({end.buffer.device for end in ends}) > 1
        self.limits = tuple(
            min(end.placement.size("B") for end in some) for some in (sources, targets)
        )
        alike: dict[FoldedCopy, list[tuple[CopyEnd, CopyEnd]]] = {}
        for source, target in zip(sources, targets, strict=True):
            align = common((source.address, target.address), VECTOR)
            copy = fold_copy(source.placement, target.placement, align)
            alike.setdefault(copy, []).append((source, target))
        self._launches = [
            _Launch(copy, pairs, self._tables(pairs)) for copy, pairs in alike.items()
        ]

    @property
    def launches(self) -> int:
        """Number of kernels that one call launches: one per folded shape."""
        return len(self._launches)

    @property
    def block_bytes(self) -> int:
        """Bytes copied per block, over all layers."""
        return sum(
            source.placement.nbytes // source.placement.size("B")
            for launch in self._launches
            for source, _ in launch.pairs
        )

    def __call__(self, ids: torch.Tensor, places: torch.Tensor, **choice: Any) -> None:
        """Copy blocks `ids` of the sources to blocks `places` of the targets.

        Both tensors must be on the device that copies. No block may be written twice, or be both
        read and written. `choice` overrides the tuned settings.
        """
        check_pairs(ids, places)
        for name, chosen, limit in (("ids", ids, 0), ("places", places, 1)):
            checks.integers(chosen, name, axes=1)
            checks.same_device(self.device, **{name: chosen})
            checks.in_range(chosen, self.limits[limit])
        if checks.debugging():
            self._refuse_clash(ids, places)
        if ids.numel():
            with tune.on(self.device):
                for launch in self._launches:
                    self._run(launch, ids, places, choice)

    def _refuse_clash(self, ids: torch.Tensor, places: torch.Tensor) -> None:
        """Raise an error for a block that is written twice, or both read and written (a race)."""
        twice = torch.unique(places).numel() < places.numel()
        pairs = [pair for launch in self._launches for pair in launch.pairs]
        here = any(a.address == b.address and a.placement == b.placement for a, b in pairs)
        if twice or (here and bool(torch.isin(ids, places).any())):
            raise race(ids, places, twice=twice)

    def _tables(
        self, pairs: list[tuple[CopyEnd, CopyEnd]]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if len(pairs) == 1:
            return None
        sources, targets = zip(*pairs, strict=True)
        return self._addresses(sources), self._addresses(targets)

    def _addresses(self, ends: Sequence[CopyEnd]) -> torch.Tensor:
        return torch.tensor([end.address for end in ends], device=self.device)

    def _run(
        self, launch: _Launch, ids: torch.Tensor, places: torch.Tensor, choice: dict[str, Any]
    ) -> None:
        copy, (source, target) = launch.copy, launch.pairs[0]
        tables = launch.tables or (ids, places)
        ends = (
            EndAddresses(source.address, tables[0], ids, copy.source),
            EndAddresses(target.address, tables[1], places, copy.target),
        )
        start = _copy_rows if copy.shape.words else _copy_transposed
        start(copy.shape, ends, len(launch.pairs), self.device, self.hosted, choice)


def _copy_transposed(
    shape: CopyShape,
    ends: tuple[EndAddresses, EndAddresses],
    layers: int,
    device: torch.device,
    hosted: bool,
    choice: dict[str, Any],
) -> None:
    use = {**tune.choose("turn", device, hosted=hosted), **choice}
    (down, across), blocks = shape.transposed, ends[0].ids.numel()
    rows = min(use["rows"], triton.next_power_of_2(down))
    columns = min(use["columns"], triton.next_power_of_2(across))
    tiles = triton.cdiv(down, rows) * triton.cdiv(across, columns)
    total = tiles * blocks * layers * shape.sizes[0] * shape.sizes[1] * shape.sizes[2]
    copy_transposed[(min(total, _HOST_PROGRAMS) if hosted else total,)](
        *ends, blocks, layers, SHAPE=shape, TILING=CopyTiling(rows, columns), TABLE=layers > 1,
        num_warps=use["warps"],
    )  # fmt: skip


def _copy_rows(
    shape: CopyShape,
    ends: tuple[EndAddresses, EndAddresses],
    layers: int,
    device: torch.device,
    hosted: bool,
    choice: dict[str, Any],
    fill: bool = False,
) -> None:
    use = {**tune.choose("copy_host" if hosted else "copy", device), **choice}
    columns, rows = tile_of(shape.words, shape.word.primitive_bitwidth // 8, use["tile"])
    blocks = ends[0].ids.numel()
    count = blocks * shape.sizes[0] * shape.sizes[1] * shape.sizes[2]
    tiles = triton.cdiv(count, rows) * layers * triton.cdiv(shape.words, columns)
    most = use.get("programs") or use.get("per_sm", 0) * tune.processors(device) or tiles
    tiling = CopyTiling(
        rows, columns, use["evict"], use.get("load", ""), use.get("store", ""),
        use.get("stages", 1),
    )  # fmt: skip
    copy_rows[(min(tiles, most),)](
        *ends, blocks, layers, SHAPE=shape, TILING=tiling, TABLE=layers > 1, FILL=fill,
        num_warps=use["warps"],
    )  # fmt: skip


def tile_of(words: int, word: int, nbytes: int) -> tuple[int, int]:
    """Return (columns, rows) of a tile of about `nbytes` bytes, for rows of `words` words.

    A word has `word` bytes, and a column is one word. The columns divide the rows into tiles with
    few unused columns.

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
    """Copy blocks `ids` of the sources to blocks `places` of the targets, across layouts."""
    between(source, target)(ids, places, **choice)


def between(
    source: LayerCache | Sequence[LayerCache], target: LayerCache | Sequence[LayerCache]
) -> BlockCopy:
    """Prepare to copy blocks from each source layer to the target layer at the same index.

    A cell is all bytes of one head and token. Whole cells are copied if fields (K, V, scales) have
    the same offsets in the cells of both layers. Otherwise fields are copied one by one. If a field
    spans a whole page, the strides of heads and tokens must also be the same in both layers.
    """
    sources = [source] if isinstance(source, LayerCache) else list(source)
    targets = [target] if isinstance(target, LayerCache) else list(target)
    if len(sources) != len(targets) or not sources:
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            "`source` and `target` must have the same number of layers, at least one",
            got=f"{len(sources)} source layers and {len(targets)} target layers",
            hint="Pass two lists of equal length",
        )
    from_ends, to_ends = [], []
    for a, b in zip(sources, targets, strict=True):
        for first, second in placements_to_copy(a, b):
            from_ends.append(CopyEnd(a.buffer, first))
            to_ends.append(CopyEnd(b.buffer, second))
    return BlockCopy(from_ends, to_ends)


def zero_blocks(layer: LayerCache, ids: torch.Tensor, **choice: Any) -> None:
    """Clear blocks of a layer, so that a new owner cannot read the previous owner's data."""
    end = CopyEnd(layer.buffer, layer.kernel_blocks)
    device = checks.same_device(layer.buffer.device, ids=ids)
    checks.integers(ids, "ids", axes=1)
    checks.in_range(ids, end.placement.size("B"))
    copy = fold_copy(end.placement, end.placement, common((end.address,), VECTOR))
    ends = EndAddresses(end.address, ids, ids, copy.target)
    if ids.numel():
        with tune.on(device):
            _copy_rows(copy.shape, (ends, ends), 1, device, False, choice, fill=True)
