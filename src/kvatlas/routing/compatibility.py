"""Check whether two plans cache the same model, and list the differences as `Reason`s."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing.conversion import needed_pairs, spell_conversion
from kvatlas.routing.plan_ends import PlanEnd
from kvatlas.specs.identity import without_dtypes, without_packing

_SHOWN = 3


class Reason(NamedTuple):
    """A reason why two plans cannot exchange bytes: an error code and the difference."""

    code: Code
    got: str
    hint: str = ""
    """A hint for this reason; empty for the default hint of the code."""


_HINTS = {
    Code.UNLIKE_MODELS: "Plan source and destination for one model; layers are matched by name",
    Code.MISSING_LAYERS: "For two plans of one model, pass layers= with the layers that both have",
    Code.UNLIKE_LAYERS: "Check the configs: heads, sizes, windows and ratios must be the same",
}


def fingerprint(plan: Plan) -> str:
    """Return a digest that is equal for two plans if they cache the same model in the same dtypes.

    The digest covers each layer's kind, heads, sizes, windows, sources and dtypes. It does not
    depend on topology, layout, block size, packing, memory or the model's name.

    >>> from kvatlas.planning import plan
    >>> one = plan("gpt-oss-20b", memory="20GiB", tp=2, layout="BHLNC")
    >>> two = plan("gpt-oss-20b", memory="40GiB", block_size=64)
    >>> fingerprint(one) == fingerprint(two)
    True
    >>> fingerprint(one) == fingerprint(plan("gpt-oss-20b", memory="40GiB", kv_dtype="fp8"))
    False
    """
    specs = PlanEnd(plan).specs
    kept = [[name, without_packing(specs[name])] for name in sorted(specs)]
    from hashlib import blake2b  # slow to import, and only needed here

    return blake2b(msgspec.json.encode(kept), digest_size=16).hexdigest()


def reasons(
    source: PlanEnd,
    destination: PlanEnd,
    *,
    layers: Collection[str] | None = None,
    converting: bool = False,
) -> list[Reason]:
    """Return all differences that prevent a copy. If `converting` is true, dtypes may differ."""
    if not source.specs.keys() & destination.specs.keys():
        got = f"{source.plan.model!r} and {destination.plan.model!r}, which have no layer in common"
        return [Reason(Code.UNLIKE_MODELS, got)]
    reasons = []
    models = source.plan.model, destination.plan.model
    named = "" if models[0] == models[1] else f"; the models are {models[0]!r} and {models[1]!r}"
    wanted = set(source.specs) | set(destination.specs) if layers is None else set(layers)
    for name, end in (("source", source), ("destination", destination)):
        missing = sorted(wanted - set(end.specs))
        if missing:
            got = f"the {name} lacks {_some(missing)}{named}"
            reasons.append(Reason(Code.MISSING_LAYERS, got))
    unlike: dict[Code, list[str]] = {}
    for layer in sorted(wanted & set(source.specs) & set(destination.specs)):
        one, two = source.specs[layer], destination.specs[layer]
        if without_packing(one) != without_packing(two):
            same = without_dtypes(one) == without_dtypes(two)
            if same and converting:
                continue
            code = Code.UNLIKE_DTYPES if same else Code.UNLIKE_LAYERS
            unlike.setdefault(code, []).append(layer)
    for code, names in unlike.items():
        difference = _difference(source.specs[names[0]], destination.specs[names[0]])
        problem = f"{_some(names)}: {difference}{named}"
        reasons.append(Reason(code, problem, _hint(code, source, destination, names)))
    return reasons


def refuse(reasons: list[Reason]) -> None:
    """Raise an error for the first reason; the error also reports the number of other reasons.

    Does nothing if the list is empty.
    """
    if reasons:
        code, got, hint = reasons[0]
        more = f" (and {len(reasons) - 1} more reasons)" if len(reasons) > 1 else ""
        raise AtlasError(code, got=got + more, hint=hint or _HINTS[code])


def _hint(code: Code, source: PlanEnd, destination: PlanEnd, layers: list[str]) -> str:
    """Return a hint that contains the `convert=` to pass, if the plans differ only in dtypes.

    Returns an empty string if the plans differ in something else.
    """
    if code is not Code.UNLIKE_DTYPES:
        return ""
    name = spell_conversion(needed_pairs(source, destination, layers))
    return f"Plan source and destination with the same kv_dtype, or pass convert={name!r}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _difference(one: msgspec.Struct, two: msgspec.Struct) -> str:
    if type(one) is not type(two):
        return f"{type(one).__name__} and {type(two).__name__}"
    a, b = msgspec.structs.asdict(one), msgspec.structs.asdict(two)
    return ", ".join(f"{key} {a[key]} and {b[key]}" for key in a if a[key] != b[key])
