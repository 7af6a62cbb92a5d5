"""Blocks of a tier for caches of another dtype: routes that convert, where a fetch asks for it.

What a tier has stays as it was stored. Only what is fetched is converted, on its way into a
rank's pools, so that nothing converted is ever found under the name of what it was made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Route, Scales, fingerprint, route
from kvatlas.routing.conversion import tensor_scales
from kvatlas.specs import Spec
from kvatlas.specs.cell_formats import needs_scales
from kvatlas.specs.identity import without_packing

PLANS = 16
"""Plans whose routes to and from a tier stay compiled."""


@dataclass(frozen=True)
class Converting:
    """How blocks become those of another cache dtype: by name, with scales of whole tensors.

    >>> Converting("bf16->fp8", dst_scales=0.5) == Converting("bf16->fp8", dst_scales=0.5)
    True
    """

    name: str
    """From which formats into which, as `route(convert=)` takes it."""
    src_scales: Scales = None
    """Those that the blocks were written with."""
    dst_scales: Scales = None
    """Those of the cache that they are fetched into."""

    def __post_init__(self) -> None:
        """Keep the scales of now, if they are some: who has given them may change them later."""
        for scales in (self.src_scales, self.dst_scales):
            tensor_scales(scales, scales if isinstance(scales, Mapping) else ("all layers",))
        object.__setattr__(self, "src_scales", _frozen(self.src_scales))
        object.__setattr__(self, "dst_scales", _frozen(self.dst_scales))

    def __hash__(self) -> int:
        return hash(self.name)  # scales by layer have none


def _frozen(scales: Scales) -> Scales:
    if isinstance(scales, Mapping):
        return {name: tuple(v) if isinstance(v, list) else v for name, v in scales.items()}
    return scales


class TierRoutes:
    """Routes from a tier's plan to others, each made once.

    >>> from kvatlas.planning import plan
    >>> tier, cache = (plan("Qwen3-8B", memory="8GiB", kv_dtype=d) for d in ("bf16", "fp8"))
    >>> TierRoutes(tier).to(cache, Converting("bf16->fp8", dst_scales=0.5)).conversion.name
    'bf16->fp8'
    """

    def __init__(self, tier: Plan) -> None:
        self._made = lru_cache(PLANS)(partial(_between, tier))

    def to(self, dst: Plan, convert: Converting | None = None) -> Route:
        """The route to a plan; it converts where formats differ, and that was asked for."""
        if convert is not None:
            check_converting(convert)
        return self._made(dst, convert)


def check_converting(convert: object) -> None:
    """Refuse what does not say how to convert: a name alone has no scales."""
    if not isinstance(convert, Converting):
        problem, hint = "This is no Converting", 'Pass Converting("bf16->fp8", dst_scales=0.5), say'
        raise AtlasError(Code.BAD_CONVERSION, problem, got=repr(convert)[:200], hint=hint)


def converting_rows(written: Converting | None, asked: Converting | None) -> Converting | None:
    """How rows become a cache's blocks: as a fetch asks, from the scales they were written with.

    >>> rows = Converting("fp8->bf16", src_scales=0.5)
    >>> converting_rows(rows, Converting("fp8->fp16")).src_scales
    0.5
    """
    if asked is None or written is None:
        return asked if written is None else written
    check_converting(asked)
    if asked.src_scales not in (None, written.src_scales):
        problem = "The tier's blocks were written with other scales"
        got = f"{asked.src_scales!r:.80} where the tier was opened with {written.src_scales!r:.80}"
        hint = "Leave src_scales out: the tier knows them"
        raise AtlasError(Code.BAD_CONVERSION, problem, got=got, hint=hint)
    return replace(asked, src_scales=written.src_scales)


def kept_as_written(convert: Converting) -> Converting:
    """What becomes of blocks that a cache has stored itself, which converts others so: nothing.

    >>> kept_as_written(Converting("bf16->fp8", dst_scales=0.5)).src_scales
    0.5
    """
    return replace(convert, src_scales=convert.dst_scales)


def _between(src: Plan, dst: Plan, convert: Converting | None) -> Route:
    alike = fingerprint(src) == fingerprint(dst)
    # Where nothing is converted, and nobody says what blocks were written with, it is as if
    # nobody had asked for a conversion.
    if convert is None or (alike and convert.src_scales is None):
        return route(src, dst)
    about: dict[str, Any] = {}
    if not alike:
        scales = {"src_scales": convert.src_scales, "dst_scales": convert.dst_scales}
        about = {"convert": convert.name, **scales}
    made = route(src, dst, **about)  # which says first whether these are of one model
    _refuse_rescaling(src, dst, convert)
    return made


def _refuse_rescaling(src: Plan, dst: Plan, convert: Converting) -> None:
    """Refuse unlike scales of what is copied as it is: it would mean something else then."""
    specs = _specs(src), _specs(dst)
    mine = tensor_scales(convert.src_scales, specs[0])
    theirs = tensor_scales(convert.dst_scales, specs[1])
    for name in specs[0].keys() & specs[1].keys():
        one, two = (without_packing(own[name]) for own in specs)
        if one == two and needs_scales(two) and mine.get(name) != theirs.get(name):
            problem = "Equal formats are copied as they are, so that scales must be equal too"
            got = f"{name:.200}: {mine.get(name)} and {theirs.get(name)} for {convert.name:.80}"
            hint = "Fetch into a cache with the scales that the blocks were written with"
            raise AtlasError(Code.BAD_CONVERSION, problem, got=got, hint=hint)


def _specs(plan: Plan) -> dict[str, Spec]:
    """What each layer keeps."""
    return {layer.name: layer.spec for region in plan.regions for layer in region.layers}
