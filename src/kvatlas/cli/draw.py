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
from kvatlas.planning import LARGEST_JSON, Plan

_VARIED: dict[str, tuple[object, ...]] = {
    "layout": tuple(layout.order for layout in ENGINE_LAYOUTS),
    "block_size": (16, 32, 64),
    "tp": (1, 2, 4, 8),
    "kv_dtype": ("auto", "fp8"),
    "pack": ("auto", "1"),
}
"""What the page's knobs offer, each beside the options that were given."""


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
    """Plans with one option changed, where the model and its backends allow it."""
    found: list[Plan] = []
    for name, values in _VARIED.items():
        for value in values:
            try:
                found.append(options.plan(**{name: value}))
            except (AtlasError, typer.BadParameter):
                continue
    return [one for one in found if one != shown]


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
