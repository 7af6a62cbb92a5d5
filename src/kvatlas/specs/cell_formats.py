"""Formats of cached content, and the bytes of one cell in a format.

A format specifies how numbers are encoded: in the model's dtype, in fp8 with one scale for
the tensor, in int8 with one scale per token and head, and so on. Attention layers have one
format for their rows; recurrent layers have one for each state.

A cell is the unit of conversion. In attention layers it is what one head stores for one token (or
for one compressed state): all its fields, one after another, without padding. In recurrent layers
it is one element of a state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Page
from kvatlas.specs.attention import Attention
from kvatlas.specs.base import Spec
from kvatlas.specs.cell_content import ATTENTION_CACHES
from kvatlas.specs.identity import without_packing
from kvatlas.specs.latent import LATENT_CACHES, CompressorState, Indexer, LatentAttention, Ring
from kvatlas.specs.recurrent import Recurrent

PLAIN_FORMATS = ("fp32", "bf16", "fp16")
"""Formats without scales."""

_SHORT = {
    "fp8_e4m3": "fp8",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
}
_KNOWN = {*ATTENTION_CACHES, *LATENT_CACHES, "mxfp4"} - {"auto"}


def format_name(name: str) -> str:
    """Return the canonical name of a format; raise an error if it is unknown.

    >>> format_name("bfloat16"), format_name("fp8_e4m3"), format_name("int8")
    ('bf16', 'fp8', 'int8_per_token_head')
    """
    wanted = name.strip().lower() if isinstance(name, str) else ""
    wanted = _SHORT.get(wanted, wanted)
    if wanted in _KNOWN:
        return wanted
    try:
        plain = DType.of(wanted).name
    except AtlasError:
        plain = ""
    if plain not in PLAIN_FORMATS:
        known = ", ".join((*PLAIN_FORMATS, *sorted(_KNOWN - {"fp8_e4m3"})))
        raise AtlasError(
            Code.UNKNOWN_DTYPE,
            "There is no such format",
            got=repr(name),
            hint=f"Use one of {known}",
        )
    return plain


@lru_cache(maxsize=4096)
def content_formats(spec: Spec) -> Mapping[str, str]:
    """Return the format of a layer's rows, or of each state of a recurrent layer.

    >>> from kvatlas.specs import FullAttention, Mamba1
    >>> content_formats(FullAttention(heads=8, head_dim=64, cache="fp8_e4m3"))
    {'rows': 'fp8'}
    >>> content_formats(Mamba1(inner=64, state_size=16, ssm_dtype="float32"))
    {'conv': 'bf16', 'ssm': 'fp32'}
    """
    if isinstance(spec, Recurrent):
        return {state.name: DType.of(state.dtype).name for state in spec.layer_states()}
    if isinstance(spec, Indexer):
        return {"rows": spec.cache}
    if isinstance(spec, CompressorState | Ring):
        return {"rows": DType.of(spec.dtype).name}
    bare: Any = without_packing(spec)
    return {"rows": DType.of(bare.dtype).name if bare.cache == "auto" else bare.cache}


class TensorScales(NamedTuple):
    """The scales of one layer's K and V tensors; latent rows use the scale of K."""

    k: float = 1.0
    v: float = 1.0


_ONE = TensorScales()


def needs_scales(spec: Spec) -> bool:
    """Return whether a layer's format has one scale per tensor, stored outside the pages.

    >>> from kvatlas.specs import FullAttention
    >>> caches = ("fp8", "int8_per_token_head")
    >>> [needs_scales(FullAttention(heads=8, head_dim=64, cache=c)) for c in caches]
    [True, False]
    """
    scaled = isinstance(spec, Attention | LatentAttention)
    return scaled and content_formats(spec)["rows"] in ("fp8", "fp8_e5m2", "nvfp4")


class ElementCast(NamedTuple):
    """An elementwise conversion from dtype `source` to dtype `target`."""

    source: DType
    target: DType
    scales: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """Pairs (multiplier, divisor) that are applied to every element.

    There are several pairs if elements of different tensors are converted together.
    """

    @property
    def items(self) -> tuple[int, int]:
        """Bytes of one element in the source dtype and in the target dtype."""
        return self.source.item, self.target.item

    def __str__(self) -> str:
        scales = ", ".join(f"* {one} / {two}" for one, two in self.scales)
        return f"{self.source.name} {scales} as {self.target.name}"


class CellRow(NamedTuple):
    """The elements of one field in a cell; the first element is at byte `at` of the cell.

    `items` is the number of elements, or the number of bytes if several elements share a byte.
    """

    name: str
    dtype: DType
    at: int
    items: int

    @property
    def nbytes(self) -> int:
        """Bytes of the row."""
        return self.items * self.dtype.item


@dataclass(frozen=True)
class CellFormat:
    """The format of a layer's cells, and the scales of its tensors.

    A cell is the unit of conversion: what one head stores for one token. The fields of a cell
    follow each other without padding. For recurrent layers, `field` is the name of the state, and a
    cell is one element of it.

    >>> from kvatlas.specs import FullAttention
    >>> cell = CellFormat(FullAttention(heads=8, head_dim=64, cache="int8_per_token_head"))
    >>> cell.nbytes, [(row.name, row.at) for row in cell.rows]
    (136, [('k', 0), ('k_scale', 64), ('v', 68), ('v_scale', 132)])
    """

    spec: Spec
    field: str | None = None
    scales: TensorScales = _ONE

    @property
    def rows(self) -> tuple[CellRow, ...]:
        """The rows of the cell, one per field, without padding."""
        return _cell_rows(self.spec, self.field)

    @property
    def page(self) -> Page:
        """The layer's page for the smallest possible block, which has one state."""
        return _smallest_page(self.spec)

    @property
    def formats(self) -> Mapping[str, str]:
        """The format of the cell, as {'rows': format} or, for a recurrent state, {name: format}."""
        formats = content_formats(self.spec)
        return formats if self.field is None else {self.field: formats[self.field]}

    @property
    def by_element(self) -> bool:
        """Whether elements can be converted one by one.

        The value is true if the cell has neither packed elements nor scales.
        """
        scales = ("_scale", "_zero")
        return not any(row.dtype.packed or row.name.endswith(scales) for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the cell."""
        return sum(row.nbytes for row in self.rows)

    def row(self, name: str) -> CellRow:
        """Return the row of the field called `name`."""
        for row in self.rows:
            if row.name == name:
                return row
        hint = f"Use a field of this cell: {', '.join(row.name for row in self.rows)}"
        problem = "The cell has no such field"
        raise AtlasError(Code.UNKNOWN_FIELD, problem, got=repr(name)[:100], hint=hint)

    def scale(self, name: str) -> float:
        """Return the scale of a field's tensor; 1 if the format has no tensor scale."""
        if not needs_scales(self.spec):
            return 1.0
        return self.scales.v if name == "v" else self.scales.k

    def cast_to(self, other: CellFormat, name: str) -> ElementCast:
        """Return the elementwise conversion of field `name` to the format `other`.

        `by_element` must be true for both formats.

        >>> from kvatlas.specs import FullAttention
        >>> specs = [FullAttention(heads=1, head_dim=2, cache=cache) for cache in ("auto", "fp8")]
        >>> str(CellFormat(specs[0]).cast_to(CellFormat(specs[1], scales=TensorScales(0.5)), "k"))
        'bf16 * 1.0 / 0.5 as e4m3'
        """
        types = self.row(name).dtype, other.row(name).dtype
        return ElementCast(*types, ((self.scale(name), other.scale(name)),))


@lru_cache(maxsize=4096)
def _smallest_page(spec: Spec) -> Page:
    """Return the smallest page of `spec`; cached, because building a page validates it."""
    return spec.page(spec.tokens_per_state or 1)


@lru_cache(maxsize=4096)
def _cell_rows(spec: Spec, field: str | None) -> tuple[CellRow, ...]:
    page = _smallest_page(spec)
    if field is not None:
        return (CellRow(field, page.field(field).dtype, 0, 1),)
    rows: list[CellRow] = []
    at = 0
    for part in page.fields:
        if not part.padding:
            items = math.prod(n for axis, n in part.sizes.items() if axis not in "HN")
            rows.append(CellRow(part.name, part.dtype, at, items))
            at += rows[-1].nbytes
    return tuple(rows)
