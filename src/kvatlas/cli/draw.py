"""`kvatlas map`: compute the plans to draw for a model, or read them from files."""

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
"""Values that the controls of the HTML page offer, in addition to the given options."""
_MOST_DRAWN = 150_000
"""Maximum total `_weight` of the plans of one HTML page, which keeps it under a megabyte."""


def draw(
    options: PlanOptions,
    source: str | None,
    target: str | None,
    *,
    tokens: int | None,
    knobs: bool,
) -> Map:
    """Return the map of one plan, or of the route between two plans.

    The first plan has the options `options`; options in `source` override them. If
    `options.model` is a plan file, the first plan is read from the file. `target` is the second
    plan: a plan file, or options. If `target` is given, the map shows the route of a request of
    `tokens` tokens from the first plan to the second. If `knobs` is true, the map of a model
    includes other plans, for the controls of the HTML page.
    """
    if _is_plan(options.model):
        if source is not None or options != PlanOptions(model=options.model):
            problem = "a saved plan cannot be changed; omit --from and the plan options."
            raise typer.BadParameter(problem, param_hint="'MODEL'")
        to = None if target is None else _end(options, target)
        return Map(read_plan(options.model), to, tokens=tokens)
    if source:
        options = dataclasses.replace(options, **changes(source, "'--from'"))
    planned = plan_on(options)
    to = None if target is None else _end(options, target)
    others = _others(options, planned.plan) if knobs else []
    return Map(planned.plan, to, others=others, fit=planned.fit, tokens=tokens)


def _end(options: PlanOptions, target: str) -> Plan:
    """Return the destination's plan.

    `target` is a plan file, or plan options that replace some of `options`.
    """
    if "=" not in target and target:
        return read_plan(target)
    if _is_plan(options.model):
        problem = "the source is a saved plan, so the destination must be a saved plan, too."
        raise typer.BadParameter(problem, param_hint="'--to'")
    return dataclasses.replace(options, **changes(target, "'--to'")).plan()


def _others(options: PlanOptions, shown: Plan) -> list[Plan]:
    """Return the plans that the controls of the HTML page can select.

    Most of these plans differ from `options` in one option. Unless the HTML page would become too
    large, the result also contains plans that differ in the layout and one other option. `shown` is
    not included.
    """
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
    """Return a plan's estimated size in the HTML page: 1 for each layer, 40 for each region."""
    return sum(40 + len(region.layers) for region in plan.regions)


def _planned(options: PlanOptions, changed: dict[str, object]) -> Plan | None:
    """Plan with `options`, some replaced by `changed`. Return None if no plan is possible."""
    try:
        return options.plan(**changed)
    except (AtlasError, typer.BadParameter):
        return None


class _Outline(msgspec.Struct):
    """JSON keys that a plan file has and a model's config does not."""

    regions: msgspec.Raw
    pools: msgspec.Raw


def _is_plan(path: str) -> bool:
    """Return whether a JSON file contains a plan, valid or not, and not a model's config."""
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
        hint = "Write the plan again with `kvatlas plan --save`, or pass the name of a model"
        raise AtlasError(
            Code.UNREADABLE, "The file is not valid JSON", got=got, hint=hint
        ) from problem
    except (OSError, ValueError):
        return False
    return True
