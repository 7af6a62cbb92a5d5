"""Moving rows and blocks in and out of a cache, with torch on any device.

Everything works on the strided views of a layer, in whatever order they lie, and
allocates no more than the rows or blocks that move.
"""

from __future__ import annotations

import torch

from kvatlas.cache import LayerCache
from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.codec import decode, encode
from kvatlas.specs.attention import Attention

_CHUNK = 64
"""Blocks that are copied at once: what is staged on the way stays small."""


def write(
    layer: LayerCache,
    spec: Attention,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """K and V [tokens, heads, D] into the states that `slots` name, quantised on the way.

    A slot is block * N + state, as engines number them; a negative one is skipped.
    """
    states = layer.kernel_blocks.size("N")
    kept = slots >= 0
    if not bool(kept.all()):
        slots, k, v = slots[kept], k[kept], v[kept]
    blocks = _ids(layer, slots // states)
    places = slots % states
    for side, rows, scale in (("k", k, k_scale), ("v", v, v_scale)):
        for name, values in encode(spec, side, rows, scale=scale).items():  # type: ignore[arg-type]
            view = _by_row(layer, name)
            view[blocks, places] = values.to(view.dtype)


def read(
    layer: LayerCache,
    spec: Attention,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the states that `slots` name, as float32 [tokens, heads, D]."""
    states = layer.kernel_blocks.size("N")
    blocks, places = _ids(layer, slots // states), slots % states
    found = {
        f.name: _by_row(layer, f.name)[blocks, places] for f in layer.page.fields if not f.padding
    }
    return (
        decode(spec, "k", found, scale=k_scale),
        decode(spec, "v", found, scale=v_scale),
    )


def copy_blocks(
    source: LayerCache, ids: torch.Tensor, target: LayerCache, places: torch.Tensor
) -> None:
    """Whole blocks of one layer into another's, across orders, field by field."""
    if [f.name for f in source.page.fields] != [f.name for f in target.page.fields]:
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            "Blocks are copied between caches of the same fields",
            got=f"{list(source.fields)} and {list(target.fields)}",
            hint="Convert the cache dtype first",
        )
    if ids.numel() != places.numel():
        raise AtlasError(
            Code.UNLIKE_PLACEMENTS,
            "Every block has one place to go to",
            got=f"{ids.numel()} blocks for {places.numel()} places",
            hint="Pass two lists of one length",
        )
    ids, places = _ids(source, ids), _ids(target, places)
    for name, view in target.fields.items():
        rows = source.field(name)
        if rows.shape[1:] != view.shape[1:]:
            raise AtlasError(
                Code.UNLIKE_PLACEMENTS,
                "Blocks that are copied have the same shape",
                got=f"{name} of {tuple(rows.shape[1:])} and {tuple(view.shape[1:])}",
                hint="Route between unlike block sizes or ranks instead",
            )
        for start in range(0, ids.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            view[places[part]] = rows[ids[part]]


def zero_blocks(layer: LayerCache, ids: torch.Tensor) -> None:
    """Clear blocks of a layer: a new owner must not read what the last one left."""
    layer.tensor[_ids(layer, ids)] = 0


def _by_row(layer: LayerCache, name: str) -> torch.Tensor:
    """A field as [B, N, H, row], whatever its own axes are called."""
    view = layer.field(name)
    axes = layer.place(name).axes
    if "c" in axes:
        raise AtlasError(
            Code.NOT_CONTIGUOUS,
            "Rows are written where they lie as one axis",
            got=f"{name} with axes {axes}",
            hint="Tiled keys need a kernel of their own",
        )
    return view.permute([axes.index(axis) for axis in ("B", "N", "H", "C")])


def _ids(layer: LayerCache, ids: torch.Tensor) -> torch.Tensor:
    count = layer.kernel_blocks.size("B")
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= count):
        raise AtlasError(
            Code.OUT_OF_RANGE,
            f"Block ids are 0..{count - 1}",
            got=f"{int(ids.min())}..{int(ids.max())}",
            hint="Check the block table, and slots = block * states + state",
        )
    return ids.long()
