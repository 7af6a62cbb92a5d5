"""`Placement`: the affine map from named coordinates to byte addresses.

It is the central value of kvatlas. A cache, one layer of it, one field, one TP
slice, one kernel block: each is a placement, and each operation on one yields
another. Nobody else multiplies strides.

Why exactly these parts: `axes` with `sizes` and byte `strides` say where
coordinates are; `offset` says where the first one is; `item` says how many
bytes lie there without a gap. The item is a byte, an element, a cell or a whole
run, depending on how far a placement has been folded, so that views, copies and
descriptors are the same value seen at different zoom.

Placements are canonical: an axis of size 1 has stride 0, so two placements with
the same axes are equal exactly when they send every coordinate to the same
bytes. They are free of overlap by construction.
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
from kvatlas.geometry.integers import integer, natural, positive
from kvatlas.geometry.runs import coalesce, is_nested


@dataclass(frozen=True, slots=True, repr=False)
class Placement(Affine):
    """Sizes, byte strides and an offset, over named axes.

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
        """Axes packed one inside the other, outermost first; `strides` fixes some.

        >>> Placement.packed([("B", 3), ("N", 4), ("C", 8)]).strides
        (32, 8, 1)
        """
        fixed = strides or {}
        if not isinstance(fixed, Mapping):
            raise bad_axes("Strides are no mapping from axes", strides, "Pass {'B': 64, ...}")
        if not isinstance(axes, Sequence) or not all(map(_is_axis, axes)):
            raise bad_axes("Axes are not pairs of a name and a size", axes, "Pass [('B', 4), ...]")
        unknown = set(fixed) - {axis for axis, _ in axes}
        if unknown:
            raise bad_axes("Strides are given for unknown axes", sorted(unknown), "Drop them")
        steps = packed_steps(axes, positive(item, "the item"), fixed)
        names, sizes = tuple(axis for axis, _ in axes), tuple(size for _, size in axes)
        return cls(names, sizes, tuple(steps), offset, item)

    @classmethod
    def from_tensor(cls, tensor: Any, axes: Sequence[str]) -> Placement:
        """Where a torch (meta too) or numpy tensor's elements lie in its storage.

        The caller names the axes: a shape alone cannot say whether a 2 is K and V
        or two blocks.

        >>> Placement.from_tensor(np.zeros((5, 4, 8), np.float32)[1:, ::2], axes="BNC")
        Placement(B=4:128, N=2:64, C=8:4, offset=128, item=4)
        """
        layout = strided(tensor)
        if layout is None:
            problem = "This is not a strided numpy or torch tensor"
            hint = "Write Placement(axes, sizes, strides) for memory described in another way"
            raise AtlasError(Code.BAD_TENSOR, problem, got=type(tensor).__name__, hint=hint)
        if len(axes) != len(layout[0]):
            got = f"axes {tuple(axes)} for shape {layout[0]}"
            raise bad_axes("Not every axis of the tensor has a name", got, "Name each axis")
        return cls(tuple(axes), *layout)

    # -- operations -----------------------------------------------------------------

    def narrow(self, axis: str, start: int, length: int) -> Placement:
        """Coordinates start .. start + length - 1 of `axis`, renumbered from 0.

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
        """One coordinate of `axis`; the axis goes.

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
        """`axis` as an outer and an inner axis of size `inner`.

        A block of 64 states as 4 kernel blocks of 16, that then join the blocks:

        >>> p = Placement.packed([("B", 10), ("N", 64), ("C", 8)])
        >>> p.split("N", into=("k", "N"), inner=16).fold("B", "k", into="B")
        Placement(B=40:128, N=16:8, C=8:1, offset=0, item=1)
        """
        place = self._place(axis)
        if not isinstance(into, tuple | list) or len(into) != 2:
            raise bad_axes("An axis is split into two", into, "Pass two names, outer and inner")
        size, stride = self.sizes[place], self.strides[place]
        inner = positive(inner, "the inner size")
        if size % inner:
            problem = f"The inner size does not divide axis {axis}"
            got, hint = f"{size} into pieces of {inner}", "Narrow the axis to a multiple first"
            raise AtlasError(Code.NOT_DIVISIBLE, problem, got=got, hint=hint)
        outer = (into[0], size // inner, stride * inner)
        return self.replace_axes(place, place + 1, outer, (into[1], inner, stride))

    def fold(self, outer: str, inner: str, *, into: str | None = None) -> Placement:
        """Two axes as one, where stepping over all of `inner` is one step of `outer`.

        >>> Placement.packed([("H", 2), ("N", 4), ("C", 8)]).fold("H", "N")
        Placement(H*N=8:8, C=8:1, offset=0, item=1)
        """
        o, i = self._place(outer), self._place(inner)
        many, few, step = self.sizes[o], self.sizes[i], self.strides[i]
        if o == i or (many > 1 and few > 1 and self.strides[o] != few * step):
            got = f"{outer} with stride {self.strides[o]} over {inner} of {few} x {step} bytes"
            hint = "Keep both axes, or choose an order in which they are neighbours"
            raise AtlasError(Code.NOT_FOLDABLE, got=got, hint=hint)
        folded = (into or f"{outer}*{inner}", many * few, step if few > 1 else self.strides[o])
        kept = self._pick([place for place in range(len(self.axes)) if place != i])
        place = o - (i < o)
        return kept.replace_axes(place, place + 1, folded)

    def reorder(self, *axes: str) -> Placement:
        """The same map with its axes listed in another order.

        >>> Placement.packed([("B", 2), ("H", 3)]).reorder("H", "B")
        Placement(H=3:1, B=2:3, offset=0, item=1)
        """
        places = [self._place(axis) for axis in axes]
        if sorted(places) != list(range(len(self.axes))):
            problem = "The new order does not list every axis once"
            raise bad_axes(problem, axes, f"Permute {self.axes}")
        return self._pick(places)

    def rename(self, **names: str) -> Placement:
        """Other names for some axes.

        >>> Placement.packed([("k", 2), ("N", 4)]).rename(k="B").axes
        ('B', 'N')
        """
        for axis in names:
            self._place(axis)
        return replace(self, axes=tuple(names.get(axis, axis) for axis in self.axes))

    def replace_axes(self, start: int, stop: int, *axes: tuple[str, int, int]) -> Placement:
        """The axes from `start` to `stop` replaced by others, each (name, size, stride)."""
        names, sizes, strides = zip(*axes, strict=True)
        return replace(
            self,
            axes=(*self.axes[:start], *names, *self.axes[stop:]),
            sizes=(*self.sizes[:start], *sizes, *self.sizes[stop:]),
            strides=(*self.strides[:start], *strides, *self.strides[stop:]),
        )

    def shift(self, by: int) -> Placement:
        """The same map, `by` bytes further on."""
        return replace(self, offset=self.offset + integer(by, "the shift"))

    def in_items(self) -> Placement:
        """The same map, counted in items instead of bytes.

        >>> Placement.packed([("N", 4), ("C", 8)], item=2, offset=32).in_items()
        Placement(N=4:8, C=8:1, offset=16, item=1)
        """
        if any(number % self.item for number in (self.offset, *self.strides)):
            problem = "Elements do not start at multiples of their size"
            hint = "Plan pages and blocks whose sizes are multiples of the element"
            raise AtlasError(Code.MISALIGNED, problem, got=self, hint=hint)
        strides = tuple(stride // self.item for stride in self.strides)
        return Placement(self.axes, self.sizes, strides, self.offset // self.item, 1)

    def folded(self) -> Placement:
        """As few axes as possible, outermost first, and as large an item.

        >>> Placement.packed([("B", 9), ("N", 4), ("C", 8)], strides={"B": 64}).folded()
        Placement(B=9:64, offset=0, item=32)
        """
        return fold_together(self)[0]

    # -- arrays ---------------------------------------------------------------------

    def runs(self, **ids: Any) -> tuple[Int64s, Int64s]:
        """The maximal stretches, as starts (ascending) and lengths.

        `ids` picks coordinates of an axis: the blocks of a request, say.

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
        """What a transport takes: rows of (address, length, device).

        One row for every maximal run; or, with axes named, the rows of each of
        their coordinates in turn, first axis slowest, and within a coordinate by
        address. `ids` picks coordinates of an axis; such an axis comes last
        unless named.

        >>> p = Placement.packed([("L", 2), ("B", 100), ("C", 8)])
        >>> p.descriptors("L", B=[70, 3], base=1000).tolist()
        [[1560, 8, 0], [1024, 8, 0], [2360, 8, 0], [1824, 8, 0]]
        """
        base, device = natural(base, "the base address"), natural(device, "the device id")
        self._refuse_overflow(base + self.stop)
        walked, rest = self._walk(over, ids)
        return fill_descriptors(walked, *rest.runs(), base, device)

    def view(self, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The items in a byte buffer, without a copy: one axis for each axis, then the item.

        >>> Placement.packed([("B", 2), ("N", 3)], item=4).view(np.zeros(24, np.uint8)).shape
        (2, 3, 4)
        """
        if (
            not isinstance(buffer, np.ndarray)
            or buffer.dtype != np.uint8
            or buffer.ndim != 1
            or not buffer.flags.c_contiguous
        ):
            problem = "The buffer is not one contiguous axis of uint8"
            got = f"{type(buffer).__name__} {getattr(buffer, 'shape', '')}"
            hint = "Pass the whole allocation as a numpy array of bytes"
            raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)
        if self.stop > buffer.size:
            got = f"bytes up to {self.stop} of a buffer of {buffer.size}"
            hint = "Allocate what the plan says, or narrow the view"
            raise AtlasError(Code.OUT_OF_BOUNDS, got=got, hint=hint)
        shape, strides = (*self.sizes, self.item), (*self.strides, 1)
        return np.lib.stride_tricks.as_strided(buffer[self.offset :], shape, strides)

    # -- inside ---------------------------------------------------------------------

    def _walk(self, over: Sequence[str], ids: Mapping[str, Any]) -> tuple[list[Int64s], Placement]:
        """Byte steps of the axes that are walked, and what is left of the placement."""
        walked = [self._place(axis) for axis in (*over, *(a for a in ids if a not in over))]
        if len(set(walked)) < len(walked):
            raise bad_axes("An axis is named twice", over, "Name each axis once")
        steps: list[Int64s] = []
        for place in walked:
            axis, size = self.axes[place], self.sizes[place]
            if axis not in ids:
                refuse_too_many(size, "coordinates")
            chosen = indices(ids[axis], size, axis) if axis in ids else np.arange(size)
            steps.append(np.atleast_1d(chosen) * self.strides[place])
        return steps, self._pick([i for i in range(len(self.axes)) if i not in walked])

    def _pick(self, places: Sequence[int], further: int = 0) -> Placement:
        """Some axes alone, `further` bytes on."""
        return Placement(
            tuple(self.axes[place] for place in places),
            tuple(self.sizes[place] for place in places),
            tuple(self.strides[place] for place in places),
            self.offset + further,
            self.item,
        )


def _is_axis(pair: object) -> bool:
    """Whether something is the name of an axis and its size."""
    return isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)


def packed_steps(axes: Sequence[tuple[str, int]], item: int, fixed: Mapping[str, int]) -> list[int]:
    """Byte strides of axes packed one inside the other, outermost first, some of them fixed.

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
    """The ends of a copy, folded where every one of them is gapless.

    What is left is the same axes for all of them, outermost first as the first
    end has them; an item is then one run of the copy.

    >>> a = Placement.packed([("B", 9), ("N", 4), ("C", 8)])
    >>> b = Placement.packed([("B", 9), ("N", 4), ("C", 8)], strides={"B": 64})
    >>> fold_together(a, b)
    (Placement(B=9:32, offset=0, item=32), Placement(B=9:64, offset=0, item=32))
    """
    if not ends:
        raise bad_axes("The copy has no ends", ends, "Pass at least one placement")
    first = ends[0]
    aligned = [end if end.axes == first.axes else end.reorder(*first.axes) for end in ends]
    if any(end.sizes != first.sizes or end.item != first.item for end in aligned):
        problem = "The ends of the copy have different sizes or items"
        hint = "Narrow and split both ends to the part that they share"
        raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=ends, hint=hint)
    fold = coalesce(first.axes, first.sizes, [end.strides for end in aligned], first.item)
    return tuple(
        Placement(fold.names, fold.sizes, strides, end.offset, fold.item)
        for end, strides in zip(aligned, fold.strides, strict=True)
    )
