"""`Affine`: the base class of `Placement`, with its attributes and their validation.

An affine map has sizes, byte strides and an offset over named axes. The constructor makes
it canonical and validates it: each axis has a name, sizes are positive integers, every
address fits in 63 bits, and no two coordinates share a byte. `Placement` adds operations.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import indices
from kvatlas.geometry.integers import INT64_MAX, are_plain, natural, positive, set_fields
from kvatlas.geometry.runs import find_difference, is_nested

_TAKEN = ("self", "base", "device")
"""Names that methods use for other parameters. They are not allowed as axis names."""

_AXIS_NAME = r"[A-Za-z_]\w*(\*[A-Za-z_]\w*)*"


@dataclass(frozen=True, slots=True)
class Affine:
    """An affine map from named coordinates to byte addresses.

    >>> p = Affine(("B", "N"), (3, 4), (64, 8), offset=16, item=8)
    >>> p(B=2, N=1), p.count, p.nbytes, p.stop, p.contiguous
    (152, 12, 96, 176, False)
    >>> p == Affine(("B", "N"), (3, 4), (64, 8), offset=16, item=8)
    True
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    item: int = 1

    def __post_init__(self) -> None:
        axes = tuple(self.axes)
        if not all(map(_is_name, axes)) or len(set(axes)) < len(axes):
            raise bad_axes(
                "Axis names must be distinct identifiers, other than self, base and device",
                axes,
                "Use names such as 'B' and 'H'",
            )
        if not len(axes) == len(self.sizes) == len(self.strides):
            raise bad_axes(
                "Each axis needs one size and one stride",
                f"axes {axes}, sizes {self.sizes}, strides {self.strides}",
                "Pass one size and one stride per axis",
            )
        sizes, steps = tuple(self.sizes), tuple(self.strides)
        if not are_plain(sizes, 1) or not are_plain(steps, 0):
            sizes = tuple(
                positive(n, f"the size of axis {a}") for a, n in zip(axes, sizes, strict=True)
            )
            steps = tuple(
                natural(s, f"the stride of axis {a}") for a, s in zip(axes, steps, strict=True)
            )
        strides = tuple(0 if n == 1 else s for n, s in zip(sizes, steps, strict=True))
        offset, item = natural(self.offset, "the offset"), positive(self.item, "the item size")
        set_fields(self, axes=axes, sizes=sizes, strides=strides, offset=offset, item=item)
        self._refuse_overflow(self.stop)
        self._refuse_overlap()

    # -- properties -----------------------------------------------------------------

    def size(self, axis: str) -> int:
        """Return the number of coordinates of `axis`."""
        return self.sizes[self._place(axis)]

    def stride(self, axis: str) -> int:
        """Return the byte stride of `axis`; 0 if its size is 1."""
        return self.strides[self._place(axis)]

    @property
    def count(self) -> int:
        """Number of coordinates: the product of all axis sizes."""
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Total bytes of the items at all coordinates, without the gaps between items."""
        return self.count * self.item

    @property
    def stop(self) -> int:
        """Address of the first byte after the placement."""
        reach = sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return self.offset + reach + self.item

    @property
    def contiguous(self) -> bool:
        """Whether the bytes form one range without gaps."""
        return self.stop - self.offset == self.nbytes

    def __call__(self, **coordinate: Any) -> Any:
        """Return the byte address of a coordinate; an array of addresses if an index is an array.

        Axes of size 1 may be omitted.

        >>> Affine(("L", "B"), (1, 4), (32, 8), offset=1)(B=[0, 3])
        array([ 1, 25])
        """
        for axis in coordinate:
            if axis not in self.axes:
                raise self._unknown(axis)
        address: Any = self.offset
        for axis, size, stride in zip(self.axes, self.sizes, self.strides, strict=True):
            if axis in coordinate:
                index = coordinate[axis]
                if type(index) is not int or not 0 <= index < size:
                    array = indices(index, size, axis)
                    index = array if array.ndim else int(array)
                address = address + index * stride
            elif size > 1:
                problem = f"The coordinate has no index for axis {axis}"
                hint = f"Pass {axis}=..., or drop the axis first with select({axis!r}, index)"
                raise bad_axes(problem, coordinate, hint)
        return address

    # -- checks -----------------------------------------------------------------------

    def _place(self, axis: str) -> int:
        if axis not in self.axes:
            raise self._unknown(axis)
        return self.axes.index(axis)

    def _unknown(self, axis: str) -> AtlasError:
        hint = f"Use an axis of this placement; its axes are: {', '.join(self.axes) or 'none'}"
        return AtlasError(Code.UNKNOWN_AXIS, got=repr(axis), hint=hint)

    def _refuse_overflow(self, stop: int) -> None:
        if stop > INT64_MAX:
            got = f"address {stop - 1} for the last byte of {self}"
            hint = "Check the sizes, the strides and the base address"
            raise AtlasError(Code.OVERFLOW, got=got, hint=hint)

    def _refuse_overlap(self) -> None:
        if is_nested(self.sizes, self.strides, self.item, apart=False):
            return
        step = find_difference(self.sizes, self.strides, 0, self.item - 1)
        if step is not None:
            one = {a: max(0, -d) for a, d in zip(self.axes, step, strict=True)}
            other = {a: max(0, d) for a, d in zip(self.axes, step, strict=True)}
            hint = "Increase the strides, or put replicas in separate allocations"
            got = f"coordinates {one} and {other} of {self}"
            raise AtlasError(Code.OVERLAP, got=got, hint=hint)

    def __repr__(self) -> str:
        parts = [
            f"{a}={n}:{s}" for a, n, s in zip(self.axes, self.sizes, self.strides, strict=True)
        ]
        parts += [f"offset={self.offset}", f"item={self.item}"]
        return f"{type(self).__name__}({', '.join(parts)})"


def _is_name(axis: object) -> bool:
    """Return whether `axis` is a valid axis name."""
    return isinstance(axis, str) and _is_valid(axis)


@lru_cache(maxsize=1024)
def _is_valid(name: str) -> bool:
    return name not in _TAKEN and re.fullmatch(_AXIS_NAME, name) is not None


def bad_axes(problem: str, got: object, hint: str) -> AtlasError:
    """Return an `AtlasError` with code `bad_axes`."""
    return AtlasError(Code.BAD_AXES, problem, got=got, hint=hint)
