"""`Conversion`: what a route changes on the way, asked for by name and never silently.

Two plans of one model may keep a layer in unlike formats: a prefill fleet in bf16 and a decode
fleet in fp8, say. A route between them converts only what `convert="bf16->fp8"` names, all of
it and nothing else. What is not known is refused before anything moves: a format's scale for
the whole tensor that its end did not give, a rotation that only the engine knows.

Bytes travel in the smaller of the two formats: a layer is converted at its source where that
has the larger one, else at its destination.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.routing.plan_ends import PlanEnd
from kvatlas.specs import (
    PLAIN_FORMATS,
    CellFormat,
    Spec,
    TensorScales,
    content_formats,
    format_name,
    needs_scales,
    without_dtypes,
    without_packing,
)

Way = Literal["copied", "elements", "rows"]
"""As it is; element by element, where order and scales allow; or decoded and encoded by rows."""

Place = Literal["source", "destination"]

Pairs = frozenset[tuple[str, str]]
"""Names of formats: from, to."""

Scales = Mapping[str, Any] | float | None
"""Scales of whole tensors: one for all layers, or numbers or pairs (K, V) by layer."""

SMALLEST_SCALE = 2.0**-126
"""The least that float32 holds with all of its bits. GPUs take less for 0, and the inverse of much
less is infinite: a content of 0 would become NaN."""
LARGEST_SCALE = 1e30
"""The most that peers take from each other."""

_MOST_NAMED = 256
"""Characters of a conversion's name."""


class RowError(NamedTuple):
    """The largest relative error that a format adds to a row, in the 2-norm."""

    usual: float
    outliers: float
    """Where two channels are 12 and 6 times larger than the others."""


ROW_ERRORS: Mapping[str, RowError] = {
    "fp32": RowError(1e-6, 1e-6),
    "bf16": RowError(2**-8, 2**-8),
    "fp16": RowError(2**-11, 2**-11),
    "fp8": RowError(0.04, 0.06),
    "fp8_e5m2": RowError(0.09, 0.12),
    "int8_per_token_head": RowError(0.012, 0.04),
    "fp8_per_token_head": RowError(0.04, 0.04),
    "int4_per_token_head": RowError(0.16, 0.16),
    "nvfp4": RowError(0.14, 0.14),
    "turboquant_k8v4": RowError(0.17, 0.4),
    "turboquant_4bit_nc": RowError(0.22, 0.4),
    "turboquant_k3v4_nc": RowError(0.33, 0.4),
    "turboquant_3bit_nc": RowError(0.36, 1.1),
    "fp8_ds_mla": RowError(0.04, 0.05),
    "nvfp4_ds_mla": RowError(0.14, 0.14),
    "mxfp4": RowError(0.2, 0.2),
}
"""What writing a row in each format costs; the worse of K and V, as `docs/cache.md` has them."""


def row_error(src: str, dst: str) -> RowError:
    """What converting adds to the error that the source's format already has.

    >>> row_error("fp8", "bf16").usual, row_error("bf16", "fp32").usual
    (0.00390625, 0.0)
    """
    exact = src == dst or (dst == "fp32" and src in PLAIN_FORMATS)
    return RowError(0.0, 0.0) if exact else ROW_ERRORS[dst]


@dataclass(frozen=True)
class FormatChange:
    """Layers whose content goes from one format into another, and how."""

    source: str
    target: str
    layers: int
    way: Way
    at: Place
    error: RowError

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "from": self.source,
            "to": self.target,
            "layers": self.layers,
            "way": self.way,
            "at": self.at,
            "error": self.error.usual,
            "error_with_outliers": self.error.outliers,
        }


@dataclass(frozen=True)
class Conversion:
    """Everything that a route converts.

    >>> from kvatlas.planning import plan
    >>> from kvatlas.routing import route
    >>> src, dst = (plan("Qwen3-8B", memory="8GiB", kv_dtype=d) for d in ("fp8", "bf16"))
    >>> print(route(src, dst, convert="fp8->bf16", src_scales=1.0).conversion)
    fp8->bf16 (36 layers, by elements, at the destination, error up to 0.0039)
    """

    changes: tuple[FormatChange, ...]
    cells: Mapping[tuple[str, str], tuple[CellFormat, CellFormat]]
    """Both ends' cells of every layer and part."""

    @property
    def name(self) -> str:
        """How it is asked for."""
        return spell_conversion({(change.source, change.target) for change in self.changes})

    def __str__(self) -> str:
        return "; ".join(
            f"{change} ({change.layers} layers, by {change.way}, at the {change.at}, "
            f"error up to {change.error.usual:.2g})"
            for change in self.changes
        )


def spell_conversion(pairs: Collection[tuple[str, str]]) -> str:
    """A conversion by name, as `convert=` takes it.

    >>> spell_conversion({("fp8", "bf16"), ("fp32", "bf16")})
    'fp32->bf16, fp8->bf16'
    """
    return ", ".join(f"{src}->{dst}" for src, dst in sorted(pairs))


def parse_conversion(convert: object) -> Pairs:
    """What `convert=` names, or a refusal.

    >>> sorted(parse_conversion("fp8_e4m3 -> bfloat16, float32->bf16"))
    [('fp32', 'bf16'), ('fp8', 'bf16')]
    """
    named = convert if isinstance(convert, str) and len(convert) <= _MOST_NAMED else ""
    pairs = [part.split("->") for part in named.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        problem = "This does not name a conversion"
        hint = "Write convert='fp8->bf16', several with commas between"
        raise AtlasError(Code.BAD_CONVERSION, problem, got=repr(convert)[:200], hint=hint)
    return frozenset((format_name(src), format_name(dst)) for src, dst in pairs)


def unlike_formats(one: Spec, two: Spec) -> dict[str, tuple[str, str]]:
    """Parts of a layer that two specs write in unlike formats; all of it where neither differs."""
    src, dst = content_formats(one), content_formats(two)
    parts = {part: (src[part], dst[part]) for part in src}
    return {part: pair for part, pair in parts.items() if pair[0] != pair[1]} or parts


def needed_pairs(src: PlanEnd, dst: PlanEnd, layers: Collection[str]) -> Pairs:
    """The conversions that lie between two plans of one model."""
    return frozenset(
        pair
        for name in layers
        if without_packing(src.specs[name]) != without_packing(dst.specs[name])
        and without_dtypes(src.specs[name]) == without_dtypes(dst.specs[name])
        for pair in unlike_formats(src.specs[name], dst.specs[name]).values()
    )


def conversion_between(
    src: PlanEnd, dst: PlanEnd, layers: Collection[str], convert: object, scales: tuple[Any, Any]
) -> Conversion:
    """The conversion that was asked for, or a refusal where it is not the one, or not known.

    `scales` are those of the source and of the destination.
    """
    asked, needed = parse_conversion(convert), needed_pairs(src, dst, layers)
    if asked != needed:
        hint = f"Pass convert={spell_conversion(needed)!r}" if needed else "Leave convert= out"
        got = f"{spell_conversion(asked)} where the plans need {spell_conversion(needed) or 'none'}"
        raise AtlasError(Code.BAD_CONVERSION, got=got, hint=hint)
    ends = (src, dst)
    given = [tensor_scales(one, end.specs) for one, end in zip(scales, ends, strict=True)]
    cells: dict[tuple[str, str], tuple[CellFormat, CellFormat]] = {}
    changed: dict[FormatChange, set[str]] = {}
    for name in layers:
        specs = src.specs[name], dst.specs[name]
        formats = [content_formats(spec) for spec in specs]
        unlike = without_packing(specs[0]) != without_packing(specs[1])
        for part in formats[0]:
            pair = formats[0][part], formats[1][part]
            if unlike and pair in needed:
                _check_convertible(name, pair, ends, given)
            one, two = (
                CellFormat(
                    spec,
                    field=None if part == "rows" else part,
                    scales=own[name] if unlike and name in own else TensorScales(),
                )
                for spec, own in zip(specs, given, strict=True)
            )
            cells[name, part] = one, two
            if unlike and pair in needed:
                how = way_between(one, two), place_of_conversion(one, two)
                change = FormatChange(*pair, 0, *how, row_error(*pair))
                changed.setdefault(change, set()).add(name)
    counted = [replace(change, layers=len(names)) for change, names in changed.items()]
    return Conversion(tuple(sorted(counted, key=str)), cells)


def place_of_conversion(src: CellFormat, dst: CellFormat) -> Place:
    """Where a cell is converted, so that the smaller of both travels."""
    return "source" if src.nbytes > dst.nbytes else "destination"


def way_between(src: CellFormat, dst: CellFormat) -> Way:
    """How cells of one format become those of another."""
    if src.formats == dst.formats and src.scales == dst.scales:
        return "copied"
    return "elements" if src.by_element and dst.by_element else "rows"


def tensor_scales(given: object, layers: Collection[str]) -> dict[str, TensorScales]:
    """Scales by layer, from a number for all of them, or numbers or pairs (K, V) by name.

    >>> tensor_scales({"layers.1.attn": (0.5, 0.25)}, ["layers.0.attn", "layers.1.attn"])
    {'layers.1.attn': TensorScales(k=0.5, v=0.25)}
    """
    if given is None:
        return {}
    by_layer = given if isinstance(given, Mapping) else dict.fromkeys(layers, given)
    unknown = [name for name in by_layer if name not in layers]
    if unknown:
        hint = "Name layers as the plan does"
        raise AtlasError(Code.UNKNOWN_LAYER, got=repr(unknown[0])[:200], hint=hint)
    return {name: _scales(name, value) for name, value in by_layer.items()}


def _scales(layer: str, value: object) -> TensorScales:
    both = tuple(value) if isinstance(value, tuple | list) else (value, value)
    numbers = [n for n in both if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) != 2 or not all(SMALLEST_SCALE <= n <= LARGEST_SCALE for n in numbers):
        problem = "A scale is not a number that float32 divides by, or a pair of them for K and V"
        hint = (
            f"Pass what the engine quantises with, from {SMALLEST_SCALE:.3g} to {LARGEST_SCALE:g}"
        )
        raise AtlasError(
            Code.BAD_SIZE, problem, got=f"{value!r:.200} for {layer!s:.200}", hint=hint
        )
    return TensorScales(float(numbers[0]), float(numbers[1]))


def _check_convertible(
    layer: str,
    pair: tuple[str, str],
    ends: tuple[PlanEnd, PlanEnd],
    given: list[dict[str, TensorScales]],
) -> None:
    """Refuse a format that cannot be read or written here."""
    for name, end, own, which in zip(pair, ends, given, ("source", "destination"), strict=True):
        spec: Any = end.specs[layer]
        if name.startswith("turboquant"):
            sizes = (spec.head_dim, spec.v_dim or spec.head_dim)
            if any(size & (size - 1) for size in sizes):
                problem = f"{name} rotates rows of a power of two"
                got, hint = f"heads of {sizes} in {layer}", "Plan that end with another cache dtype"
                raise AtlasError(Code.CANNOT_CONVERT, problem, got=got, hint=hint)
            if end.plan.policy == "foreign":
                problem = f"The rotation of {name} is the engine's own, and unknown here"
                got = f"memory of an engine at the {which}"
                hint = "Convert in the engine, or route between equal formats"
                raise AtlasError(Code.CANNOT_CONVERT, problem, got=got, hint=hint)
        if needs_scales(spec) and layer not in own:
            argument = "src_scales" if which == "source" else "dst_scales"
            got = f"no scale of {layer} in {name} at the {which}"
            hint = f"Pass {argument}=: one number, or numbers or (K, V) by layer"
            raise AtlasError(Code.MISSING_SCALES, got=got, hint=hint)
