"""The parts of a document of the exchange format, as data without validation.

`docs/reference/exchange.md` specifies their meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

MOST = (1 << 53) - 1
"""The largest integer of a document, which every JSON reader represents exactly."""

Number = Annotated[int, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=1, le=MOST)]
Text = Annotated[str, Meta(max_length=256, pattern=r"^[ !#-\[\]-~]+$(?!\n)")]
AxisName = Annotated[str, Meta(pattern=r"^[A-Z]$(?!\n)")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
MaybeDigest = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$(?!\n)")]
Bits = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}$(?!\n)")]
Steps = Annotated[tuple[tuple[Count, Number], ...], Meta(min_length=1, max_length=8)]
Ranges = Annotated[tuple[tuple[Number, Count], ...], Meta(min_length=1)]


class DocumentField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field of a layer: its content and its position in memory.

    The position is an offset in a region, the same on every rank that holds the field.
    """

    name: Text
    dtype: Text
    region: Number
    offset: Number
    """Bytes from the start of the region to the element with all coordinates 0."""
    axes: dict[AxisName, Steps]
    """For each axis, pairs (size, byte stride), the outermost first."""
    shard: Number
    """The index of the entry of `shards` that lists the rows of each rank."""
    scale: Bits | UnsetType = UNSET
    """The scale of the tensor, as the bits of an IEEE 754 single in hexadecimal digits."""


class DocumentLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cache of one layer, or one part of it.

    A cache has several parts if its heads are divided over several blocks.
    """

    name: Text
    index: Number
    """The index of the decoder layer."""
    group: Number
    fields: Annotated[tuple[DocumentField, ...], Meta(min_length=1)]


class DocumentShard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of a sharded axis that each rank holds."""

    axis: Annotated[str, Meta(pattern=r"^[A-Z]?$(?!\n)")]
    """The sharded axis; empty if each rank holds all of the field."""
    size: Count
    """Rows in the whole model."""
    ranks: Annotated[tuple[Ranges | None, ...], Meta(min_length=1)]
    """For each rank, ranges (first row, number of rows); null if it does not hold the field."""


class DocumentKeeps(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The tokens that a group keeps; all of them if the object is empty."""

    window: Count | UnsetType = UNSET
    chunk: Count | UnsetType = UNSET
    source: Count | UnsetType = UNSET


class DocumentGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that share one block table."""

    pool: Number
    holds: Literal["tokens", "state", "ring"]
    tokens: Count
    """Tokens per block."""
    context: Count
    """With n, rank r stores only the states whose number is r modulo n."""
    keeps: DocumentKeeps


class DocumentData(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True
):
    """The data of a document, without validation. Use `CacheDocument`, which validates it."""

    format: Literal["kv-exchange"] = "kv-exchange"
    version: Literal[1] = 1
    model: Text
    identity: MaybeDigest
    """A digest of the weights and settings that compute the cache; empty if it is unknown."""
    ranks: Annotated[int, Meta(ge=1, le=65536)]
    regions: Annotated[tuple[Count, ...], Meta(min_length=1)]
    """The bytes of each region: an allocation on every rank that holds a field in it."""
    groups: Annotated[tuple[DocumentGroup, ...], Meta(min_length=1)]
    shards: Annotated[tuple[DocumentShard, ...], Meta(min_length=1)]
    layers: Annotated[tuple[DocumentLayer, ...], Meta(min_length=1)]


class GroupTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The blocks of one group that hold a range of a request's tokens."""

    group: Number
    tokens: tuple[Number, Number]
    """First token, and last token plus one."""
    blocks: tuple[Number | None, ...]
    """Block ids from token 0 on; null for blocks that hold none of the tokens."""


class TablesData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data of a request's block tables, without validation. Use `TablesDocument`."""

    format: Literal["kv-exchange-tables"] = "kv-exchange-tables"
    version: Literal[1] = 1
    cache: Digest
    """The digest of the document."""
    tables: tuple[GroupTable, ...]
