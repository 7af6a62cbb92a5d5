"""`RowKind`: the content of a row, described without a plan.

A row is the content of all caches of one kind, for one span of tokens or one recurrent state. Two
caches are of the same kind if they keep the same tokens and have the same fields: names, dtypes,
sizes and sharding. The description depends only on the model and on the cache dtype. Engine,
topology, order of axes, block size, packing and names of layers do not change it, so that all
engines give the same row the same name. `docs/reference/tier_format.md` specifies every byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import lcm, prod
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Field, FieldAxis, Page
from kvatlas.models import Layer
from kvatlas.specs import Ring, Spec
from kvatlas.specs.identity import without_packing

_CANONICAL = {"align": 1}
"""Parameters of a spec that differ from their defaults in a row: pages have no padding."""


class RowField(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a row, such as `k`."""

    name: str
    dtype: str
    axes: tuple[tuple[str, int], ...]
    """Name and size of each axis in the whole model, outermost first. Sizes count elements, or
    bytes if the dtype has fewer than 8 bits. Axis `c` is stored outside axis `C`."""
    sharded: str = ""
    """The axis that tensor parallelism divides; empty if all ranks hold the whole field."""
    sections: tuple[tuple[int, int, bool], ...] = ()
    """(units, rows of a unit, shared) for each section of the sharded axis."""


class RowKind(msgspec.Struct, frozen=True, kw_only=True):
    """A set of a model's caches. All their rows have the same heads, fields and formats.

    >>> from kvatlas.models import Model
    >>> (kind,) = row_kinds(Model.load("Qwen3-8B").layers)
    >>> kind.heads, kind.per_state, [field.name for field in kind.groups[0][0]]
    (8, 1, ['k', 'v'])
    """

    layers: tuple[int, ...]
    """Indices of the decoder layers that have such a cache, ascending."""
    keeps: dict[str, int]
    """The tokens that a cache keeps: `window`, `chunk`, `sink_tokens` and `source` if they apply.
    Empty if it keeps all tokens."""
    per_state: int
    """Tokens per state; 0 for a recurrent state."""
    heads: int
    """Number of heads, which are outermost in a row. 1 if the cache has no heads."""
    groups: tuple[tuple[tuple[RowField, ...], ...], ...]
    """Groups of heads (K and V have separate groups in nvfp4), the planes of each group, and the
    fields of each plane. The fields of a plane are adjacent in each state."""

    def to_data(self) -> Any:
        """Return the kind as JSON values, which the marks of a namespace contain."""
        return msgspec.to_builtins(self, order="sorted")

    def sort_key(self) -> tuple[Any, ...]:
        """Return the key that orders the kinds of a model, independent of their dtypes."""
        first = self.groups[0][0][0]
        keeps = sorted(self.keeps.items())
        return (self.layers, self.per_state, keeps, self.heads, first.name, first.axes)


def canonical_spec(spec: Spec) -> Spec:
    """Return a copy of `spec` as used in rows: default packing, no padding, scales in cells.

    >>> from kvatlas.specs import FullAttention
    >>> canonical_spec(FullAttention(heads=8, head_dim=64, packing="planes")).packed_as
    'cells'
    """
    bare = without_packing(spec)
    about: dict[str, Any] = {name: v for name, v in _CANONICAL.items() if hasattr(bare, name)}
    if getattr(bare, "cache", "") == "nvfp4":
        about["scales"] = "inline"
    return msgspec.structs.replace(bare, **about) if about else bare


def row_kinds(layers: Iterable[Layer]) -> tuple[RowKind, ...]:
    """Return the row kinds of a model. Object names contain the index of a kind in this order."""
    return tuple(kind for kind, _ in layers_by_kind(layers))


def refuse_rings(layers: Iterable[Layer]) -> None:
    """Raise an error if a layer stores tokens in a ring, where later tokens overwrite them."""
    ring = next((layer for layer in layers if isinstance(layer.spec, Ring)), None)
    if ring is not None:
        raise AtlasError(
            Code.BAD_PLAN,
            "A tier cannot store rings, because later tokens overwrite the rows of earlier tokens",
            got=f"layer {ring.name}, with a ring of {ring.spec.states(1)} rows",
            hint="Serve this model without a tier; transfers between engines support rings",
        )


def layers_by_kind(layers: Iterable[Layer]) -> list[tuple[RowKind, tuple[Layer, ...]]]:
    """Return (kind, layers) of each kind. The layers are in row order, with canonical specs."""
    found: dict[bytes, list[Layer]] = {}
    described: dict[Spec, RowKind] = {}
    for layer in sorted(layers, key=lambda one: (one.index, one.name)):
        spec = canonical_spec(layer.spec)
        if spec not in described:
            described[spec] = _described(spec)
        alike = msgspec.json.encode(described[spec])
        found.setdefault(alike, []).append(msgspec.structs.replace(layer, spec=spec))
    kinds = []
    for own in found.values():
        kind = described[own[0].spec]
        indices = tuple(layer.index for layer in own)
        kinds.append((msgspec.structs.replace(kind, layers=indices), tuple(own)))
    return sorted(kinds, key=lambda one: one[0].sort_key())


def span_of(kinds: Iterable[RowKind], span: int) -> int:
    """Return the smallest multiple of `span` that is a whole number of states in all kinds."""
    return lcm(span, *(kind.per_state for kind in kinds if kind.per_state))


def _described(spec: Spec) -> RowKind:
    """Return the kind of the caches that a spec describes, with an empty `layers`."""
    per_state = spec.tokens_per_state or 0
    page = spec.page(2 * per_state or 1)
    seen = spec.visibility
    limits = {"window": seen.window, "chunk": seen.chunk, "source": seen.source}
    keeps = {name: size for name, size in limits.items() if size is not None}
    if seen.sink_tokens:
        keeps["sink_tokens"] = seen.sink_tokens
    groups = tuple(_planes(own) for own in _head_groups(page))
    heads = page.heads // len(groups)
    return RowKind(layers=(), keeps=keeps, per_state=per_state, heads=heads, groups=groups)


def _head_groups(page: Page) -> list[list[Field]]:
    """Group the fields of a page by the head at which they start."""
    groups: dict[int, list[Field]] = {}
    for field in page.fields:
        groups.setdefault(field.head, []).append(field)
    return [groups[head] for head in sorted(groups)]


def _planes(fields: list[Field]) -> tuple[tuple[RowField, ...], ...]:
    """Split fields into planes: lists of fields whose rows are adjacent in memory."""
    fields = sorted(fields, key=lambda field: field.offset)
    begins = [0]
    for number, (one, two) in enumerate(pairwise(fields), start=1):
        repeats = prod(axis.size for axis in one.axes if axis not in _inner(one))
        if two.offset != one.offset + one.nbytes // repeats:
            begins.append(number)
    ranges = pairwise([*begins, len(fields)])
    return tuple(tuple(map(_row_field, fields[first:stop])) for first, stop in ranges)


def _inner(field: Field) -> tuple[FieldAxis, ...]:
    return tuple(axis for axis in field.axes if axis.name != "N" and axis.along != "H")


def _row_field(field: Field) -> RowField:
    rule = field.sharding
    return RowField(
        name=field.name,
        dtype=field.dtype.name,
        axes=tuple((axis.name, axis.size) for axis in _inner(field)),
        sharded=rule.axis or "",
        sections=tuple((one.units, one.rows, one.shared) for one in rule.sections),
    )
