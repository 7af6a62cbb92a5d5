"""Specs of attention that caches K and V for each head.

The specs differ in the tokens that a request must keep, not in the bytes of a page. Full attention
keeps all tokens. Sliding attention keeps the last `window` tokens, chunked attention the tokens
since the last multiple of `chunk`, sink attention the first `sink_tokens` and the last `window`,
and cross-attention the tokens of the encoder. Encoder-only attention keeps none. One base class
therefore defines the page, and each spec adds one or two parameters.

`packing` specifies where K and V are in the page:

- `cells`: K, then V in each cell, as most backends expect;
- `head_groups`: K in the first half of the heads, V in the second
  (FlashInfer's fp8 and nvfp4);
- `planes`: the page has two heads; the first holds K of all heads, the second V of all heads
  (two-plane backends);
- `tiled_planes`: planes with K as [H, D/x, N, x] of 16-byte tiles and V as [H, D, N]
  (ROCm's paged attention);
- `transposed`: K as [D, N], then V as [N, D] in each head (vLLM's CPU attention).
"""

from __future__ import annotations

from typing import Literal

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Field, FieldAxis, Page, Shard, Sharding
from kvatlas.geometry.packing import ElementRow, flat_field, in_cells, in_planes, row_bytes
from kvatlas.specs.base import Spec, bad_spec, check, plain_dtype
from kvatlas.specs.cell_content import Sides, sides

Packing = Literal["cells", "head_groups", "planes", "tiled_planes", "transposed"]
Scales = Literal["inline", "planes", "state_planes", "head_planes"]

_TILE_BYTES = 16


class Attention(Spec, frozen=True, kw_only=True):
    """Base class of specs that cache K and V for each of `heads` heads."""

    heads: int
    head_dim: int
    v_dim: int | None = None
    """Elements of a V row, if different from `head_dim`."""
    dtype: str = "bf16"
    cache: str = "auto"
    packing: Packing | None = None
    """None selects the default of the cache dtype: head groups for nvfp4, otherwise cells."""
    scales: Scales | None = None
    """Location of the scales, for packing `head_groups`: in each cell (`inline`), or in a plane
    after all data of K and another after all data of V. The rows of a plane are ordered (H, N) with
    `planes` and (N, H) with `state_planes`; FlashInfer expects these for head-major and for
    state-major pages. With `head_planes`, each head has its data, then its scales, so that heads
    need not be adjacent. None selects `planes` for nvfp4, otherwise `inline`; `plan()` selects the
    location that its layout allows (`in_layout`)."""

    def __post_init__(self) -> None:
        check(self)
        both, packing = self._sides(), self.packed_as
        k, v = row_bytes(both.k), row_bytes(both.v)
        if k != v and packing not in ("cells", "transposed"):
            raise bad_spec(
                f"Packing {packing} requires K and V rows of the same size",
                f"K rows of {k} bytes and V rows of {v} bytes",
                "Use packing='cells'",
            )
        if packing in ("tiled_planes", "transposed") and len(both.k) + len(both.v) > 2:
            raise bad_spec(
                f"Packing {packing} does not support cache dtypes with scales",
                f"cache={self.cache!r}",
                "Use packing='cells' or packing='head_groups'",
            )
        if self.cache == "nvfp4" and packing != "head_groups":
            raise bad_spec(
                "Cache dtype nvfp4 requires packing='head_groups'",
                f"packing={packing!r}",
                "Omit the packing parameter",
            )
        if self.scales not in (None, "inline") and packing != "head_groups":
            raise bad_spec(
                f"Packing {packing} does not support scales in planes",
                f"scales={self.scales!r}",
                "Use packing='head_groups'",
            )
        if packing == "tiled_planes" and k % _TILE_BYTES:
            raise bad_spec(
                f"Packing tiled_planes requires K rows of a multiple of {_TILE_BYTES} bytes",
                f"a K row of {k} bytes",
                "Use packing='planes'",
            )

    @property
    def packed_as(self) -> Packing:
        """`packing`, or the default of the cache dtype if `packing` is None."""
        return self.packing or ("head_groups" if self.cache == "nvfp4" else "cells")

    @property
    def scales_as(self) -> Scales:
        """`scales` (their location), or the default of the cache dtype if `scales` is None."""
        return self.scales or ("planes" if self.cache == "nvfp4" else "inline")

    @property
    def tokens_per_state(self) -> int | None:
        """Always 1: attention stores one state per token."""
        return 1

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:
        """Return the page of one rank; heads are replicated if there are more ranks than heads.

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
        """Return the fields of packing `head_groups`: K in the first half of the heads, then V."""
        if self.scales_as == "inline":
            cells = _cells(heads, states)
            return in_cells(both.k, cells, shard) + in_cells(both.v, cells, shard, head=heads)
        if self.scales_as == "head_planes":
            k = _planes_of_heads(both.k, heads, states, shard)
            return k + _planes_of_heads(both.v, heads, states, shard, head=heads)
        rows = [("H", heads), ("N", states)]
        if self.scales_as == "state_planes":
            rows.reverse()
        planes = [[part] for part in (*both.k, *both.v)]
        return in_planes(planes, rows, shard, axes=("H", "N"))


class FullAttention(Attention, frozen=True, kw_only=True, tag="full_attention"):
    """Attention to all tokens.

    >>> page = FullAttention(heads=8, head_dim=128, cache="nvfp4").page(16)
    >>> page.heads, page.states, page.content
    (16, 16, 72)
    """


class SlidingAttention(Attention, frozen=True, kw_only=True, tag="sliding_window"):
    """Attention to the last `window` tokens.

    >>> SlidingAttention(heads=8, head_dim=64, window=128).visibility.first(1000)
    873
    """

    window: int


class ChunkedAttention(Attention, frozen=True, kw_only=True, tag="chunked_attention"):
    """Attention within chunks of `chunk` tokens: a query attends only to tokens of its chunk."""

    chunk: int


class SinkAttention(Attention, frozen=True, kw_only=True, tag="sink_attention"):
    """Attention to the first `sink_tokens` tokens and the last `window` tokens.

    If `window` is None, all tokens are kept. Do not use this spec for sinks that are learned
    logits: such sinks have no K and V rows.
    """

    sink_tokens: int
    window: int | None = None


class CrossAttention(Attention, frozen=True, kw_only=True, tag="cross_attention"):
    """Attention to `source` encoder tokens, whose K and V are written once for each request."""

    source: int


class EncoderOnlyAttention(Attention, frozen=True, kw_only=True, tag="encoder_only_attention"):
    """Attention within one forward pass, without a cache."""

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:  # noqa: ARG002
        """Raise an error, because encoder-only attention has no page."""
        problem = "Encoder-only attention has no cache"
        got, hint = "a call of page()", "Omit the layer from the plan"
        raise AtlasError(Code.NO_CACHE, problem, got=got, hint=hint)


def _cells(heads: int, states: int) -> tuple[FieldAxis, FieldAxis]:
    return FieldAxis("H", heads, "H"), FieldAxis("N", states, "N")


def _planes_of_heads(
    parts: list[ElementRow], heads: int, states: int, shard: Shard, *, head: int = 0
) -> list[Field]:
    """Return one field per part, for heads that store each part as a plane.

    A part is, for example, the elements of K or their scales. Each head stores all rows of one
    part, then all rows of the next part. `head` is the index of the first head.
    """
    fields, offset = [], 0
    for part in parts:
        rows = [("N", states), ("C", part.items)]
        cells = (FieldAxis("H", heads, "H"),)
        fields.append(
            flat_field(part.name, part.dtype, rows, shard, cells=cells, head=head, offset=offset)
        )
        offset += part.nbytes * states
    return fields


def _transposed(both: Sides, heads: int, states: int, shard: Shard) -> list[Field]:
    """Return the fields of packing `transposed`: in each head, K as [D, N], then V as [N, D]."""
    (k,), (v,) = both
    head = (FieldAxis("H", heads, "H"),)
    k_rows, v_rows = [("C", k.items), ("N", states)], [("N", states), ("C", v.items)]
    after = row_bytes([k]) * states
    return [
        flat_field("k", k.dtype, k_rows, shard, axes=("N", "C"), cells=head),
        flat_field("v", v.dtype, v_rows, shard, cells=head, offset=after),
    ]


def _tiled(both: Sides, heads: int, states: int, shard: Shard) -> list[Field]:
    """Return the fields of packing `tiled_planes`: K as [H, D/x, N, x] and V as [H, D, N].

    x is the number of elements of K in 16 bytes.
    """
    (k,), (v,) = both
    tile = _TILE_BYTES // k.dtype.item
    k_rows = [("H", heads), ("C", k.items // tile), ("N", states), ("c", tile)]
    v_rows = [("H", heads), ("C", v.items), ("N", states)]
    return [
        flat_field("k", k.dtype, k_rows, shard, axes=("H", "N", "C", "c")),
        flat_field("v", v.dtype, v_rows, shard, axes=("H", "N", "C"), head=1),
    ]
