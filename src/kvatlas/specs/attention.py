"""Attention that keeps K and V for each head.

The kinds differ in which tokens a request still needs, never in the bytes of a
page: full keeps all, sliding the last `window`, chunked those since the last
multiple of `chunk`, sink the last ones and the first `sinks`, cross the
encoder's, encoder-only none. So one base class owns the page, and each kind adds
a number or two.

`packing` says where K and V sit in the page:

- `cells`: K then V in each cell, what most backends take;
- `head_groups`: K in the first half of the head slots, V in the second
  (FlashInfer's fp8 and nvfp4);
- `planes`: one head slot holds K of all heads, the other V (two-plane backends);
- `tiled_planes`: planes with K as [H, D/x, N, x] of 16-byte tiles and V as [H, D, N]
  (ROCm's paged attention);
- `transposed`: in each head K as [D, N], then V as [N, D] (vLLM's CPU attention).
"""

from __future__ import annotations

from typing import Literal

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Field, FieldAxis, Page, Piece
from kvatlas.geometry.field import Cut
from kvatlas.specs.base import Part, Spec, bad_spec, check_positive, in_cells, in_planes, row_bytes
from kvatlas.specs.content import Sides, sides

Packing = Literal["cells", "head_groups", "planes", "tiled_planes", "transposed"]

_TILE_BYTES = 16


class Attention(Spec, frozen=True, kw_only=True):
    """K and V of `heads` heads: what all kinds of attention share."""

    heads: int
    head_dim: int
    v_dim: int | None = None
    """Elements of a V row where they differ from K's."""
    dtype: str = "bf16"
    cache: str = "auto"
    packing: Packing = "cells"
    scales: Literal["inline", "planes"] = "inline"
    """Head groups only: scales in each cell, or behind all data of a side as FlashInfer wants."""

    def __post_init__(self) -> None:
        check_positive(self, "heads", "head_dim")
        if self.v_dim is not None:
            check_positive(self, "v_dim")
        both = self._sides()
        uneven = row_bytes(both.k) != row_bytes(both.v)
        if uneven and self.packing not in ("cells", "transposed"):
            raise bad_spec(
                f"Packing {self.packing} wants K and V rows of one size",
                f"{row_bytes(both.k)} and {row_bytes(both.v)} bytes",
                "Use packing cells",
            )
        if self.packing in ("tiled_planes", "transposed") and len(both.k) + len(both.v) > 2:
            raise bad_spec(
                f"Packing {self.packing} has no place for scales",
                f"cache dtype {self.cache}",
                "Use packing cells or head_groups",
            )
        if self.cache == "nvfp4" and self.packing != "head_groups":
            raise bad_spec(
                "nvfp4 keeps K and V in head groups",
                f"packing {self.packing}",
                "Use packing head_groups",
            )

    @property
    def tokens_per_state(self) -> int | None:
        """One state for each token."""
        return 1

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:
        """The page on one rank; K and V heads are repeated past their number.

        >>> FullAttention(heads=8, head_dim=128).page(16, tp=2).nbytes
        32768
        """
        states, cut = self.states(block), Cut.heads(self.heads)
        pieces, heads = cut.pieces(tp, rank), cut.size(tp)
        both = self._sides()
        if self.packing == "cells":
            parts = [*both.k, *both.v]
            fields = in_cells(parts, _cells(heads, states), cut=cut, pieces=pieces)
            return Page(heads, states, row_bytes(parts), tuple(fields))
        if self.packing == "transposed":
            return self._transposed(both, heads, states, cut, pieces)
        slots, content = 2 * heads, row_bytes(both.k)
        if self.packing != "head_groups":
            slots, content = 2, heads * row_bytes(both.k)
        fields = []
        for parts, head in ((both.k, 0), (both.v, slots // 2)):
            fields += self._side(parts, head, heads, states, cut, pieces)
        return Page(slots, states, content, tuple(fields))

    def _sides(self) -> Sides:
        return sides(self.cache, DType.of(self.dtype), self.head_dim, self.v_dim or self.head_dim)

    def _side(
        self,
        parts: list[Part],
        head: int,
        heads: int,
        states: int,
        cut: Cut,
        pieces: tuple[Piece, ...],
    ) -> list[Field]:
        """K's or V's fields in the packings that keep the sides apart."""
        if self.packing == "head_groups":
            if self.scales == "planes":
                planes, rows = [[part] for part in parts], (("H", heads), ("N", states))
                return in_planes(planes, rows, head=head, cut=cut, pieces=pieces)
            return in_cells(parts, _cells(heads, states), head=head, cut=cut, pieces=pieces)
        if self.packing == "planes":
            cells = (FieldAxis("H", heads, "C", row_bytes(parts)), FieldAxis("N", states, "N"))
            return in_cells(parts, cells, head=head, cut=cut, pieces=pieces)
        (part,) = parts
        item, dim = part.dtype.item, part.items
        # K is tiled so that a thread loads 16 bytes of one state; V keeps states innermost.
        x = _TILE_BYTES // item if part.name == "k" else 1
        if dim % x:
            raise bad_spec(
                f"Tiled K has tiles of {_TILE_BYTES} bytes",
                f"{dim} elements of {item} bytes",
                "Use packing planes",
            )
        element = [FieldAxis("C", dim // x, "C", states * x * item)]
        if x > 1:
            element.append(FieldAxis("c", x, "C", item))
        axes = (
            FieldAxis("H", heads, "C", states * dim * item),
            FieldAxis("N", states, "C", x * item),
            *element,
        )
        return [Field(part.name, part.dtype, axes, head, cut=cut, pieces=pieces)]

    def _transposed(
        self, both: Sides, heads: int, states: int, cut: Cut, pieces: tuple[Piece, ...]
    ) -> Page:
        (k,), (v,) = both
        item, head = k.dtype.item, FieldAxis("H", heads, "H")
        k_axes = (
            head,
            FieldAxis("N", states, "C", item),
            FieldAxis("C", k.items, "C", states * item),
        )
        v_axes = (head, FieldAxis("N", states, "C", v.nbytes), FieldAxis("C", v.items, "C", item))
        fields = (
            Field("k", k.dtype, k_axes, cut=cut, pieces=pieces),
            Field("v", v.dtype, v_axes, offset=states * k.nbytes, cut=cut, pieces=pieces),
        )
        return Page(heads, states, k.nbytes + v.nbytes, fields)


class FullAttention(Attention, frozen=True, kw_only=True, tag="full_attention"):
    """Every token is kept.

    >>> page = FullAttention(heads=8, head_dim=128, cache="nvfp4", packing="head_groups").page(16)
    >>> page.heads, page.states, page.content
    (16, 16, 72)
    """


class SlidingAttention(Attention, frozen=True, kw_only=True, tag="sliding_attention"):
    """The last `window` tokens are kept."""

    window: int

    def __post_init__(self) -> None:
        Attention.__post_init__(self)
        check_positive(self, "window")


class ChunkedAttention(Attention, frozen=True, kw_only=True, tag="chunked_attention"):
    """The tokens since the last multiple of `chunk` are kept."""

    chunk: int

    def __post_init__(self) -> None:
        Attention.__post_init__(self)
        check_positive(self, "chunk")


class SinkAttention(Attention, frozen=True, kw_only=True, tag="sink_attention"):
    """The first `sinks` tokens stay for ever; of the others the last `window`, or all.

    Sinks that are learned weights rather than rows take no cache: use the other kinds.
    """

    sinks: int
    window: int | None = None

    def __post_init__(self) -> None:
        Attention.__post_init__(self)
        check_positive(self, "sinks", *(["window"] if self.window is not None else []))


class CrossAttention(Attention, frozen=True, kw_only=True, tag="cross_attention"):
    """The encoder's `source` tokens, written once for each request."""

    source: int

    def __post_init__(self) -> None:
        Attention.__post_init__(self)
        check_positive(self, "source")


class EncoderOnlyAttention(Attention, frozen=True, kw_only=True, tag="encoder_only_attention"):
    """Attention within one forward pass: nothing is kept."""

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:  # noqa: ARG002
        """Refused: there is no page."""
        raise AtlasError(
            Code.NO_CACHE,
            "Encoder-only attention keeps nothing between passes",
            got="a request for its page",
            hint="Leave the layer out of the plan",
        )


def _cells(heads: int, states: int) -> tuple[FieldAxis, FieldAxis]:
    return FieldAxis("H", heads, "H"), FieldAxis("N", states, "N")
