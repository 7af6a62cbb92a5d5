"""The order of the axes in memory, as a value that can be asked questions.

Every cache has the logical shape [L, B, H, N, C]: page, block, head, state,
content. A `Layout` says in which order those axes lie in memory, outermost
first, and is written as its letters. All 120 orders are legal values. Six of
them are in use by engines today and have names here; engines' older names NHD
and HND are spellings of two of those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.placement import Placement, packed_steps

AXES = "LBHNC"
"""The logical axes, in logical order."""

_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """An order of the five axes, outermost first.

    >>> Layout("NHD")
    Layout('LBNHC')
    >>> Layout("BHLNC").block_outermost, Layout("BHLNC").page_contiguous
    (True, False)
    >>> print(Layout("BHLNC").place(L=12, B=100, H=4, N=16, C=256).strides)
    (4096, 196608, 49152, 256, 1)
    """

    order: str

    def __post_init__(self) -> None:
        letters = self.order.upper() if isinstance(self.order, str) else ""
        letters = _ALIASES.get(letters, letters)
        if sorted(letters) != sorted(AXES):
            hint = "Write an order such as 'LBNHC', or one of the aliases NHD and HND"
            raise AtlasError(Code.BAD_ORDER, got=repr(self.order), hint=hint)
        object.__setattr__(self, "order", letters)

    def __repr__(self) -> str:
        return f"Layout({self.order!r})"

    def __str__(self) -> str:
        return self.order

    def __iter__(self) -> Iterator[str]:
        return iter(self.order)

    def outside(self, outer: str, inner: str) -> bool:
        """Axis `outer` lies outside axis `inner`.

        >>> Layout("BHLNC").outside("H", "L")
        True
        """
        return self._position(outer) < self._position(inner)

    @property
    def block_outermost(self) -> bool:
        """All pages of a block are contiguous: a block moves as one run."""
        return self.order[0] == "B"

    @property
    def layer_compact(self) -> bool:
        """All blocks of a page are contiguous: a layer's cache is a tensor of its own."""
        return self.order[0] == "L"

    @property
    def page_contiguous(self) -> bool:
        """The H x N x C bytes of a page are contiguous."""
        return set(self.order[:2]) == {"L", "B"}

    @property
    def cell_contiguous(self) -> bool:
        """The C bytes of a cell are contiguous, as every attention kernel wants them."""
        return self.order[4] == "C"

    @property
    def heads_outside_pages(self) -> bool:
        """H lies outside L: in BHLNC a TP slice of a whole block is one run."""
        return self.outside("H", "L")

    @property
    def alias(self) -> str | None:
        """NHD or HND, where the order has that older name."""
        return next((alias for alias, order in _ALIASES.items() if order == self.order), None)

    def place(
        self, *, offset: int = 0, strides: dict[str, int] | None = None, **sizes: Any
    ) -> Placement:
        """The placement of axes of these sizes, C counted in bytes, in this order.

        `strides` fixes the byte stride of some axes: blocks rounded up to an
        alignment, or pages that sit in a larger buffer.

        >>> Layout("BLNHC").place(L=2, B=3, H=1, N=4, C=8, strides={"B": 512}).stride("B")
        512
        """
        fixed = strides or {}
        if sorted(sizes) != sorted(AXES) or not set(fixed) <= set(AXES):
            problem = "The axes to place are not L, B, H, N, C"
            got = f"sizes {sorted(sizes)}, strides {sorted(fixed)}"
            hint = "Give all five sizes, 1 for an axis that is not used"
            raise AtlasError(Code.UNKNOWN_AXIS, problem, got=got, hint=hint)
        steps = packed_steps([(axis, sizes[axis]) for axis in self.order], 1, fixed)
        stride = dict(zip(self.order, steps, strict=True))
        return Placement(
            tuple(AXES),
            tuple(sizes[axis] for axis in AXES),
            tuple(stride[axis] for axis in AXES),
            offset,
        )

    def _position(self, axis: str) -> int:
        if axis not in AXES:
            hint = "L is page, B block, H head, N state, C content"
            raise AtlasError(Code.UNKNOWN_AXIS, got=repr(axis), hint=hint)
        return self.order.index(axis)


ENGINE_LAYOUTS: tuple[Layout, ...] = tuple(
    map(Layout, ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"))
)
"""The orders that engines use today."""
