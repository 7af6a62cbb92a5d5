"""`Conversion`: the format changes that a route applies. The caller must request them by name.

Two plans of one model may store a layer in different formats: for example a prefill fleet in
bf16 and a decode fleet in fp8. A route between them needs `convert="bf16->fp8"`, and the name
must list exactly the conversions that the plans need. A conversion that needs an unknown value,
such as a per-tensor scale or a rotation that only the engine has, raises an error before any
bytes move.

The smaller of the two formats is sent. A layer is converted at the source if the source format
is larger, else at the destination.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.routing.plan_ends import PlanEnd
from kvatlas.specs import CellFormat, Spec, TensorScales, content_formats
from kvatlas.specs.cell_formats import PLAIN_FORMATS, format_name, needs_scales
from kvatlas.specs.identity import without_dtypes, without_packing

Way = Literal["copied", "elements", "rows"]
"""How a layer is converted. `copied`: bytes are unchanged. `elements`: each element is cast.
`rows`: whole rows are decoded and encoded."""

Place = Literal["source", "destination"]

Pairs = frozenset[tuple[str, str]]
"""Pairs of format names: (from, to)."""

Scales = Mapping[str, Any] | float | None
"""Per-tensor scales: one number for all layers, or a number or a pair (K, V) for each layer."""

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. GPUs flush smaller values to 0, and the inverse of a much smaller
value is infinite, which would turn an element of 0 into NaN."""
LARGEST_SCALE = 1e30
"""The largest scale that peers accept from each other."""

_MOST_NAMED = 256
"""Maximum length of a conversion's name, in characters."""


class RowError(NamedTuple):
    """The largest relative error, in the 2-norm, that a format adds to one row of K or V."""

    usual: float
    outliers: float
    """The error if two channels are 12 and 6 times larger than the others."""


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
"""Error of a row in each format: the larger of the errors of K and V. See
`docs/explanation/caches.md`."""


def row_error(source: str, destination: str) -> RowError:
    """Return the rounding error that a conversion from format `source` to `destination` adds.

    >>> row_error("fp8", "bf16").usual, row_error("bf16", "fp32").usual
    (0.00390625, 0.0)
    """
    exact = source == destination or (destination == "fp32" and source in PLAIN_FORMATS)
    return RowError(0.0, 0.0) if exact else ROW_ERRORS[destination]


@dataclass(frozen=True)
class FormatChange:
    """A pair of formats, the number of layers to convert, and how and where to convert them."""

    source: str
    destination: str
    layers: int
    way: Way
    at: Place
    error: RowError

    def __str__(self) -> str:
        return f"{self.source}->{self.destination}"

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return {
            "from": self.source,
            "to": self.destination,
            "layers": self.layers,
            "way": self.way,
            "at": self.at,
            "error": self.error.usual,
            "error_with_outliers": self.error.outliers,
        }


@dataclass(frozen=True)
class Conversion:
    """All format changes of a route.

    >>> from kvatlas.planning import plan
    >>> from kvatlas.routing import route
    >>> source, destination = (plan("Qwen3-8B", memory="8GiB", kv_dtype=d) for d in ("fp8", "bf16"))
    >>> print(route(source, destination, convert="fp8->bf16", source_scales=1.0).conversion)
    fp8->bf16 (36 layers, by elements, at the destination, error up to 0.0039)
    """

    changes: tuple[FormatChange, ...]
    cells: Mapping[tuple[str, str], tuple[CellFormat, CellFormat]]
    """Source and destination cell formats, by layer name and part (`rows`, or a state's name)."""

    @property
    def name(self) -> str:
        """The name that `convert=` accepts."""
        return spell_conversion({(change.source, change.destination) for change in self.changes})

    def __str__(self) -> str:
        return "; ".join(
            f"{change} ({change.layers} layers, by {change.way}, at the {change.at}, "
            f"error up to {change.error.usual:.2g})"
            for change in self.changes
        )


def spell_conversion(pairs: Collection[tuple[str, str]]) -> str:
    """Return the name of a conversion, as `convert=` accepts it.

    >>> spell_conversion({("fp8", "bf16"), ("fp32", "bf16")})
    'fp32->bf16, fp8->bf16'
    """
    return ", ".join(f"{source}->{destination}" for source, destination in sorted(pairs))


def parse_conversion(convert: object) -> Pairs:
    """Return the pairs of formats in a `convert=` argument; raise an error if it is malformed.

    >>> sorted(parse_conversion("fp8_e4m3 -> bfloat16, float32->bf16"))
    [('fp32', 'bf16'), ('fp8', 'bf16')]
    """
    named = convert if isinstance(convert, str) and len(convert) <= _MOST_NAMED else ""
    pairs = [part.split("->") for part in named.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        problem = "A conversion must have the form 'from->to'"
        hint = "Pass convert='fp8->bf16', for example; separate several pairs with commas"
        raise AtlasError(Code.BAD_CONVERSION, problem, got=repr(convert)[:200], hint=hint)
    return frozenset(
        (format_name(source), format_name(destination)) for source, destination in pairs
    )


def unlike_formats(one: Spec, two: Spec) -> dict[str, tuple[str, str]]:
    """Return the parts of a layer for which two specs have different formats.

    Each part is mapped to (its format in `one`, its format in `two`). The parts are `rows` for
    attention, or the names of recurrent states. Callers pass specs that require a conversion. If
    such specs have equal formats, they differ in another setting, so all parts are returned.
    """
    source, destination = content_formats(one), content_formats(two)
    parts = {part: (source[part], destination[part]) for part in source}
    return {part: pair for part, pair in parts.items() if pair[0] != pair[1]} or parts


def needed_pairs(source: PlanEnd, destination: PlanEnd, layers: Collection[str]) -> Pairs:
    """Return the pairs (source format, destination format) that two plans must convert."""
    return frozenset(
        pair
        for name in layers
        if without_packing(source.specs[name]) != without_packing(destination.specs[name])
        and without_dtypes(source.specs[name]) == without_dtypes(destination.specs[name])
        for pair in unlike_formats(source.specs[name], destination.specs[name]).values()
    )


def conversion_between(
    source: PlanEnd,
    destination: PlanEnd,
    layers: Collection[str],
    convert: object,
    scales: tuple[Any, Any],
) -> Conversion:
    """Return the requested conversion; raise an error if the plans need a different conversion.

    `scales` holds the scales of the source and of the destination.
    """
    asked, needed = parse_conversion(convert), needed_pairs(source, destination, layers)
    if asked != needed:
        needs = spell_conversion(needed)
        hint = f"Pass convert={needs!r}" if needed else "Omit convert="
        got = f"convert={spell_conversion(asked)!r}; the plans need {needs or 'no conversion'}"
        raise AtlasError(Code.BAD_CONVERSION, got=got, hint=hint)
    ends = (source, destination)
    given = [tensor_scales(one, end.specs) for one, end in zip(scales, ends, strict=True)]
    refuse_rescaling(source.specs, destination.specs, layers, scales)
    cells: dict[tuple[str, str], tuple[CellFormat, CellFormat]] = {}
    changed: dict[FormatChange, set[str]] = {}
    for name in layers:
        specs = source.specs[name], destination.specs[name]
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


def place_of_conversion(source: CellFormat, destination: CellFormat) -> Place:
    """Return where cells are converted: "source" if its format is larger, else "destination"."""
    return "source" if source.nbytes > destination.nbytes else "destination"


def way_between(source: CellFormat, destination: CellFormat) -> Way:
    """Return how cells are converted: copied, element by element, or row by row."""
    if source.formats == destination.formats and source.scales == destination.scales:
        return "copied"
    return "elements" if source.by_element and destination.by_element else "rows"


def tensor_scales(given: object, layers: Collection[str]) -> dict[str, TensorScales]:
    """Return the scales of each layer, by layer name.

    `given` is the scale of all layers, or a mapping from layer names to scales. A scale is a number
    or a pair (K, V).

    >>> tensor_scales({"layers.1.attn": (0.5, 0.25)}, ["layers.0.attn", "layers.1.attn"])
    {'layers.1.attn': TensorScales(k=0.5, v=0.25)}
    """
    if given is None:
        return {}
    by_layer = given if isinstance(given, Mapping) else dict.fromkeys(layers, given)
    unknown = [name for name in by_layer if name not in layers]
    if unknown:
        problem = "Scales are given for a layer that the plan does not have"
        hint = "Use the layer names in Plan.layers"
        raise AtlasError(Code.UNKNOWN_LAYER, problem, got=repr(unknown[0])[:200], hint=hint)
    return {name: _scales(name, value) for name, value in by_layer.items()}


def refuse_rescaling(
    source: Mapping[str, Spec],
    destination: Mapping[str, Spec],
    layers: Collection[str],
    scales: tuple[object, object],
    *,
    both: bool = False,
) -> None:
    """Raise an error if a layer that is copied unchanged has different scales at the two ends.

    `scales` holds the scales of the source and of the destination. If the scales of a layer are
    known at one end only, the layer is accepted, unless `both` is true.
    """
    mine, theirs = (
        tensor_scales(given, specs)
        for given, specs in zip(scales, (source, destination), strict=True)
    )
    for name in layers:
        spec = destination[name]
        if not needs_scales(spec) or without_packing(source[name]) != without_packing(spec):
            continue
        here, there = mine.get(name), theirs.get(name)
        if here != there and (both or (here and there)):
            problem = "A layer that is not converted must have equal source and destination scales"
            got = f"source_scales {here} and destination_scales {there} for {name:.200}"
            hint = "Quantise both caches with the same scales, or use another kv_dtype at one end"
            raise AtlasError(Code.BAD_CONVERSION, problem, got=got, hint=hint)


def _scales(layer: str, value: object) -> TensorScales:
    both = tuple(value) if isinstance(value, tuple | list) else (value, value)
    numbers = [n for n in both if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) != 2 or not all(SMALLEST_SCALE <= n <= LARGEST_SCALE for n in numbers):
        limits = f"from {SMALLEST_SCALE:.3g} to {LARGEST_SCALE:g}"
        raise AtlasError(
            Code.BAD_SIZE,
            f"A scale must be a number {limits}, or a pair of such numbers for K and V",
            got=f"{value!r:.200} for {layer!s:.200}",
            hint="Pass the scales with which the engine quantised this layer",
        )
    return TensorScales(float(numbers[0]), float(numbers[1]))


def _check_convertible(
    layer: str,
    pair: tuple[str, str],
    ends: tuple[PlanEnd, PlanEnd],
    given: list[dict[str, TensorScales]],
) -> None:
    """Raise an error if a layer cannot be decoded at the source or encoded at the destination."""
    for name, end, own, which in zip(pair, ends, given, ("source", "destination"), strict=True):
        spec: Any = end.specs[layer]
        if name.startswith("turboquant"):
            sizes = (spec.head_dim, spec.v_dim or spec.head_dim)
            if any(size & (size - 1) for size in sizes):
                problem = f"{name} requires a head size that is a power of two"
                got = f"head sizes {sizes[0]} (K) and {sizes[1]} (V) in {layer}"
                hint = f"Plan the {which} with another kv_dtype"
                raise AtlasError(Code.CANNOT_CONVERT, problem, got=got, hint=hint)
            if end.plan.policy == "foreign":
                problem = f"{name} needs a rotation that only the engine has"
                got = f"{name} in an engine's memory, at the {which}"
                hint = "Convert in the engine, or use the same kv_dtype for source and destination"
                raise AtlasError(Code.CANNOT_CONVERT, problem, got=got, hint=hint)
        if needs_scales(spec) and layer not in own:
            argument = "source_scales" if which == "source" else "destination_scales"
            got = f"no scale for {layer} in {name} at the {which}"
            hint = f"Pass {argument}=1.0 (one number for all layers), or {{layer: (k, v)}}"
            raise AtlasError(Code.MISSING_SCALES, got=got, hint=hint)
