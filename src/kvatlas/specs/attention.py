"""Attention that keeps K and V for each head.

The kinds differ in which tokens a request still needs, never in the bytes of a
page: full keeps all, sliding the last `window`, chunked those since the last
multiple of `chunk`, sink the last ones and the first `sink_tokens`, cross the
encoder's, encoder-only none. So one base class owns the page, and each kind adds
a number or two.

`packing` says where K and V sit in the page:

- `cells`: K then V in each cell, what most backends take;
- `head_groups`: K in the first half of the heads, V in the second
  (FlashInfer's fp8 and nvfp4);
- `planes`: one head holds K of all heads, the other V (two-plane backends);
- `tiled_planes`: planes with K as [H, D/x, N, x] of 16-byte tiles and V as [H, D, N]
  (ROCm's paged attention);
- `transposed`: in each head K as [D, N], then V as [N, D] (vLLM's CPU attention).
"""

from __future__ import annotations

from typing import Literal

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import (
    Field,
    FieldAxis,
    Page,
    Shard,
    Sharding,
    flat_field,
    in_cells,
    in_planes,
    row_bytes,
)
from kvatlas.specs.base import Spec, bad_spec, check, plain_dtype
from kvatlas.specs.cell_content import Sides, sides

Packing = Literal["cells", "head_groups", "planes", "tiled_planes", "transposed"]
Scales = Literal["inline", "planes", "state_planes"]

_TILE_BYTES = 16


class Attention(Spec, frozen=True, kw_only=True):
    """K and V of `heads` heads: what all kinds of attention share."""

    heads: int
    head_dim: int
    v_dim: int | None = None
    """Elements of a V row where they differ from K's."""
    dtype: str = "bf16"
    cache: str = "auto"
    packing: Packing | None = None
    """None for what the cache dtype wants: head groups for nvfp4, else cells."""
    scales: Scales | None = None
    """Where head groups keep block scales: in each cell, or behind all data of a side.
    FlashInfer reads `planes` of rows (H, N) in head-major pages and `state_planes` of rows
    (N, H) in state-major ones. None for planes with nvfp4, else inline."""

    def __post_init__(self) -> None:
        check(self)
        both, packing = self._sides(), self.packed_as
        k, v = row_bytes(both.k), row_bytes(both.v)
        if k != v and packing not in ("cells", "transposed"):
            problem = f"Packing {packing} has no place for K and V rows of different sizes"
            raise bad_spec(problem, f"{k} and {v} bytes", "Use packing cells")
        if packing in ("tiled_planes", "transposed") and len(both.k) + len(both.v) > 2:
            problem, hint = f"Packing {packing} has no place for scales", "Use cells or head_groups"
            raise bad_spec(problem, f"cache dtype {self.cache}", hint)
        if self.cache == "nvfp4" and packing != "head_groups":
            problem = "nvfp4 is read in head groups only"
            raise bad_spec(problem, f"packing {packing}", "Leave packing out")
        if self.scales not in (None, "inline") and packing != "head_groups":
            problem = f"Packing {packing} keeps no scales in planes"
            raise bad_spec(problem, f"scales {self.scales}", "Use packing head_groups")
        if packing == "tiled_planes" and k % _TILE_BYTES:
            problem = f"Tiles of {_TILE_BYTES} bytes do not divide a row of K"
            raise bad_spec(problem, f"{k} bytes in a row", "Use packing planes")

    @property
    def packed_as(self) -> Packing:
        """The packing in use."""
        return self.packing or ("head_groups" if self.cache == "nvfp4" else "cells")

    @property
    def scales_as(self) -> Scales:
        """Where block scales lie."""
        return self.scales or ("planes" if self.cache == "nvfp4" else "inline")

    @property
    def tokens_per_state(self) -> int | None:
        """One state for each token."""
        return 1

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:
        """The page on one rank; K and V heads are repeated past their number.

        >>> FullAttention(heads=8, head_dim=128).page(16, tp=2).nbytes
        32768
        """
        states, sharding = self.states(block), Sharding.by_heads(self.heads)
        heads, shard = sharding.size(tp), Shard(sharding, sharding.ranges(tp, rank))
        both = self._sides()
        row = row_bytes(both.k)
        shape = (heads, row + row_bytes(both.v))
        match self.packed_as:
            case "cells":
                fields = in_cells([*both.k, *both.v], _cells(heads, states), shard)
            case "transposed":
                fields = _transposed(both, heads, states, shard)
            case "head_groups":
                shape = (2 * heads, row)
                fields = self._head_groups(both, heads, states, shard)
            case "planes":
                shape = (2, heads * row)
                cells = (FieldAxis("H", heads, "C", row), FieldAxis("N", states, "N"))
                fields = in_cells(both.k, cells, shard) + in_cells(both.v, cells, shard, head=1)
            case "tiled_planes":
                shape = (2, heads * row)
                fields = _tiled(both, heads, states, shard)
        return Page(shape[0], states, shape[1], tuple(fields))

    def _sides(self) -> Sides:
        dtype = plain_dtype(self.dtype)
        return sides(self.cache, dtype, self.head_dim, self.v_dim or self.head_dim)

    def _head_groups(self, both: Sides, heads: int, states: int, shard: Shard) -> list[Field]:
        """K in the first half of the heads and V in the second."""
        if self.scales_as == "inline":
            cells = _cells(heads, states)
            return in_cells(both.k, cells, shard) + in_cells(both.v, cells, shard, head=heads)
        rows = [("H", heads), ("N", states)]
        if self.scales_as == "state_planes":
            rows.reverse()
        planes = [[part] for part in (*both.k, *both.v)]
        return in_planes(planes, rows, shard, axes=("H", "N"))


class FullAttention(Attention, frozen=True, kw_only=True, tag="full_attention"):
    """Every token is kept.

    >>> page = FullAttention(heads=8, head_dim=128, cache="nvfp4").page(16)
    >>> page.heads, page.states, page.content
    (16, 16, 72)
    """


class SlidingAttention(Attention, frozen=True, kw_only=True, tag="sliding_window"):
    """The last `window` tokens are kept.

    >>> SlidingAttention(heads=8, head_dim=64, window=128).visibility.first(1000)
    873
    """

    window: int


class ChunkedAttention(Attention, frozen=True, kw_only=True, tag="chunked_attention"):
    """The tokens since the last multiple of `chunk` are kept."""

    chunk: int


class SinkAttention(Attention, frozen=True, kw_only=True, tag="sink_attention"):
    """The first `sink_tokens` tokens are always kept; of the others the last `window`, or all.

    Sinks that are learned logits rather than rows take no cache: use the other kinds.
    """

    sink_tokens: int
    window: int | None = None


class CrossAttention(Attention, frozen=True, kw_only=True, tag="cross_attention"):
    """The encoder's `source` tokens, written once for each request."""

    source: int


class EncoderOnlyAttention(Attention, frozen=True, kw_only=True, tag="encoder_only_attention"):
    """Attention within one forward pass: nothing is kept."""

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:  # noqa: ARG002
        """Refused: there is no page."""
        problem = "Encoder-only attention keeps nothing between passes"
        got, hint = "a request for its page", "Leave the layer out of the plan"
        raise AtlasError(Code.NO_CACHE, problem, got=got, hint=hint)


def _cells(heads: int, states: int) -> tuple[FieldAxis, FieldAxis]:
    return FieldAxis("H", heads, "H"), FieldAxis("N", states, "N")


def _transposed(both: Sides, heads: int, states: int, shard: Shard) -> list[Field]:
    """In each head K as [D, N], then V as [N, D]."""
    (k,), (v,) = both
    head = (FieldAxis("H", heads, "H"),)
    k_rows, v_rows = [("C", k.items), ("N", states)], [("N", states), ("C", v.items)]
    after = row_bytes([k]) * states
    return [
        flat_field("k", k.dtype, k_rows, shard, axes=("N", "C"), cells=head),
        flat_field("v", v.dtype, v_rows, shard, cells=head, offset=after),
    ]


def _tiled(both: Sides, heads: int, states: int, shard: Shard) -> list[Field]:
    """K as [H, D/x, N, x], so that a thread loads 16 bytes of one state; V as [H, D, N]."""
    (k,), (v,) = both
    tile = _TILE_BYTES // k.dtype.item
    k_rows = [("H", heads), ("C", k.items // tile), ("N", states), ("c", tile)]
    v_rows = [("H", heads), ("C", v.items), ("N", states)]
    return [
        flat_field("k", k.dtype, k_rows, shard, axes=("H", "N", "C", "c")),
        flat_field("v", v.dtype, v_rows, shard, axes=("H", "N", "C"), head=1),
    ]
