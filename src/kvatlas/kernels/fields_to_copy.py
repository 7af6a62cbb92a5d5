"""What moves when blocks are copied from one layer to another, across layouts and packings."""

from __future__ import annotations

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement, tile_alike


def placements_to_copy(source: LayerCache, target: LayerCache) -> list[tuple[Placement, Placement]]:
    """What moves, as it lies on both ends: whole cells where those are alike, else each field."""
    held = [
        {f.name: (f.dtype, f.sizes) for f in layer.page.fields if not f.padding}
        for layer in (source, target)
    ]
    if held[0] != held[1]:
        problem = "The two layers do not keep the same fields, in one shape and dtype"
        hint = "Convert the cache dtype first; route between unlike block sizes or ranks"
        got = f"{source.page} and {target.page}"
        raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=got, hint=hint)
    if cells_alike(source, target):
        return [(source.kernel_blocks, target.kernel_blocks)]
    return [tile_alike(source.place(name), target.place(name)) for name in held[0]]


def cells_alike(source: LayerCache, target: LayerCache) -> bool:
    """Whether cells can be copied as they are: fields lie alike in them.

    Where a field lies flat over a whole page, heads and states must have the same strides
    on both ends, too.
    """
    a, b = source.page, target.page
    places = [[(f.axes, f.head, f.offset) for f in page.fields] for page in (a, b)]
    sizes = {(page.heads, page.states, page.content) for page in (a, b)}
    if places[0] != places[1] or len(sizes) > 1:
        return False
    ends = source.kernel_blocks, target.kernel_blocks
    strides = {tuple(end.stride(axis) for axis in "HNC") for end in ends}
    return len(strides) == 1 or not a.lies_flat
