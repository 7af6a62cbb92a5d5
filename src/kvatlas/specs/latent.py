"""Specs of latent attention (MLA), and of the other, smaller caches that its layers may have.

For each state, MLA caches one row for all heads: a compressed part (the latent) and a rotary part.
There are no KV heads, so every TP rank holds the whole row. Sparse models also cache the keys of an
indexer. DeepSeek-V4 stores one state for 4 or 128 tokens; a sliding window of uncompressed rows and
the running states of the compressor are in separate caches.

`cache` is `auto` (the model's dtype), `fp8` (one scale for the tensor), or one of the
formats for sparse kernels, `fp8_ds_mla` and `nvfp4_ds_mla`, whose bytes depend on the
`version` of the model. V3 formats store scales in the cell. V4 formats store all rows of a
page first and then all scales, so two concatenated pages are not a valid page with
twice as many states.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from kvatlas.geometry import DType, ElementRow, Field, FieldAxis, Page, Shard, Sharding
from kvatlas.geometry.integers import positive, round_up
from kvatlas.geometry.packing import in_cells, in_planes, row_bytes
from kvatlas.specs.base import Spec, bad_spec, check, check_page, plain_dtype
from kvatlas.specs.visibility import Visibility

Version = Literal["v3", "v4", "v4.1"]


class _Format(NamedTuple):
    """Row format of a sparse kernel.

    `latent`, `rope` and `scale` are dtypes, and `block` elements share one scale. If
    `rope_scaled` is true, rotary elements have scales too. If `inline` is true, scales are in
    the cell; otherwise they follow all rows of the page.
    """

    latent: str
    rope: str
    scale: str
    block: int
    rope_scaled: bool
    inline: bool
    align: int


_FORMATS: dict[tuple[str, Version], _Format] = {
    ("fp8_ds_mla", "v3"): _Format("e4m3", "bf16", "fp32", 128, False, True, 1),
    ("nvfp4_ds_mla", "v3"): _Format("nvfp4", "e4m3", "e4m3", 16, False, True, 1),
    ("fp8_ds_mla", "v4"): _Format("e4m3", "bf16", "ue8m0", 64, False, False, 576),
    ("fp8_ds_mla", "v4.1"): _Format("e4m3", "e4m3", "ue8m0", 32, True, False, 512),
    ("nvfp4_ds_mla", "v4.1"): _Format("nvfp4", "nvfp4", "e4m3", 16, True, False, 512),
}

LATENT_CACHES: tuple[str, ...] = ("auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla")
"""Cache dtypes for latent attention."""


class _ReplicatedRows(Spec, frozen=True, kw_only=True):
    """Base class of specs with one row per state, replicated on every rank."""

    def __post_init__(self) -> None:
        check(self)
        check_page(self)

    @property
    def tokens_per_state(self) -> int | None:
        """The compression ratio; 1 without compression."""
        return getattr(self, "compress", 1)

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:
        """Return the page, which is the same on every rank."""
        states, sharding = self.states(block), Sharding.replicated()
        shard, planes = Shard(sharding, sharding.ranges(tp, rank)), self._planes()
        if len(planes) == 1:
            fields = in_cells(planes[0], (FieldAxis("N", states, "N"),), shard)
        else:
            fields = in_planes(planes, [("N", states)], shard)
        page = Page(1, states, sum(map(row_bytes, planes)), tuple(fields))
        return page.padded(round_up(page.unpadded, self._alignment()))

    def _planes(self) -> list[list[ElementRow]]:
        """Return the parts of one row (elements, scales), in one list per plane of the page."""
        raise NotImplementedError

    def _alignment(self) -> int:
        """Return the alignment in bytes; page sizes are padded to a multiple of it."""
        return getattr(self, "align", 1)


class LatentAttention(_ReplicatedRows, frozen=True, kw_only=True, tag="latent_attention"):
    """MLA: one row of `latent` + `rope` elements for each state, replicated on every rank.

    >>> LatentAttention().page(64).nbytes
    73728
    >>> LatentAttention(cache="fp8_ds_mla").page(64).content
    656
    """

    may_be_zero = ("rope",)

    latent: int = 512
    rope: int = 64
    """Rotary elements; 0 if the model has no rotary embedding."""
    dtype: str = "bf16"
    cache: str = "auto"
    version: Version = "v3"
    compress: int = 1
    """Tokens per state: 4 or 128 in DeepSeek-V4."""
    align: int | None = None
    """Page sizes are padded to a multiple of this many bytes; None for the format's default."""

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:
        """Return the page, which is the same on every rank."""
        page = _ReplicatedRows.page(self, block, tp=tp, rank=rank)
        if (self.cache, self.version) != ("nvfp4_ds_mla", "v3"):
            return page
        fields = tuple(_interleaved(f) if f.name == "latent_scale" else f for f in page.fields)
        return replace(page, fields=fields)

    def _alignment(self) -> int:
        form = _FORMATS.get((self.cache, self.version))
        return self.align or (form.align if form else 1)

    def _planes(self) -> list[list[ElementRow]]:
        if self.cache in ("auto", "fp8", "fp8_e4m3"):
            element = plain_dtype(self.dtype if self.cache == "auto" else "e4m3")
            widths = {"latent": self.latent, "rope": self.rope}
            return [[ElementRow(name, element, width) for name, width in widths.items() if width]]
        form = _FORMATS.get((self.cache, self.version))
        if form is None:
            known = ", ".join(f"{cache} ({version})" for cache, version in _FORMATS)
            problem = "There is no such latent cache dtype for this model version"
            got = f"cache={self.cache!r}, version={self.version!r}"
            hint = f"Use 'auto', 'fp8', or one of {known}"
            raise bad_spec(problem, got, hint)
        if not self.rope:
            raise bad_spec(
                f"Cache dtype {self.cache} needs rotary elements",
                "rope=0",
                "Use cache='auto'; in models with an indexer, fp8 also selects this format",
            )
        scaled = self.latent + (self.rope if form.rope_scaled else 0)
        if scaled % form.block:
            sizes = "latent + rope" if form.rope_scaled else "latent"
            raise bad_spec(
                f"Cache dtype {self.cache} needs {sizes} to be a multiple of {form.block}",
                f"{sizes} = {scaled}",
                "Use another cache dtype, such as cache='fp8'",
            )
        latent = ElementRow("latent", DType.of(form.latent), self.latent)
        rope = ElementRow("rope", DType.of(form.rope), self.rope)
        scale = ElementRow("latent_scale", DType.of(form.scale), scaled // form.block)
        if form.inline:
            # fp8 stores its scales before the rotary part, nvfp4 after it.
            return [[latent, scale, rope] if form.latent == "e4m3" else [latent, rope, scale]]
        scales = [scale]
        if scale.nbytes % 8:
            scales.append(ElementRow("pad", DType.of("uint8"), -scale.nbytes % 8))
        return [[latent, rope], scales]


class SlidingLatentAttention(LatentAttention, frozen=True, kw_only=True, tag="sliding_latent"):
    """Latent rows of the last `window` tokens, as in DeepSeek-V4."""

    window: int


class Indexer(_ReplicatedRows, frozen=True, kw_only=True, tag="indexer"):
    """Indexer keys, which sparse attention uses to select states.

    A page stores all rows first, then all scales. MiniMax-M3 stores its keys in bf16, without
    scales.

    >>> Indexer().page(64).content, Indexer(cache="mxfp4").page(64).content
    (132, 68)
    """

    head_dim: int = 128
    cache: Literal["fp8", "e4m3", "mxfp4", "bf16", "fp16", "fp32"] = "fp8"
    """Format of a key; only `fp8` and `mxfp4` have scales."""
    compress: int = 1
    align: int = 1

    def _planes(self) -> list[list[ElementRow]]:
        if self.head_dim % 32:
            raise bad_spec(
                "The head size of an indexer must be a multiple of 32",
                f"head_dim={self.head_dim}",
                "Pass a multiple of 32, such as head_dim=128",
            )
        keys = [ElementRow("index", DType.of(self.cache), self.head_dim)]
        if self.cache not in ("fp8", "mxfp4"):
            return [keys]
        if self.cache == "fp8":
            return [keys, [ElementRow("index_scale", DType.of("fp32"), 1)]]
        count = keys[0].dtype.scales(self.head_dim)
        return [keys, [ElementRow("index_scale", DType.of("ue8m0"), count)]]


class CompressorState(_ReplicatedRows, frozen=True, kw_only=True, tag="compressor_state"):
    """Running sums of a compressor over the last `window` tokens, one row per token.

    >>> CompressorState(width=2048, window=8, align=576).page(4).nbytes
    32832
    """

    width: int
    window: int
    dtype: str = "fp32"
    align: int = 1

    def _planes(self) -> list[list[ElementRow]]:
        return [[ElementRow("state", plain_dtype(self.dtype), self.width)]]


class Ring(_ReplicatedRows, frozen=True, kw_only=True, tag="ring"):
    """Raw rows of the tokens that are not compressed yet, in one block per request.

    A compressed cache stores one state for a group of `group` tokens, and needs the raw rows of the
    last group until this group is complete. The row of token t is state t % `rows`. The ring is
    larger than a group if an engine decodes several speculative tokens at once.

    >>> ring = Ring(group=4, rows=8, width=128)
    >>> ring.page(16).states, ring.page(256).nbytes
    (8, 2048)
    >>> ring.visibility.first(1003)  # the rows that the token at position 1003 needs begin here
    1000
    """

    group: int
    """Tokens per compressed state. Only the rows of the last, incomplete group are needed."""
    rows: int
    """States of the ring, at least `group`."""
    width: int
    """Elements of a row."""
    dtype: str = "bf16"
    parts: Literal[1, 2] = 1
    """With 2, a token has two rows, in two heads: a key, and the score that weighs it."""
    positions: int = 0
    """Coordinates of a token (8 bytes each) that follow its row, for models of images and video."""
    fills_page: bool = False
    """Whether engines enlarge the ring to the page size of the same layer's attention."""

    @property
    def tokens_per_state(self) -> int | None:
        """Always 1: a ring stores one state per token."""
        return 1

    @property
    def visibility(self) -> Visibility:
        """The tokens of the query's own group, as for chunked attention."""
        return Visibility(chunk=self.group)

    def states(self, block: int) -> int:
        """Return `rows`, whatever the block size."""
        positive(block, "the block size")
        if self.rows < self.group:
            raise bad_spec(
                "A ring must be large enough for a group",
                f"{self.rows} rows for groups of {self.group} tokens",
                "Pass rows= of at least the group size",
            )
        return self.rows

    def page(self, block: int, *, tp: int = 1, rank: int = 0) -> Page:
        """Return the page, which is the same on every rank and for every block size."""
        if self.parts == 1:
            return _ReplicatedRows.page(self, block, tp=tp, rank=rank)
        states, sharding, key = self.states(block), Sharding.replicated(), self._planes()[0]
        cells = (FieldAxis("N", states, "N"),)
        shard = Shard(sharding, sharding.ranges(tp, rank))
        score = [replace(part, name=f"{part.name}_score") for part in key]
        fields = (*in_cells(key, cells, shard), *in_cells(score, cells, shard, head=1))
        return Page(2, states, row_bytes(key), fields)

    @property
    def row_bytes(self) -> int:
        """Bytes that the ring stores for one token."""
        return self.parts * row_bytes(self._planes()[0])

    def enlarged(self, nbytes: int) -> Ring:
        """Return the ring with as many rows as fit in a page of `nbytes` bytes.

        >>> Ring(group=8, rows=8, width=512).enlarged(32768).rows
        32
        """
        return msgspec.structs.replace(self, rows=nbytes // self.row_bytes)

    def _planes(self) -> list[list[ElementRow]]:
        rows = [ElementRow("raw", plain_dtype(self.dtype), self.width)]
        if self.positions:
            nbytes = row_bytes(rows)
            if nbytes % 8:
                rows.append(ElementRow("pad", DType.of("uint8"), -nbytes % 8))
            rows.append(ElementRow("position", DType.of("uint8"), 8 * self.positions))
        return [rows]


def sparse_latent(
    *, cache: str = "auto", dtype: str = "bf16", index_cache: Literal["fp8", "mxfp4"] = "fp8"
) -> dict[str, Spec]:
    """Return the specs of a sparse MLA layer (DeepSeek-V3.2): latent rows and indexer keys.

    >>> {name: spec.page(64).content for name, spec in sparse_latent(cache="fp8_ds_mla").items()}
    {'attn': 656, 'indexer': 132}
    """
    return {
        "attn": LatentAttention(cache=cache, dtype=dtype),
        "indexer": Indexer(cache=index_cache),
    }


def compressed_latent(
    ratio: int,
    *,
    cache: str = "fp8_ds_mla",
    window: int = 128,
    head_dim: int = 512,
    rope: int = 64,
    index_dim: int = 128,
    index_cache: Literal["fp8", "mxfp4"] = "fp8",
) -> dict[str, Spec]:
    """Return the specs, by name, of a DeepSeek-V4 layer that stores one state for `ratio` tokens.

    With ratio 4, compression windows overlap: the compressor covers 8 tokens and keeps two sums
    per token, and there is an indexer with a separate compressor. With ratio 128, compression
    windows do not overlap, and there is no indexer. With ratio 0, the layer caches only the rows
    of its sliding window.

    >>> {name: spec.page(256).states for name, spec in compressed_latent(128).items()}
    {'swa': 256, 'attn': 2, 'compressor': 256}
    """
    if ratio not in (0, 4, 128):
        raise bad_spec(
            "The compression ratio of DeepSeek-V4 must be 0, 4 or 128",
            f"ratio={ratio!r}",
            "Pass ratio=0, 4 or 128, as in the model's config",
        )
    form = _FORMATS.get((cache, "v4"))
    align = form.align if form else 512
    rows: dict[str, Any] = {
        "latent": head_dim - rope, "rope": rope, "cache": cache, "version": "v4", "align": align,
    }  # fmt: skip
    caches: dict[str, Spec] = {"swa": SlidingLatentAttention(**rows, window=window)}
    if ratio == 0:
        return caches
    overlap = 2 if ratio == 4 else 1
    compressor = partial(CompressorState, window=overlap * ratio, align=align)
    caches["attn"] = LatentAttention(**rows, compress=ratio)
    caches["compressor"] = compressor(width=2 * overlap * head_dim)
    if overlap == 2:
        keys: dict[str, Any] = {"head_dim": index_dim, "cache": index_cache}
        caches["indexer"] = Indexer(**keys, compress=ratio, align=align)
        caches["indexer_compressor"] = compressor(width=2 * overlap * index_dim)
    return caches


def _interleaved(scales: Field) -> Field:
    """Return the field of a row's 32 scales in the byte order that FlashMLA expects.

    Scale s is stored at byte 8 * (s % 4) + s // 4.
    """
    *cells, row = scales.axes
    if row.size % 4:
        raise bad_spec(
            "The number of scales of nvfp4_ds_mla must be a multiple of 4",
            f"{row.size} scales",
            "Use a latent size that is a multiple of 64",
        )
    fours = FieldAxis("C", row.size // 4, "C", 1)
    return replace(scales, axes=(*cells, fours, FieldAxis("c", 4, "C", row.size // 4)))
