"""The bytes of one block, divided into bytes that pages use and bytes that nothing uses.

A pool is divided into cells of one size, and cell i belongs to block i % blocks. With blocks
outermost, a block has one cell; with layers outermost, it has one for each page. A cell may have
bytes that are in no page: padding after a page, padding that aligns the block, or space for a page
that the block's group does not have. Like the rest of the cell, they belong to this block only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvatlas.geometry.address_arrays import Int64s, outer_sum
from kvatlas.geometry.placement import Placement

_MOST_RUNS = 1 << 16
"""Maximum number of runs in a block; blocks with more have no image."""


class UnusedBytes(NamedTuple):
    """A range of bytes of a block that nothing uses.

    A block consists of equal cells (parts of the pool, not the cells of a page). `cell` is the
    index of a cell in the block, and `start` is the offset of the range in the cell. `page` is the
    page directly before the range, or directly after it if the range is at the start of the cell.
    `inside` is true if the range is between two runs, and not at an end of the cell.
    """

    cell: int
    start: int
    length: int
    page: int
    inside: bool


class BlockImage(NamedTuple):
    """The runs of the pages of one block, sorted by cell and then by start."""

    size: int
    """Bytes of a cell."""
    cells: Int64s
    starts: Int64s
    lengths: Int64s
    pages: Int64s
    """The index of the page that each run belongs to."""

    @classmethod
    def of(cls, regions: Sequence[Placement], size: int, blocks: int) -> BlockImage | None:
        """Return the image of a block of a pool with `blocks` blocks and cells of `size` bytes.

        `regions` are placements of pages with the axes L and B. Returns None if the pages of a
        block use cells of other blocks, or if they have too many runs.

        >>> pages = Placement.packed([("B", 4), ("L", 2), ("C", 6)], strides={"B": 20, "L": 8})
        >>> image = BlockImage.of([pages], 20, 4)
        >>> [(one.start, one.length, one.inside) for one in image.unused()]
        [(6, 2, True), (14, 6, False)]
        """
        found: list[tuple[Int64s, Int64s, Int64s]] = []
        first = 0
        for placed in regions:
            if blocks < 2 or placed.stride("B") != size:
                return None
            page = placed.select("L", 0).select("B", 0)
            if page.folded().count * placed.size("L") > _MOST_RUNS:
                return None
            starts, lengths = page.runs()
            count = placed.size("L")
            steps = np.arange(count) * placed.stride("L")
            numbers = np.repeat(np.arange(first, first + count), len(starts))
            found.append((outer_sum([steps, starts]), np.tile(lengths, count), numbers))
            first += count
        starts, lengths, pages = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.argsort(starts, kind="stable")
        starts, lengths, pages = starts[order], lengths[order], pages[order]
        cells, inside = np.divmod(starts, size)
        if (cells % blocks).any() or (inside + lengths > size).any():
            return None
        return cls(size, cells // blocks, inside, lengths, pages)

    def equals(self, other: BlockImage) -> bool:
        """Return whether both blocks have the same runs of the same pages in the same cells."""
        if self is other:
            return True
        return self.size == other.size and all(
            np.array_equal(mine, theirs) for mine, theirs in zip(self[1:], other[1:], strict=True)
        )

    def unused(self) -> list[UnusedBytes]:
        """Return the ranges of the image's cells that no run covers, in order."""
        stops = self.starts + self.lengths
        first = np.diff(self.cells, prepend=-1) != 0
        last = np.append(first[1:], True)
        leading = np.where(first, self.starts, 0)
        following = np.append(self.starts[1:], 0)
        trailing = np.where(last, self.size, following) - stops
        found = []
        for index in np.flatnonzero((leading > 0) | (trailing > 0)).tolist():
            cell, page = int(self.cells[index]), int(self.pages[index])
            if leading[index]:
                found.append(UnusedBytes(cell, 0, int(leading[index]), page, inside=False))
            if trailing[index] > 0:
                start, length = int(stops[index]), int(trailing[index])
                found.append(UnusedBytes(cell, start, length, page, inside=not last[index]))
        return found

    def offset(self, unused: UnusedBytes, blocks: int) -> int:
        """Return where `unused` begins for block 0, as an offset in a pool of `blocks` blocks."""
        return unused.cell * blocks * self.size + unused.start

    @property
    def nbytes(self) -> int:
        """Bytes that the pages of a block use."""
        return int(self.lengths.sum())
