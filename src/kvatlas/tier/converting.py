"""Convert a tier's blocks to another cache dtype when they are fetched.

Blocks in a tier keep the dtype in which they were stored. They are converted only when they are
copied into a rank's pools, so a tier never stores a converted block under the original's key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Route, Scales, fingerprint, route
from kvatlas.routing.conversion import refuse_rescaling, tensor_scales
from kvatlas.specs import Spec

PLANS = 16
"""Number of plans whose routes to and from a tier are cached."""


@dataclass(frozen=True)
class Converting:
    """A conversion of blocks to another cache dtype: its name and per-tensor scales.

    >>> half = Converting("bf16->fp8", destination_scales=0.5)
    >>> half == Converting("bf16->fp8", destination_scales=0.5)
    True
    """

    name: str
    """Source and destination formats, such as "bf16->fp8", as in `route(convert=)`."""
    source_scales: Scales = None
    """Scales with which the blocks were written."""
    destination_scales: Scales = None
    """Scales of the cache into which the blocks are fetched."""

    def __post_init__(self) -> None:
        """Copy mappings of scales, because the caller may change them later."""
        for scales in (self.source_scales, self.destination_scales):
            tensor_scales(scales, scales if isinstance(scales, Mapping) else ("all layers",))
        object.__setattr__(self, "source_scales", _frozen(self.source_scales))
        object.__setattr__(self, "destination_scales", _frozen(self.destination_scales))

    def __hash__(self) -> int:
        return hash(self.name)  # a mapping of scales cannot be hashed


def _frozen(scales: Scales) -> Scales:
    if isinstance(scales, Mapping):
        return {name: tuple(v) if isinstance(v, list) else v for name, v in scales.items()}
    return scales


class TierRoutes:
    """Routes from a tier's plan to other plans. Recently used routes are kept for reuse.

    >>> from kvatlas.planning import plan
    >>> tier, cache = (plan("Qwen3-8B", memory="8GiB", kv_dtype=d) for d in ("bf16", "fp8"))
    >>> TierRoutes(tier).to(cache, Converting("bf16->fp8", destination_scales=0.5)).conversion.name
    'bf16->fp8'
    """

    def __init__(self, tier: Plan) -> None:
        self._made = lru_cache(PLANS)(partial(_between, tier))

    def to(self, destination: Plan, convert: Converting | None = None) -> Route:
        """Return the route from the tier's plan to `destination`.

        With `convert`, the route converts layers whose formats in the two plans differ.
        """
        if convert is not None:
            check_converting(convert)
        return self._made(destination, convert)


def check_converting(convert: object) -> None:
    """Raise an error unless `convert` is a `Converting`. A plain name would lack scales."""
    if not isinstance(convert, Converting):
        problem = "A conversion must be a Converting object"
        hint = 'Pass Converting("bf16->fp8", destination_scales=0.5), for example'
        raise AtlasError(Code.BAD_CONVERSION, problem, got=repr(convert)[:200], hint=hint)


def converting_rows(written: Converting | None, asked: Converting | None) -> Converting | None:
    """Return the conversion of a fetch: `asked`, with the source scales of `written`.

    `asked` is the conversion that the fetch requests, and `written` the one that the tier was
    opened with. If `asked` or `written` is None, the result is the other argument.

    >>> rows = Converting("fp8->bf16", source_scales=0.5)
    >>> converting_rows(rows, Converting("fp8->fp16")).source_scales
    0.5
    """
    if asked is None or written is None:
        return asked if written is None else written
    check_converting(asked)
    if asked.source_scales not in (None, written.source_scales):
        problem = "The source scales differ from those that the tier was opened with"
        got = f"source_scales {asked.source_scales!r:.80}, expected {written.source_scales!r:.80}"
        hint = "Omit source_scales to use those of the tier"
        raise AtlasError(Code.BAD_CONVERSION, problem, got=got, hint=hint)
    return replace(asked, source_scales=written.source_scales)


def kept_as_written(convert: Converting) -> Converting:
    """Return a copy of `convert` whose source scales are its destination scales.

    The copy is used for blocks that already have the destination dtype: their scales stay the same.

    >>> kept_as_written(Converting("bf16->fp8", destination_scales=0.5)).source_scales
    0.5
    """
    return replace(convert, source_scales=convert.destination_scales)


def _between(source: Plan, destination: Plan, convert: Converting | None) -> Route:
    alike = fingerprint(source) == fingerprint(destination)
    # If the formats match and no source scales are given, there is nothing to convert or check.
    if convert is None or (alike and convert.source_scales is None):
        return route(source, destination, padding=False)
    scales = convert.source_scales, convert.destination_scales
    about: dict[str, Any] = {}
    if not alike:
        about = {
            "convert": convert.name,
            "source_scales": scales[0],
            "destination_scales": scales[1],
        }
    # The route comes first, because its errors for unlike models are more specific.
    made = route(source, destination, padding=False, **about)
    specs = _specs(source), _specs(destination)
    # Other caches read the rows later and cannot supply scales, so both must be given.
    refuse_rescaling(*specs, specs[0].keys() & specs[1].keys(), scales, both=True)
    return made


def _specs(plan: Plan) -> dict[str, Spec]:
    return {layer.name: layer.spec for region in plan.regions for layer in region.layers}
