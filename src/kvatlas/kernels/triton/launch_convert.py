"""Copies that cast elements between element-wise formats, in one launch.

Element-wise formats are the model's dtypes, and fp8 with a per-tensor scale. All keep the order of
elements, so a conversion is a copy whose loads and stores have different types. Layers (and K and
V) with the same folded shape share a launch. Elements are multiplied by a factor, which may differ
between layers: the source scale divided by the target scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Placement, fold_together
from kvatlas.geometry.combine import tile_alike
from kvatlas.kernels.table_checks import check_pairs
from kvatlas.kernels.triton import checks, tune
from kvatlas.kernels.triton import storage_formats as formats
from kvatlas.kernels.triton.addresses import VECTOR, common, gap
from kvatlas.kernels.triton.convert_device import convert_rows
from kvatlas.kernels.triton.launch_copy import CopyTiling, EndAddresses, tile_of
from kvatlas.specs import CellFormat, TensorScales

_ONE = TensorScales()


class ConvertShape(NamedTuple):
    """Compile-time constants of a converting copy."""

    sizes: tuple[int, int, int]
    """Sizes of the three axes other than the block axis."""
    source: Any
    target: Any
    """Element types of the source and the target."""
    unit: int
    """Elements per unit of the strides."""
    elements: int
    """Elements per row, which is contiguous in source and target."""


class FoldedConversion(NamedTuple):
    """The conversion between two placements, independent of their base addresses."""

    shape: ConvertShape
    source: tuple[int, ...]
    """Strides of the block axis and of three other axes, in units."""
    target: tuple[int, ...]


class _Part(NamedTuple):
    """A field to convert, or K and V together.

    It has a source, a target, and the factor by which elements are multiplied.
    """

    addresses: tuple[int, int]
    placements: tuple[Placement, Placement]
    dtypes: tuple[DType, DType]
    factor: float


class BlockConversion:
    """Converts blocks between layers: prepared once, then called with block ids.

    Source and destination pages must have the same number of tokens and the same number of heads.
    Their formats must encode each element separately. Scales are given per layer.
    """

    def __init__(
        self,
        sources: Sequence[LayerCache],
        targets: Sequence[LayerCache],
        *,
        source_scales: Sequence[TensorScales] = (),
        destination_scales: Sequence[TensorScales] = (),
    ) -> None:
        self.device = sources[0].buffer.device
        for layer in (*sources, *targets):
            checks.reachable(layer.buffer, self.device)
            formats.check_chip(layer)
        self._ptx = formats.takes_ptx(sources[0])
        self.limits = tuple(
            min(layer.kernel_blocks.size("B") for layer in some) for some in (sources, targets)
        )
        given = source_scales or [_ONE] * len(sources), destination_scales or [_ONE] * len(targets)
        alike: dict[FoldedConversion, list[_Part]] = {}
        for source, target, *scales in zip(sources, targets, *given, strict=True):
            for part in _parts(source, target, scales[0], scales[1]):
                starts = tuple(
                    address // dtype.item
                    for address, dtype in zip(part.addresses, part.dtypes, strict=True)
                )
                folded = fold_conversion(*part.placements, *part.dtypes, common(starts, VECTOR))
                alike.setdefault(folded, []).append(part)
        self._launches = [(folded, parts, self._tables(parts)) for folded, parts in alike.items()]

    @property
    def launches(self) -> int:
        """Number of kernels that one call launches."""
        return len(self._launches)

    def __call__(self, ids: torch.Tensor, places: torch.Tensor, **choice: Any) -> None:
        """Convert blocks `ids` of the sources into blocks `places` of the targets."""
        check_pairs(ids, places)
        for name, chosen, limit in (("ids", ids, 0), ("places", places, 1)):
            checks.integers(chosen, name, axes=1)
            checks.same_device(self.device, **{name: chosen})
            checks.in_range(chosen, self.limits[limit])
        if ids.numel():
            with tune.on(self.device):
                for folded, parts, tables in self._launches:
                    self._run(folded, parts[0], tables, (ids, places), choice)

    def _tables(self, parts: list[_Part]) -> tuple[torch.Tensor, ...]:
        ends = zip(*(part.addresses for part in parts), strict=True)
        factors = torch.tensor([part.factor for part in parts], dtype=torch.float32)
        tables = [torch.tensor(addresses, device=self.device) for addresses in ends]
        return (*tables, factors.to(self.device))

    def _run(
        self,
        folded: FoldedConversion,
        part: _Part,
        tables: tuple[torch.Tensor, ...],
        blocks: tuple[torch.Tensor, torch.Tensor],
        choice: dict[str, Any],
    ) -> None:
        use = {**tune.choose("copy", self.device), **choice}
        shape, layers = folded.shape, tables[2].numel()
        widest = max(shape.source.primitive_bitwidth, shape.target.primitive_bitwidth) // 8
        columns, rows = tile_of(shape.elements, widest, use["tile"])
        count = blocks[0].numel() * shape.sizes[0] * shape.sizes[1] * shape.sizes[2]
        tiles = triton.cdiv(count, rows) * layers * triton.cdiv(shape.elements, columns)
        most = use.get("programs") or use.get("per_sm", 0) * tune.processors(self.device) or tiles
        ends = [
            EndAddresses(part.addresses[end], tables[end], blocks[end], steps)
            for end, steps in enumerate((folded.source, folded.target))
        ]
        tiling = CopyTiling(
            rows, columns, use["evict"], use.get("load", ""), use.get("store", ""),
            use.get("stages", 1),
        )  # fmt: skip
        convert_rows[(min(tiles, most),)](
            *ends, tables[2], blocks[0].numel(), layers, SHAPE=shape, TILING=tiling,
            TABLE=layers > 1, PTX=self._ptx,
            num_warps=use["warps"],
        )  # fmt: skip


@lru_cache(maxsize=4096)
def fold_conversion(
    source: Placement, target: Placement, one: DType, two: DType, alignment: int = VECTOR
) -> FoldedConversion:
    """Return the conversion between two placements, with contiguous axes folded into rows.

    Source and target must start at multiples of `alignment` elements.

    >>> bf16, fp8 = (DType.of(name) for name in ("bf16", "fp8"))
    >>> page = [("B", 9), ("N", 16), ("H", 8), ("C", 256)]
    >>> here, there = (Placement.packed(page, item=dtype.item) for dtype in (bf16, fp8))
    >>> fold_conversion(here, there, bf16, fp8).shape.elements
    32768
    """
    ends = [end.in_items() for end in (source, target)]
    a, b = fold_together(*(end.select("B", 0) for end in ends))
    axes = list(zip(a.sizes, a.strides, b.strides, strict=True))
    if len(axes) > 3:
        problem = (
            "A conversion supports at most three axes besides the block axis, if contiguous axes "
            "count as one"
        )
        got = f"{len(axes)} such axes, from {source} to {target}"
        hint = "Convert K and V separately, or call kernels.read and then kernels.write"
        raise AtlasError(Code.NOT_FOLDABLE, problem, got=got, hint=hint)
    axes = [(1, 0, 0)] * (3 - len(axes)) + axes
    steps = [(ends[0].stride("B"), ends[1].stride("B")), *((s, t) for _, s, t in axes)]
    unit = common((alignment, a.item, *(number for pair in steps for number in pair)), VECTOR)
    types = formats.ELEMENTS[one.name], formats.ELEMENTS[two.name]
    shape = ConvertShape((axes[0][0], axes[1][0], axes[2][0]), *types, unit, a.item)
    return FoldedConversion(
        shape, tuple(pair[0] // unit for pair in steps), tuple(pair[1] // unit for pair in steps)
    )


def _parts(
    source: LayerCache,
    target: LayerCache,
    source_scales: TensorScales,
    destination_scales: TensorScales,
) -> list[_Part]:
    """Return the conversions of a layer: one for K and V together, or else one per field."""
    held = [
        {f.name: f.sizes for f in layer.page.fields if not f.padding} for layer in (source, target)
    ]
    plain = all(CellFormat(layer.spec).by_element for layer in (source, target))
    if held[0] != held[1] or not plain:
        raise checks.no_kernel(
            "The kernel requires element-wise formats, and the same fields in both layers",
            f"{source.page} and {target.page}",
            "Use convert_blocks for other formats, kvatlas.route for other block sizes or ranks",
        )
    parts = []
    for name in held[0]:
        ends = tile_alike(source.place(name), target.place(name))
        parts.append(
            _Part(
                (
                    source.buffer.data_ptr() + ends[0].offset,
                    target.buffer.data_ptr() + ends[1].offset,
                ),
                ends,
                (source.page.field(name).dtype, target.page.field(name).dtype),
                _scale(source, source_scales, name) / _scale(target, destination_scales, name),
            )
        )
    return _both_sides(source, target, parts) or parts


def _both_sides(source: LayerCache, target: LayerCache, parts: list[_Part]) -> list[_Part] | None:
    """Return one `_Part` for K and V together, or None if they cannot be converted together.

    Factors must be equal, and each layer must store V at a constant distance after K.
    """
    if len(parts) != 2 or {"k", "v"} - {f.name for f in source.page.fields}:
        return None
    k, v = parts
    alike = k.factor == v.factor and k.placements[0].sizes == v.placements[0].sizes
    apart = [gap(layer, "k", "v") if alike else None for layer in (source, target)]
    both = tuple(
        end.replace_axes(0, 0, ("s", 2, distance))
        for end, distance in zip(k.placements, apart, strict=True)
        if distance is not None and distance > 0
    )
    if len(both) != 2:
        return None
    try:
        fold_conversion(*both, *k.dtypes)
    except AtlasError:
        return None
    return [k._replace(placements=(both[0], both[1]))]


def _scale(layer: LayerCache, scales: TensorScales, field: str) -> float:
    return CellFormat(layer.spec, scales=scales).scale(field)
