"""Blocks of a tier for caches of another dtype: routes that convert, where a fetch asks for it.

What a tier has stays as it was stored. Only what is fetched is converted, on its way into a
rank's pools, so that nothing converted is ever found under the name of what it was made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Route, Scales, fingerprint, parse_conversion, route

PLANS = 16
"""Plans whose routes to and from a tier stay compiled."""


@dataclass(frozen=True, eq=False)
class Converting:
    """How blocks become those of another cache dtype: by name, with scales of whole tensors.

    >>> Converting("bf16->fp8", dst_scales=0.5).name
    'bf16->fp8'
    """

    name: str
    """From which formats into which, as `route(convert=)` takes it."""
    src_scales: Scales = None
    """Those that the blocks were written with."""
    dst_scales: Scales = None
    """Those of the cache that they are fetched into."""


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


def _between(src: Plan, dst: Plan, convert: Converting | None) -> Route:
    if convert is None:
        return route(src, dst)
    if fingerprint(src) == fingerprint(dst):
        _refuse_rescaling(convert)
        return route(src, dst)
    mine, theirs = convert.src_scales, convert.dst_scales
    return route(src, dst, convert=convert.name, src_scales=mine, dst_scales=theirs)


def _refuse_rescaling(convert: Converting) -> None:
    """Refuse equal formats of unlike scales: what is copied as it is would mean something else."""
    same = any(source == target for source, target in parse_conversion(convert.name))
    if same and convert.src_scales != convert.dst_scales:
        problem = "Between equal formats nothing is converted, so that scales must be equal too"
        got = f"{convert.name} from {convert.src_scales!r:.80} to {convert.dst_scales!r:.80}"
        hint = "Fetch into a cache with the scales that the blocks were written with"
        raise AtlasError(Code.BAD_CONVERSION, problem, got=got, hint=hint)
