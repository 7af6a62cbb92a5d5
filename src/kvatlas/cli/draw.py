"""`kvatlas map`: the plans that a map is made of, from a model or from files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import typer

from kvatlas.cli.check import changes, read_plan
from kvatlas.cli.fit import plan_on
from kvatlas.cli.options import PlanOptions
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.maps import Map
from kvatlas.planning import Plan
from kvatlas.planning.plans import LARGEST_JSON

_VARIED: dict[str, tuple[object, ...]] = {
    "layout": tuple(layout.order for layout in ENGINE_LAYOUTS),
    "block_size": (16, 32, 64),
    "tp": (1, 2, 4, 8),
    "kv_dtype": ("auto", "fp8"),
    "pack": ("auto", "1"),
}
"""What the page's knobs offer, each beside the options that were given."""
_MOST_DRAWN = 150_000
"""What plans of one page may weigh together, as `_weight` counts it: it stays under a megabyte."""


def draw(
    options: PlanOptions,
    source: str | None,
    target: str | None,
    *,
    tokens: int | None,
    knobs: bool,
) -> Map:
    """The map of these options: of a plan's file where the model is one, else of a new plan."""
    if _is_plan(options.model):
        if source is not None or options != PlanOptions(model=options.model):
            raise typer.BadParameter("a saved plan leaves nothing to change.", param_hint="'MODEL'")
        to = None if target is None else _end(options, target)
        return Map(read_plan(options.model), to, tokens=tokens)
    if source:
        options = dataclasses.replace(options, **changes(source, "'--from'"))
    planned = plan_on(options)
    to = None if target is None else _end(options, target)
    others = _others(options, planned.plan) if knobs else []
    return Map(planned.plan, to, others=others, fit=planned.fit, tokens=tokens)


def _end(options: PlanOptions, target: str) -> Plan:
    """The other end of a route: a saved plan, or the same model with some options changed."""
    if "=" not in target and target:
        return read_plan(target)
    if _is_plan(options.model):
        problem = "a saved plan goes to a saved plan: name its file."
        raise typer.BadParameter(problem, param_hint="'--to'")
    return dataclasses.replace(options, **changes(target, "'--to'")).plan()


def _others(options: PlanOptions, shown: Plan) -> list[Plan]:
    """Plans with one option changed, and with another order besides, where they are possible."""
    made: dict[str, dict[object, Plan]] = {}
    for name, values in _VARIED.items():
        planned = ((value, _planned(options, {name: value})) for value in values)
        made[name] = {value: one for value, one in planned if one is not None}
    found = [one for plans in made.values() for one in plans.values()]
    orders = made.pop("layout")
    pairs = [
        {"layout": order, name: value}
        for name, plans in made.items()
        for value, one in plans.items()
        if one != shown
        for order, other in orders.items()
        if other != shown
    ]
    heaviest = max(_weight(one) for one in (shown, *found))
    if (len(found) + len(pairs)) * heaviest <= _MOST_DRAWN:
        found += [one for pair in pairs if (one := _planned(options, pair)) is not None]
    return [one for one in found if one != shown]


def _weight(plan: Plan) -> int:
    """How much a plan adds to a page: a region is about as much as forty numbers of layers."""
    return sum(40 + len(region.layers) for region in plan.regions)


def _planned(options: PlanOptions, changed: dict[str, object]) -> Plan | None:
    """A plan with some options changed; None where the model or its backends refuse."""
    try:
        return options.plan(**changed)
    except (AtlasError, typer.BadParameter):
        return None


class _Outline(msgspec.Struct):
    """What only plans have."""

    regions: msgspec.Raw
    pools: msgspec.Raw


def _is_plan(path: str) -> bool:
    """Whether a file is a plan, sound or not, rather than a model's config."""
    file = Path(path)
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            text = opened.read(LARGEST_JSON + 1)
        msgspec.json.decode(text, type=_Outline)
    except msgspec.ValidationError:
        return False
    except msgspec.DecodeError as problem:
        got = f"{path}: {problem}"
        hint = "Save the plan again, or name a model"
        raise AtlasError(Code.UNREADABLE, got=got, hint=hint) from problem
    except (OSError, ValueError):
        return False
    return True
