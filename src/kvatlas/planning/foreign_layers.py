"""The tensors of one layer in an engine's memory, compared with the layer's page.

`SeenPages` is a layer whose tensor contains whole pages. `SeenFields` is a layer whose fields are
stored apart, such as K and V in two tensors. The method `region` of both classes combines layers
that differ only in their offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Field, Page, Placement
from kvatlas.models import Layer
from kvatlas.planning.plan_parts import FieldPlacement, Region
from kvatlas.planning.sized_layers import page_of
from kvatlas.specs import Ring

_FAR = 1 << 62
"""The stride of an axis of size 1, which can be anywhere in a layout: it is put outermost."""


class SeenLayer:
    """A layer in an engine's memory, with its block size and its number of blocks."""

    group = 0
    offsets: tuple[int, ...]
    """The offset of the layer's tensor, or of the tensor of each field."""
    stop: int
    """Offset of the first byte after the layer's tensors."""
    page: Page

    def __init__(
        self, stage: int, layer: Layer, states: int, block: int | None, tp: int, most: int
    ) -> None:
        self.stage, self.layer, self.tp = stage, layer, tp
        per_state = layer.spec.tokens_per_state
        fixed = per_state is None or isinstance(layer.spec, Ring)
        least = most if per_state is None else states * per_state
        self.kernel_block = block or least if fixed else least
        self.block = block or self.kernel_block
        if self.block % self.kernel_block:
            kernel = f"the {self.kernel_block} tokens of its N axis"
            raise wrong_tensor(
                layer.name, f"a block of {self.block} tokens, which is not a multiple of {kernel}"
            )
        self.split = self.block // self.kernel_block

    def _check_blocks(self, kernel_blocks: int) -> None:
        """Raise an error if a tensor with `kernel_blocks` kernel blocks has no whole block."""
        if kernel_blocks < self.split:
            got = f"{kernel_blocks} kernel blocks, but one block consists of {self.split}"
            raise wrong_tensor(self.layer.name, got)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        raise NotImplementedError

    @property
    def alike(self) -> tuple[object, ...]:
        """A key that is equal for layers that can share a region, if their offsets allow it."""
        raise NotImplementedError

    def region(self, family: Family, steps: tuple[int, ...]) -> Region | None:
        """Return one region for all layers in `family`; None if no region has their placements.

        `steps` contains, for each tensor of a layer, the distance in bytes from one layer to the
        next.
        """
        raise NotImplementedError


class SeenPages(SeenLayer):
    """A layer whose tensor contains whole pages."""

    def __init__(
        self, stage: int, layer: Layer, placed: Placement, block: int | None, tp: int, most: int
    ) -> None:
        self.placed = _in_bytes(placed)
        size = self.placed.size
        super().__init__(stage, layer, size("N"), block, tp, most)
        self._check_blocks(size("B"))
        self.page = page_of(layer.spec, self.kernel_block, tp)
        self.offsets, self.stop = (self.placed.offset,), self.placed.stop
        sizes = [size(axis) for axis in "HNC"]
        if sizes != [self.page.heads, self.page.states, self.page.content]:
            page = f"{self.page.heads} heads, {self.page.states} states, {self.page.content} bytes"
            raise wrong_tensor(layer.name, f"axes H, N, C of sizes {sizes}, expected {page}")

    def __str__(self) -> str:
        return str(self.placed)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.placed.size("B") // self.split

    @property
    def alike(self) -> tuple[object, ...]:
        """A key that is equal for layers that can share a region, if their offsets allow it."""
        placed = self.placed.shift(-self.placed.offset)
        return (self.group, self.stage, self.block, self.page, placed)

    def region(self, family: Family, steps: tuple[int, ...]) -> Region | None:
        """Return one region for all layers in `family`; None if no layout has their strides."""
        (step,) = steps
        strides = {axis: self.placed.stride(axis) or _FAR for axis in "BHN"}
        strides["L"] = step or 2 * _FAR
        region = Region(
            stage=self.stage,
            group=self.group,
            layers=tuple(member.layer for member in family),
            block=self.block,
            kernel_block=self.kernel_block,
            page_bytes=self.page.nbytes * self.split,
            layout=_order("LBHN", strides) + "C",
            offset=self.placed.offset,
            page_stride=step or self.page.nbytes,
            block_stride=(self.placed.stride("B") or self.page.nbytes) * self.split,
        )
        try:
            placed = region.placement(self.tp, self.blocks)
        except AtlasError:
            return None
        placed = placed.fold("B", "k", into="B") if "k" in placed.axes else placed
        pages = [placed.select("L", index).reorder(*"BHNC") for index in range(len(family))]
        seen = [member.placed for member in family if isinstance(member, SeenPages)]
        return region if pages == seen else None


class SeenFields(SeenLayer):
    """A layer whose fields are stored apart, such as K and V in two tensors."""

    def __init__(
        self,
        stage: int,
        layer: Layer,
        given: Mapping[str, Placement],
        block: int | None,
        tp: int,
        most: int,
    ) -> None:
        states = [
            placed.size("N") * (placed.size("k") if "k" in placed.axes else 1)
            for placed in given.values()
            if "N" in placed.axes
        ]
        if len(set(states)) > 1:
            got = f"fields with {sorted(set(states))} states in a block"
            raise wrong_tensor(layer.name, got)
        super().__init__(stage, layer, states[0] if states else 1, block, tp, most)
        self.page = page_of(layer.spec, self.block, tp)
        fields = {field.name: field for field in self.page.fields if not field.padding}
        if set(given) != set(fields):
            raise wrong_tensor(layer.name, f"fields {list(given)}, expected {list(fields)}")
        self.fields: dict[str, Placement] = {}
        for name, field in fields.items():
            placed = _in_elements(layer.name, given[name], field)
            self._check_blocks(placed.size("B"))
            self.fields[name] = _whole_blocks(layer.name, placed, field, self.split)
        self.offsets = tuple(placed.offset for placed in self.fields.values())
        self.stop = max(placed.stop for placed in self.fields.values())
        for name, field in fields.items():
            if not self._placement(name, 0).describes(field):
                got = f"field {name} with {self.fields[name]}, expected axes B and {field.sizes}"
                raise wrong_tensor(layer.name, got)

    def __str__(self) -> str:
        return str(self.fields)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        counts = {name: placed.size("B") for name, placed in self.fields.items()}
        if len(set(counts.values())) > 1:
            raise wrong_tensor(
                self.layer.name, f"fields with different numbers of blocks: {counts}"
            )
        (count,) = set(counts.values())
        return count

    @property
    def alike(self) -> tuple[object, ...]:
        """A key that is equal for layers that can share a region, if their offsets allow it."""
        placed = tuple((name, p.shift(-p.offset)) for name, p in self.fields.items())
        return (self.group, self.stage, self.block, self.page, placed)

    def region(self, family: Family, steps: tuple[int, ...]) -> Region | None:
        """Return one region for all layers in `family`; None if some offsets descend."""
        if min(steps) < 0:
            return None
        fields = tuple(map(self._placement, self.fields, steps))
        first = fields[0]
        strides = {
            axis: stride
            for axis, size, stride in zip(first.axes, first.sizes, first.strides, strict=True)
            if size > 1
        }
        strides |= {"B": first.block_stride, "L": first.page_stride or 2 * _FAR}
        return Region(
            stage=self.stage,
            group=self.group,
            layers=tuple(member.layer for member in family),
            block=self.block,
            kernel_block=self.block,
            page_bytes=sum(field.nbytes for field in self.page.fields if not field.padding),
            layout=_order("LBHNC", {axis: strides.get(axis, _FAR) for axis in "LBHNC"}),
            offset=first.offset,
            page_stride=first.page_stride,
            block_stride=first.block_stride,
            fields=fields,
        )

    def _placement(self, name: str, step: int) -> FieldPlacement:
        placed = self.fields[name]
        axes = [axis for axis in placed.axes if axis != "B"]
        return FieldPlacement(
            name=name,
            offset=placed.offset,
            page_stride=step,
            block_stride=placed.stride("B"),
            axes=tuple(axes),
            sizes=tuple(map(placed.size, axes)),
            strides=tuple(map(placed.stride, axes)),
        )


Family = Sequence[SeenLayer]
"""Layers that differ only in their offsets."""


def seen_layer(
    stage: int, layer: Layer, given: Any, block: int | None, tp: int, most: int
) -> SeenLayer:
    """Return the `SeenLayer` of `given`: a placement of pages, or a mapping of field placements."""
    if isinstance(given, Placement):
        return SeenPages(stage, layer, given, block, tp, most)
    if not isinstance(given, Mapping) or not all(
        isinstance(placed, Placement) for placed in given.values()
    ):
        raise AtlasError(
            Code.BAD_TENSOR,
            "Each layer needs a Placement, or a mapping from field name to Placement",
            got=f"a {type(given).__name__} for {layer.name}",
            hint="Convert each tensor with Placement.from_tensor(tensor, axes=...)",
        )
    return SeenFields(stage, layer, given, block, tp, most)


def wrong_tensor(layer: str, got: str) -> AtlasError:
    """Return the error for a tensor that differs from what its layer caches."""
    return AtlasError(
        Code.BAD_TENSOR,
        f"The tensor of {layer} does not match the layer's pages",
        got=got,
        hint="Check the axis names, and the arguments packing= and blocks=",
    )


def _order(axes: str, strides: Mapping[str, int]) -> str:
    """Return `axes` sorted by stride, outermost first."""
    return "".join(sorted(axes, key=lambda axis: -strides[axis]))


def _in_bytes(placed: Placement) -> Placement:
    """Return the placement with the axes B, H, N and C; missing axes are added with size 1.

    C counts bytes instead of elements.
    """
    missing = [axis for axis in "BHNC" if axis not in placed.axes]
    whole = Placement(
        (*placed.axes, *missing, "byte"),
        (*placed.sizes, *(1 for _ in missing), placed.item),
        (*placed.strides, *(0 for _ in missing), 1),
        placed.offset,
    )
    return whole.fold("C", "byte", into="C").reorder(*"BHNC")


def _in_elements(layer: str, placed: Placement, field: Field) -> Placement:
    """Return the placement with items of the field's dtype, and with all axes of the field.

    Missing axes are added with size 1. Engines may store elements as bytes.
    """
    item = field.dtype.item
    if placed.item != item:
        inner = [
            axis
            for axis, size, stride in zip(placed.axes, placed.sizes, placed.strides, strict=True)
            if stride == placed.item and size * placed.item % item == 0
        ]
        if item % placed.item or not inner:
            got = f"elements of {placed.item} bytes for field {field.name} in {field.dtype.name}"
            raise wrong_tensor(layer, got)
        placed = placed.split(inner[0], into=(inner[0], "byte"), inner=item // placed.item)
        placed = replace(placed.select("byte", 0), item=item)
    needed = ["B", *(axis.name for axis in field.axes if axis.name != "c")]
    missing = [axis for axis in needed if axis not in placed.axes]
    return Placement(
        (*placed.axes, *missing),
        (*placed.sizes, *(1 for _ in missing)),
        (*placed.strides, *(0 for _ in missing)),
        placed.offset,
        placed.item,
    )


def _whole_blocks(layer: str, placed: Placement, field: Field, split: int) -> Placement:
    """Return the placement of whole blocks; axis k counts the kernel blocks in a block.

    A block consists of `split` kernel blocks. If `split` is 1, the placement is unchanged.
    """
    if split == 1 or "N" not in {axis.name for axis in field.axes}:
        return placed
    if "k" in placed.axes:
        got = f"field {field.name} with an axis k, and a block of {split} pages"
        raise wrong_tensor(layer, got)
    whole = placed.narrow("B", 0, placed.size("B") // split * split)
    return whole.split("B", into=("B", "k"), inner=split)
