"""Select the placements to copy between two layers, across layouts and packings."""

from __future__ import annotations

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement
from kvatlas.geometry.combine import tile_alike


def placements_to_copy(source: LayerCache, target: LayerCache) -> list[tuple[Placement, Placement]]:
    """Return (source, target) placements to copy: one pair for whole cells, or one pair per field.

    A cell is all bytes of one head and token. Fields are K, V and their scales.
    """
    held = [
        {f.name: (f.dtype, f.sizes) for f in layer.page.fields if not f.padding}
        for layer in (source, target)
    ]
    if held[0] != held[1]:
        problem = "Both layers must have the same fields, with the same shapes and dtypes"
        hint = "Use convert_blocks for other dtypes, kvatlas.route for other block sizes or ranks"
        got = f"{source.page} and {target.page}"
        raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=got, hint=hint)
    if cells_alike(source, target):
        return [(source.kernel_blocks, target.kernel_blocks)]
    return [tile_alike(source.place(name), target.place(name)) for name in held[0]]


def cells_alike(source: LayerCache, target: LayerCache) -> bool:
    """Return whether whole cells can be copied: both layers have equal fields at equal offsets.

    A cell is all bytes of one head and token. If a field spans a whole page, both layers must also
    have the same head stride and the same token stride.
    """
    a, b = source.page, target.page
    places = [[(f.axes, f.head, f.offset) for f in page.fields] for page in (a, b)]
    sizes = {(page.heads, page.states, page.content) for page in (a, b)}
    if places[0] != places[1] or len(sizes) > 1:
        return False
    ends = source.kernel_blocks, target.kernel_blocks
    strides = {tuple(end.stride(axis) for axis in "HNC") for end in ends}
    return len(strides) == 1 or not a.lies_flat
