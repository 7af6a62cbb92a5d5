"""`Affine`: what a placement is, and what it can never be.

Sizes, byte strides and an offset over named axes, canonical and checked when
constructed: axes have names, sizes are whole and positive, every address fits in
63 bits, and no two coordinates share a byte. `Placement` adds the verbs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import indices
from kvatlas.geometry.integers import INT64_MAX, are_plain, natural, positive, set_fields
from kvatlas.geometry.runs import find_difference, is_nested

_TAKEN = ("self", "base", "device")
"""Words that calls use for something else than an axis."""

_AXIS_NAME = re.compile(r"[A-Za-z_]\w*(\*[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class Affine:
    """The map itself: coordinates in, addresses out.

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
            problem = "Axes lack a name, or share one"
            raise bad_axes(problem, axes, "Name them 'B', 'H' and so on")
        if not len(axes) == len(self.sizes) == len(self.strides):
            got = f"axes {axes}, sizes {self.sizes}, strides {self.strides}"
            raise bad_axes("Some axes lack a size or a stride", got, "Match the lengths")
        sizes, steps = tuple(self.sizes), tuple(self.strides)
        if not are_plain(sizes, 1) or not are_plain(steps, 0):
            sizes = tuple(
                positive(n, f"the size of axis {a}") for a, n in zip(axes, sizes, strict=True)
            )
            steps = tuple(
                natural(s, f"the stride of axis {a}") for a, s in zip(axes, steps, strict=True)
            )
        strides = tuple(0 if n == 1 else s for n, s in zip(sizes, steps, strict=True))
        offset, item = natural(self.offset, "the offset"), positive(self.item, "the item")
        set_fields(self, axes=axes, sizes=sizes, strides=strides, offset=offset, item=item)
        self._refuse_overflow(self.stop)
        self._refuse_overlap()

    # -- questions ------------------------------------------------------------------

    def size(self, axis: str) -> int:
        """How many coordinates `axis` has."""
        return self.sizes[self._place(axis)]

    def stride(self, axis: str) -> int:
        """Bytes between neighbours along `axis`; 0 where there is only one."""
        return self.strides[self._place(axis)]

    @property
    def count(self) -> int:
        """Number of coordinates."""
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes that belong to the placement, gaps left out."""
        return self.count * self.item

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        reach = sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return self.offset + reach + self.item

    @property
    def contiguous(self) -> bool:
        """One stretch without a gap."""
        return self.stop - self.offset == self.nbytes

    def __call__(self, **coordinate: Any) -> Any:
        """The address of a coordinate: an int, or an array where any index is one.

        Axes of size 1 may be left out.

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
                problem = f"The coordinate leaves out axis {axis}"
                raise bad_axes(problem, coordinate, f"Add {axis}=..., or select it first")
        return address

    # -- checks -----------------------------------------------------------------------

    def _place(self, axis: str) -> int:
        if axis not in self.axes:
            raise self._unknown(axis)
        return self.axes.index(axis)

    def _unknown(self, axis: str) -> AtlasError:
        hint = f"This placement has {', '.join(self.axes) or 'no axes'}"
        return AtlasError(Code.UNKNOWN_AXIS, got=repr(axis), hint=hint)

    def _refuse_overflow(self, stop: int) -> None:
        if stop > INT64_MAX:
            got = f"a last byte at {stop - 1} for {self}"
            hint = "Check the sizes, the strides and the base address"
            raise AtlasError(Code.OVERFLOW, got=got, hint=hint)

    def _refuse_overlap(self) -> None:
        if is_nested(self.sizes, self.strides, self.item, apart=False):
            return
        step = find_difference(self.sizes, self.strides, 0, self.item - 1)
        if step is not None:
            one = {a: max(0, -d) for a, d in zip(self.axes, step, strict=True)}
            other = {a: max(0, d) for a, d in zip(self.axes, step, strict=True)}
            hint = "Widen the strides, or give replicas an allocation of their own"
            raise AtlasError(Code.OVERLAP, got=f"{one} and {other} in {self}", hint=hint)

    def __repr__(self) -> str:
        parts = [
            f"{a}={n}:{s}" for a, n, s in zip(self.axes, self.sizes, self.strides, strict=True)
        ]
        parts += [f"offset={self.offset}", f"item={self.item}"]
        return f"{type(self).__name__}({', '.join(parts)})"


def _is_name(axis: object) -> bool:
    """Whether a placement can have an axis of that name."""
    if not isinstance(axis, str) or axis in _TAKEN:
        return False
    plain = axis.isascii() and axis.isidentifier()
    return plain or _AXIS_NAME.fullmatch(axis) is not None


def bad_axes(problem: str, got: object, hint: str) -> AtlasError:
    """The error for axis names that are missing, repeated or unknown."""
    return AtlasError(Code.BAD_AXES, problem, got=got, hint=hint)
