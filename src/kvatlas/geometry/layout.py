"""`Layout`: the order of the axes in memory.

Every cache has the logical shape [L, B, H, N, C]: page, block, head, state, content.
A `Layout` specifies the order of these axes in memory, outermost first, and is written
as their letters. All 120 orders are valid. Engines use the six in `ENGINE_LAYOUTS`. NHD and
HND are older names for two of the six, and are accepted as aliases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.placement import Placement, packed_steps

AXES = "LBHNC"
"""The logical axes, in the order of the logical shape."""

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
        """Return whether axis `outer` is outside axis `inner` in memory.

        >>> Layout("BHLNC").outside("H", "L")
        True
        """
        return self._position(outer) < self._position(inner)

    @property
    def block_outermost(self) -> bool:
        """Whether all pages of a block are contiguous, so that a block is copied as one run."""
        return self.order[0] == "B"

    @property
    def layer_compact(self) -> bool:
        """Whether all blocks of a layer are contiguous, so that each layer is a separate tensor."""
        return self.order[0] == "L"

    @property
    def page_contiguous(self) -> bool:
        """Whether the H x N x C bytes of a page are contiguous."""
        return set(self.order[:2]) == {"L", "B"}

    @property
    def cell_contiguous(self) -> bool:
        """Whether the C bytes of a cell are contiguous, as attention kernels require.

        A cell is one head of one state.
        """
        return self.order[4] == "C"

    @property
    def heads_outside_pages(self) -> bool:
        """Whether H is outside L, so that the same heads of several layers may be contiguous."""
        return self.outside("H", "L")

    @property
    def alias(self) -> str | None:
        """The older name of the order, NHD or HND; None if it has none."""
        return next((alias for alias, order in _ALIASES.items() if order == self.order), None)

    def place(
        self, *, offset: int = 0, strides: dict[str, int] | None = None, **sizes: Any
    ) -> Placement:
        """Return a placement with the given axis sizes and the memory order of this layout.

        The size of C is in bytes.
        `strides` fixes the byte stride of some axes, for example for blocks that are padded
        to an alignment or pages inside a larger buffer.

        >>> Layout("BLNHC").place(L=2, B=3, H=1, N=4, C=8, strides={"B": 512}).stride("B")
        512
        """
        fixed = strides or {}
        if sorted(sizes) != sorted(AXES):
            problem = "Sizes must be given for exactly the axes L, B, H, N and C"
            got = f"sizes for {', '.join(sorted(sizes)) or 'no axis'}"
            hint = "Pass these five sizes; pass 1 for an unused axis"
            raise AtlasError(Code.UNKNOWN_AXIS, problem, got=got, hint=hint)
        if unknown := sorted(set(fixed) - set(AXES)):
            raise AtlasError(
                Code.UNKNOWN_AXIS,
                "Strides can be given only for the axes L, B, H, N and C",
                got=f"strides for {unknown}",
                hint="Remove the strides of other axes",
            )
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
            hint = "Use L (page), B (block), H (head), N (state) or C (content)"
            raise AtlasError(Code.UNKNOWN_AXIS, got=repr(axis), hint=hint)
        return self.order.index(axis)


ENGINE_LAYOUTS: tuple[Layout, ...] = tuple(
    map(Layout, ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"))
)
"""The orders that engines use."""
