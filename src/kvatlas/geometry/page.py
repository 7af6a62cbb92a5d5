"""Pages: the content that one layer caches for one block, as a table of fields.

A page has H x N cells of C bytes, and optional padding at its end. The fields must cover
every byte of the cells exactly once. The constructor checks this, so overlapping fields
and holes that are not named padding are found before memory is allocated. A `Layout`
determines where pages are in memory; page and layout together determine the view of a
field.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.field import Field
from kvatlas.geometry.integers import natural, positive, set_fields
from kvatlas.geometry.layout import Layout
from kvatlas.geometry.placement import Placement
from kvatlas.geometry.validation import validate


@dataclass(frozen=True, slots=True)
class Page:
    """A table of H x N cells of C bytes, divided into fields and followed by padding.

    >>> from kvatlas.geometry import DType, FieldAxis
    >>> e4m3, cells = DType.of("e4m3"), (FieldAxis("H", 4, "H"), FieldAxis("N", 16, "N"))
    >>> k = Field("k", e4m3, (*cells, FieldAxis("C", 64, "C")))
    >>> v = Field("v", e4m3, (*cells, FieldAxis("C", 64, "C")), offset=64)
    >>> page = Page(heads=4, states=16, content=128, fields=(k, v))
    >>> page.nbytes
    8192
    >>> pool = page.place(Layout("BLHNC"), pages=2, blocks=10)
    >>> page.view(pool, "v").select("L", 1)
    Placement(B=10:16384, H=4:2048, N=16:128, C=64:1, offset=8256, item=1)
    """

    heads: int
    states: int
    content: int
    fields: tuple[Field, ...]
    padding: int = 0

    def __post_init__(self) -> None:
        set_fields(
            self,
            heads=positive(self.heads, "the number of heads of a page"),
            states=positive(self.states, "the number of states of a page"),
            content=positive(self.content, "the number of content bytes of a page"),
            fields=tuple(self.fields) if isinstance(self.fields, Iterable) else (self.fields,),
            padding=natural(self.padding, "the padding of a page"),
        )
        if not all(isinstance(field, Field) for field in self.fields):
            problem, hint = "A page must consist of Field objects", "Build pages with a spec"
            raise AtlasError(Code.BAD_FIELD, problem, got=repr(self.fields)[:100], hint=hint)
        names = [field.name for field in self.fields]
        if len(set(names)) < len(names):
            problem = "The fields of a page must have different names"
            hint = "Rename one of the fields"
            raise AtlasError(Code.BAD_FIELD, problem, got=names, hint=hint)
        alone = self.place("LBHNC", pages=1, blocks=1)
        validate({name: self.view(alone, name) for name in names}, size=self.unpadded)

    @property
    def unpadded(self) -> int:
        """Bytes of the cells, without padding."""
        return self.heads * self.states * self.content

    @property
    def nbytes(self) -> int:
        """Bytes of the page, padding included."""
        return self.unpadded + self.padding

    @property
    def lies_flat(self) -> bool:
        """Whether a field extends past the cells of one head.

        Such a field is not divided into cells.
        """
        return any(self._over_page(field) for field in self.fields)

    @property
    def in_cells(self) -> bool:
        """Whether every field stays within its cells, so that cells need not be contiguous."""
        return all(field.last_content_byte < self.content for field in self.fields)

    def field(self, name: str) -> Field:
        """Return the field called `name`."""
        for field in self.fields:
            if field.name == name:
                return field
        hint = f"Use a field of this page: {', '.join(field.name for field in self.fields)}"
        raise AtlasError(Code.UNKNOWN_FIELD, got=repr(name), hint=hint)

    def padded(self, to: int) -> Page:
        """Return this page with the padding that makes it `to` bytes long."""
        to = positive(to, "the padded size")
        if to < self.unpadded:
            got = f"{to} bytes for cells of {self.unpadded} bytes in total"
            hint = "Pass the size of the largest page in the block"
            raise AtlasError(Code.PAGE_TOO_SMALL, got=got, hint=hint)
        if to == self.nbytes:
            return self
        # Skip validation: padding follows the cells, and the fields were checked already.
        page = copy(self)
        set_fields(page, padding=to - self.unpadded)
        return page

    def place(
        self,
        layout: Layout | str,
        *,
        pages: int,
        blocks: int,
        offset: int = 0,
        page_stride: int | None = None,
        block_stride: int | None = None,
    ) -> Placement:
        """Return the placement of a pool of `blocks` blocks, each with `pages` pages like this one.

        The axes of the placement are L, B, H, N and C. Padding follows each page, so a padded
        page must be contiguous.
        """
        layout = layout if isinstance(layout, Layout) else Layout(layout)
        given = {"L": page_stride, "B": block_stride}
        strides = {axis: stride for axis, stride in given.items() if stride is not None}
        sizes = {"L": pages, "B": blocks, **self._cells}
        if self.padding:
            inner = "B" if layout.outside("L", "B") else "L"
            broken = [a for a in self._cells if sizes[a] > 1 and layout.outside(a, inner)]
            if broken:
                got = f"{layout}, with {broken[0]} of size {sizes[broken[0]]} outside {inner}"
                hint = "Use a layout that starts with L and B, or remove the padding"
                raise AtlasError(Code.PADDING_INSIDE_PAGE, got=got, hint=hint)
            strides.setdefault(inner, self.nbytes)
            for axis, step in strides.items():
                if sizes[axis] > 1 and step < self.nbytes:
                    problem = "The stride must not be smaller than a page with its padding"
                    got = f"a stride of {step} along {axis} for pages of {self.nbytes} bytes"
                    hint = "Increase the stride, or remove the padding"
                    raise AtlasError(Code.PAGE_TOO_SMALL, problem, got=got, hint=hint)
        return layout.place(offset=offset, strides=strides, **sizes)

    def pool_strides(
        self, layout: Layout, *, pages: int, blocks: int, block_stride: int | None = None
    ) -> tuple[int, int]:
        """Return (page stride, block stride) in bytes of a pool with pages like this one.

        A placement drops the stride of an axis of size 1. Engines that reserve space for more
        pages or blocks need that stride, so this method returns it even for one page or block.
        """
        # The page stride is computed with a hypothetical second page. If pages are inside
        # blocks, the given block stride may be too small for it and does not matter.
        inside = None if layout.outside("B", "L") else block_stride
        two = self.place(layout, pages=max(pages, 2), blocks=blocks, block_stride=inside)
        more = self.place(layout, pages=pages, blocks=max(blocks, 2), block_stride=block_stride)
        return two.stride("L"), more.stride("B")

    def view(self, placement: Placement, name: str) -> Placement:
        """Return the placement of one field: the page and block axes, then the field's axes.

        `placement` must come from `place`. The caller may have narrowed, selected or split it
        along pages and blocks.
        """
        field = self.field(name)
        cells = self._cells
        if placement.item != 1 or any(placement.size(a) != n for a, n in cells.items()):
            problem = "The placement must cover whole pages, with items of 1 byte"
            hint = "Pass the result of Page.place; narrow or fold the field's placement afterwards"
            got = f"{placement} for a page of {cells}"
            raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=got, hint=hint)
        self._refuse_gaps(field, placement)
        steps = {axis: placement.stride(axis) for axis in cells}
        if self.content == 1:
            steps["C"] = 1
        elif steps["C"] > 1 and field.dtype.item > 1:
            got = (
                f"elements of {field.dtype.item} bytes, with a stride of {steps['C']} between bytes"
            )
            hint = "Use a layout with C innermost"
            raise AtlasError(Code.SPLIT_ELEMENT, got=got, hint=hint)
        others = [axis for axis in placement.axes if axis not in cells]
        start = field.head * steps["H"] + field.offset * steps["C"]
        return Placement(
            (*others, *(axis.name for axis in field.axes)),
            (*map(placement.size, others), *(axis.size for axis in field.axes)),
            (*map(placement.stride, others), *(a.step * steps[a.along] for a in field.axes)),
            placement.offset + start,
            field.dtype.item,
        )

    def gaps(self, placement: Placement) -> Placement | None:
        """Return the placement of the padding after each page; None if there is no padding."""
        if not self.padding:
            return None
        for axis in "HNC":
            placement = placement.select(axis, 0)
        return replace(placement, offset=placement.offset + self.unpadded, item=self.padding)

    @property
    def _cells(self) -> dict[str, int]:
        return {"H": self.heads, "N": self.states, "C": self.content}

    def _over_page(self, field: Field) -> bool:
        return field.last_content_byte >= self.states * self.content

    def _refuse_gaps(self, field: Field, placement: Placement) -> None:
        """Raise an error if a field extends past its cell and the cells are not contiguous."""
        if field.last_content_byte < self.content:
            return
        step = placement.stride("C") or 1
        reach = sum((placement.size(axis) - 1) * placement.stride(axis) for axis in "HNC")
        # A field over the whole page works with any axis order, if the page is contiguous.
        whole = step == 1 and reach + 1 == self.unpadded
        gapless, over, ending = whole, "pages", "H, N and C, C last"
        if not self._over_page(field):
            # The axis order does not matter either if all fields are addressed from the page start.
            by_bytes = all(
                other.head == 0 and all(axis.along == "C" for axis in other.axes)
                for other in self.fields
            )
            in_states = placement.size("N") == 1 or placement.stride("N") == self.content * step
            gapless, over, ending = in_states or (whole and by_bytes), "states", "NC"
        if not gapless:
            problem = (
                f"Field {field.name} needs contiguous {over}, and they have gaps in this layout"
            )
            got = f"strides { ({axis: placement.stride(axis) for axis in 'HNC'}) }"
            hint = f"Use a layout that ends in {ending}, or a spec with packing='cells'"
            raise AtlasError(Code.NOT_CONTIGUOUS, problem, got=got, hint=hint)
