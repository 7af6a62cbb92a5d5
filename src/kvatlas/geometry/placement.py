"""`Placement`: the affine map from named coordinates to byte addresses.

`Placement` is the central value of kvatlas. A cache, one of its layers, a field, a TP
slice and a kernel block are all placements, and every operation on a placement returns
another one. No other module multiplies strides.

`axes`, `sizes` and byte `strides` specify where the coordinates are, and `offset` is the
address of the first one. `item` is the number of contiguous bytes at each coordinate: a
byte, an element, a cell or a whole run, depending on how far the placement is folded.
Views, copies and descriptors therefore share one type.

Placements are canonical: an axis of size 1 has stride 0. Two placements with the same axes
are equal if and only if they map every coordinate to the same bytes. The constructor rejects
placements that overlap themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import (
    Int64s,
    fill_descriptors,
    indices,
    join_ranges,
    out_of_range,
    outer_sum,
    refuse_too_many,
    strided,
)
from kvatlas.geometry.affine import Affine, bad_axes
from kvatlas.geometry.integers import integer, natural, positive, set_fields
from kvatlas.geometry.runs import coalesce, is_nested


@dataclass(frozen=True, slots=True, repr=False)
class Placement(Affine):
    """An affine map with sizes, byte strides and an offset over named axes.

    >>> p = Placement(("B", "N"), (3, 4), (64, 8), offset=16, item=8)
    >>> p(B=2, N=1)
    152
    >>> p.narrow("N", 1, 2).runs()
    (array([ 24,  88, 152]), array([16, 16, 16]))
    >>> p.descriptors("B", base=4096).tolist()
    [[4112, 32, 0], [4176, 32, 0], [4240, 32, 0]]
    """

    # -- constructors ---------------------------------------------------------------

    @classmethod
    def packed(
        cls,
        axes: Sequence[tuple[str, int]],
        *,
        offset: int = 0,
        item: int = 1,
        strides: Mapping[str, int] | None = None,
    ) -> Placement:
        """Return a placement of densely packed axes, outermost first.

        `strides` overrides the byte strides of the axes that it names.

        >>> Placement.packed([("B", 3), ("N", 4), ("C", 8)]).strides
        (32, 8, 1)
        """
        fixed = strides or {}
        if not isinstance(fixed, Mapping):
            raise bad_axes("Strides must map axis names to bytes", strides, "Pass {'B': 64, ...}")
        if not isinstance(axes, Sequence) or not all(map(_is_axis, axes)):
            raise bad_axes("Axes must be pairs of name and size", axes, "Pass [('B', 4), ...]")
        unknown = set(fixed) - {axis for axis, _ in axes}
        if unknown:
            raise bad_axes(
                "Strides can be given only for axes of the placement",
                sorted(unknown),
                "Remove the strides of other axes",
            )
        steps = packed_steps(axes, positive(item, "the item size"), fixed)
        names, sizes = tuple(axis for axis, _ in axes), tuple(size for _, size in axes)
        return cls(names, sizes, tuple(steps), offset, item)

    @classmethod
    def from_tensor(cls, tensor: Any, axes: Sequence[str]) -> Placement:
        """Return the placement of a numpy or torch tensor's elements in its storage.

        The caller names the axes, because a shape does not show whether an axis of size 2
        is K and V or two blocks. Meta tensors are supported.

        >>> Placement.from_tensor(np.zeros((5, 4, 8), np.float32)[1:, ::2], axes="BNC")
        Placement(B=4:128, N=2:64, C=8:4, offset=128, item=4)
        """
        layout = strided(tensor)
        if layout is None:
            problem = "The argument must be a strided numpy or torch tensor"
            hint = "Use Placement(axes, sizes, strides) for other memory"
            raise AtlasError(Code.BAD_TENSOR, problem, got=type(tensor).__name__, hint=hint)
        if len(axes) != len(layout[0]):
            raise bad_axes(
                "Each axis of the tensor needs one name",
                f"names {tuple(axes)} for shape {layout[0]}",
                f"Pass {len(layout[0])} names",
            )
        return cls(tuple(axes), *layout)

    # -- operations -----------------------------------------------------------------

    def narrow(self, axis: str, start: int, length: int) -> Placement:
        """Keep coordinates start .. start + length - 1 of `axis`, renumbered from 0.

        >>> Placement.packed([("H", 8), ("C", 4)]).narrow("H", 6, 2)
        Placement(H=2:4, C=4:1, offset=24, item=1)
        """
        place = self._place(axis)
        start, length = integer(start, "the start"), positive(length, "the length")
        if start < 0 or start + length > self.sizes[place]:
            raise out_of_range(axis, self.sizes[place], f"{start}..{start + length - 1}")
        sizes = (*self.sizes[:place], length, *self.sizes[place + 1 :])
        return replace(self, sizes=sizes, offset=self.offset + start * self.strides[place])

    def select(self, axis: str, index: int) -> Placement:
        """Select one coordinate of `axis` and drop the axis.

        >>> Placement.packed([("L", 2), ("B", 3)], item=8).select("L", 1)
        Placement(B=3:8, offset=24, item=8)
        """
        place = self._place(axis)
        number = integer(index, f"an index of axis {axis}")
        if not 0 <= number < self.sizes[place]:
            raise out_of_range(axis, self.sizes[place], number)
        rest = [other for other in range(len(self.axes)) if other != place]
        return self._pick(rest, number * self.strides[place])

    def split(self, axis: str, *, into: tuple[str, str], inner: int) -> Placement:
        """Split `axis` into an outer axis and an inner axis of size `inner`.

        For example, split blocks of 64 states into 4 kernel blocks of 16 each, and fold these
        into the block axis:

        >>> p = Placement.packed([("B", 10), ("N", 64), ("C", 8)])
        >>> p.split("N", into=("k", "N"), inner=16).fold("B", "k", into="B")
        Placement(B=40:128, N=16:8, C=8:1, offset=0, item=1)
        """
        place = self._place(axis)
        if not isinstance(into, tuple | list) or len(into) != 2:
            raise bad_axes(
                "`into` must name exactly two axes",
                repr(into),
                "Pass an outer and an inner name, such as into=('k', 'N')",
            )
        size, stride = self.sizes[place], self.strides[place]
        inner = positive(inner, "the inner size")
        if size % inner:
            problem = f"The inner size must divide the size of axis {axis}"
            got, hint = (
                f"inner {inner} and size {size}",
                f"Narrow the axis to a multiple of {inner}",
            )
            raise AtlasError(Code.NOT_DIVISIBLE, problem, got=got, hint=hint)
        outer = (into[0], size // inner, stride * inner)
        return self.replace_axes(place, place + 1, outer, (into[1], inner, stride))

    def fold(self, outer: str, inner: str, *, into: str | None = None) -> Placement:
        """Fold two axes into one. The stride of `outer` must equal the extent of `inner`.

        >>> Placement.packed([("H", 2), ("N", 4), ("C", 8)]).fold("H", "N")
        Placement(H*N=8:8, C=8:1, offset=0, item=1)
        """
        o, i = self._place(outer), self._place(inner)
        many, few, step = self.sizes[o], self.sizes[i], self.strides[i]
        if o == i or (many > 1 and few > 1 and self.strides[o] != few * step):
            strides = f"{outer} with a stride of {self.strides[o]} bytes"
            got = f"{strides}, and {inner} of size {few} with a stride of {step} bytes"
            hint = "Keep both axes, or use a layout in which they are adjacent"
            raise AtlasError(Code.NOT_FOLDABLE, got=got, hint=hint)
        folded = (into or f"{outer}*{inner}", many * few, step if few > 1 else self.strides[o])
        kept = self._pick([place for place in range(len(self.axes)) if place != i])
        place = o - (i < o)
        return kept.replace_axes(place, place + 1, folded)

    def reorder(self, *axes: str) -> Placement:
        """List the axes in another order; addresses do not change.

        >>> Placement.packed([("B", 2), ("H", 3)]).reorder("H", "B")
        Placement(H=3:1, B=2:3, offset=0, item=1)
        """
        places = [self._place(axis) for axis in axes]
        if sorted(places) != list(range(len(self.axes))):
            raise bad_axes(
                "The new order must list every axis once",
                axes,
                f"Pass a permutation of {self.axes}",
            )
        return self._pick(places)

    def rename(self, **names: str) -> Placement:
        """Rename axes, given as old='new'.

        >>> Placement.packed([("k", 2), ("N", 4)]).rename(k="B").axes
        ('B', 'N')
        """
        for axis in names:
            self._place(axis)
        return replace(self, axes=tuple(names.get(axis, axis) for axis in self.axes))

    def replace_axes(self, start: int, stop: int, *axes: tuple[str, int, int]) -> Placement:
        """Replace the axes at positions start .. stop - 1.

        Each of `axes` is a tuple (name, size, stride in bytes).
        """
        names, sizes, strides = zip(*axes, strict=True)
        return replace(
            self,
            axes=(*self.axes[:start], *names, *self.axes[stop:]),
            sizes=(*self.sizes[:start], *sizes, *self.sizes[stop:]),
            strides=(*self.strides[:start], *strides, *self.strides[stop:]),
        )

    def shift(self, by: int) -> Placement:
        """Add `by` bytes to every address."""
        return replace(self, offset=self.offset + integer(by, "the shift"))

    def in_items(self) -> Placement:
        """Return the placement with its offset and strides in items instead of bytes.

        >>> Placement.packed([("N", 4), ("C", 8)], item=2, offset=32).in_items()
        Placement(N=4:8, C=8:1, offset=16, item=1)
        """
        if any(number % self.item for number in (self.offset, *self.strides)):
            problem = "Every element must start at a multiple of its size"
            hint = "Pad pages and blocks to multiples of the element size"
            raise AtlasError(Code.MISALIGNED, problem, got=self, hint=hint)
        strides = tuple(stride // self.item for stride in self.strides)
        return Placement(self.axes, self.sizes, strides, self.offset // self.item, 1)

    def folded(self) -> Placement:
        """Fold contiguous axes: return as few axes and as large an item as possible.

        The axes of the result are listed outermost first.

        >>> Placement.packed([("B", 9), ("N", 4), ("C", 8)], strides={"B": 64}).folded()
        Placement(B=9:64, offset=0, item=32)
        """
        return fold_together(self)[0]

    # -- arrays ---------------------------------------------------------------------

    def runs(self, **ids: Any) -> tuple[Int64s, Int64s]:
        """Return the longest contiguous byte ranges, as ascending starts and their lengths.

        `ids` selects coordinates of an axis, for example the blocks of a request.

        >>> Placement.packed([("B", 9), ("N", 4)], item=8).runs(B=[7, 2, 3])
        (array([ 64, 224]), array([64, 32]))
        """
        walked, rest = self._walk((), ids)
        walked = [np.unique(steps) for steps in walked]
        fold = rest.folded()
        refuse_too_many(math.prod([fold.count, *map(len, walked)]), "runs")
        steps = [np.arange(n) * s for n, s in zip(fold.sizes, fold.strides, strict=True)]
        starts = outer_sum([*walked, *steps], fold.offset)
        lengths = np.full(len(starts), fold.item, dtype=np.int64)
        if not ids and is_nested(fold.sizes, fold.strides, fold.item, apart=True):
            return starts, lengths
        return join_ranges(starts, lengths)

    def descriptors(
        self, *over: str, base: int = 0, device: int = 0, **ids: Any
    ) -> NDArray[np.uint64]:
        """Return transport descriptors: rows of (address, length, device).

        By default there is one row per run, in address order. With axes in `over`, the rows are
        grouped by the coordinates of these axes, and the first axis varies slowest. Within a group,
        rows are in address order. `ids` selects coordinates of axes. Rows are also grouped by these
        axes; axes that are only in `ids` vary faster than axes in `over`.

        >>> p = Placement.packed([("L", 2), ("B", 100), ("C", 8)])
        >>> p.descriptors("L", B=[70, 3], base=1000).tolist()
        [[1560, 8, 0], [1024, 8, 0], [2360, 8, 0], [1824, 8, 0]]
        """
        base, device = natural(base, "the base address"), natural(device, "the device id")
        self._refuse_overflow(base + self.stop)
        walked, rest = self._walk(over, ids)
        return fill_descriptors(walked, *rest.runs(), base, device)

    def view(self, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a zero-copy view of a byte buffer: the placement's axes, then the item's bytes.

        >>> Placement.packed([("B", 2), ("N", 3)], item=4).view(np.zeros(24, np.uint8)).shape
        (2, 3, 4)
        """
        if (
            not isinstance(buffer, np.ndarray)
            or buffer.dtype != np.uint8
            or buffer.ndim != 1
            or not buffer.flags.c_contiguous
        ):
            problem = "The buffer must be a contiguous one-dimensional uint8 array"
            dtype, shape = getattr(buffer, "dtype", ""), getattr(buffer, "shape", "")
            got = f"{type(buffer).__name__} {dtype} {shape}".strip()
            hint = "Pass the whole allocation as a numpy uint8 array"
            raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)
        if self.stop > buffer.size:
            got = f"bytes up to {self.stop} in a buffer of {buffer.size} bytes"
            hint = "Allocate the size that the plan specifies, or narrow the placement"
            raise AtlasError(Code.OUT_OF_BOUNDS, got=got, hint=hint)
        shape, strides = (*self.sizes, self.item), (*self.strides, 1)
        return np.lib.stride_tricks.as_strided(buffer[self.offset :], shape, strides)

    # -- helpers --------------------------------------------------------------------

    def _walk(self, over: Sequence[str], ids: Mapping[str, Any]) -> tuple[list[Int64s], Placement]:
        """Return byte offsets for each axis in `over` or `ids`, and a placement of the other axes.

        There is one array of offsets per axis. `ids` selects coordinates of an axis.
        """
        walked = [self._place(axis) for axis in (*over, *(a for a in ids if a not in over))]
        if len(set(walked)) < len(walked):
            raise bad_axes("Each axis can be named only once", over, "Remove the repeated axis")
        steps: list[Int64s] = []
        for place in walked:
            axis, size = self.axes[place], self.sizes[place]
            if axis not in ids:
                refuse_too_many(size, "coordinates")
            chosen = indices(ids[axis], size, axis) if axis in ids else np.arange(size)
            steps.append(np.atleast_1d(chosen) * self.strides[place])
        return steps, self._pick([i for i in range(len(self.axes)) if i not in walked])

    def _pick(self, places: Sequence[int], further: int = 0) -> Placement:
        """Return a placement with only the axes at indices `places`, shifted by `further` bytes.

        A part of a valid placement is valid, so it is not validated again.
        """
        part, offset = object.__new__(Placement), self.offset + further
        axes = tuple([self.axes[place] for place in places])
        sizes = tuple([self.sizes[place] for place in places])
        strides = tuple([self.strides[place] for place in places])
        set_fields(part, axes=axes, sizes=sizes, strides=strides, offset=offset, item=self.item)
        return part


def _is_axis(pair: object) -> bool:
    """Return whether `pair` has two entries, the first of them a string."""
    return isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)


def packed_steps(axes: Sequence[tuple[str, int]], item: int, fixed: Mapping[str, int]) -> list[int]:
    """Return the byte strides of densely packed axes, outermost first.

    `fixed` overrides the strides of the axes that it names.

    >>> packed_steps([("B", 3), ("N", 4), ("C", 8)], 1, {"B": 64})
    [64, 8, 1]
    """
    steps: list[int] = []
    step = item
    for axis, size in reversed(axes):
        if axis in fixed:
            step = natural(fixed[axis], f"the stride of axis {axis}")
        steps.append(step)
        step *= positive(size, f"the size of axis {axis}")
    steps.reverse()
    return steps


def fold_together(*ends: Placement) -> tuple[Placement, ...]:
    """Fold the axes that are contiguous at both ends of a copy.

    `ends` are the placements of the source and the destination. The results have the same axes,
    sorted from outermost to innermost in the first placement. Each item of a result is one run of
    the copy.

    >>> a = Placement.packed([("B", 9), ("N", 4), ("C", 8)])
    >>> b = Placement.packed([("B", 9), ("N", 4), ("C", 8)], strides={"B": 64})
    >>> fold_together(a, b)
    (Placement(B=9:32, offset=0, item=32), Placement(B=9:64, offset=0, item=32))
    """
    if not ends:
        raise bad_axes("At least one placement is required", "none", "Pass the placements to fold")
    first = ends[0]
    aligned = [end if end.axes == first.axes else end.reorder(*first.axes) for end in ends]
    if any(end.sizes != first.sizes or end.item != first.item for end in aligned):
        problem = "Both ends of a copy must have equal sizes and item sizes"
        hint = "Narrow and split both placements to the part that they share"
        raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=ends, hint=hint)
    fold = coalesce(first.axes, first.sizes, [end.strides for end in aligned], first.item)
    return tuple(
        Placement(fold.names, fold.sizes, strides, end.offset, fold.item)
        for end, strides in zip(aligned, fold.strides, strict=True)
    )
