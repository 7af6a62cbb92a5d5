"""Hit rates of `kvatlas simulate`: one simulation for each compared value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from kvatlas.cli.compare import AXES, check_memory_axis, usual
from kvatlas.cli.failures import plain
from kvatlas.cli.options import PlanOptions, contradictory, plan_in
from kvatlas.cli.progress import progress_bar
from kvatlas.cli.replay_options import CHECKPOINTS, EVICTIONS, ReplayOptions
from kvatlas.errors import AtlasError
from kvatlas.models import Weights
from kvatlas.planning.request import length, quantity

if TYPE_CHECKING:
    from kvatlas.simulate import PrefillCost, Trace

PLAN_AXES = ("policy", "block-size", "memory", "states", "pack", "kv-dtype", "tp")
SHARES = ("none", "shared", "10", "25", "50", "75")
"""Default values of `--compare tier`: no tier, a tier that states and attention share, or a tier
with a percentage reserved for states."""
TIER_SIZES = ("64GiB", "128GiB", "256GiB", "512GiB", "1TiB")
POOL_AXES = {
    "eviction": EVICTIONS, "checkpoints": CHECKPOINTS, "tier": SHARES, "host-memory": TIER_SIZES,
    "disk": TIER_SIZES,
}  # fmt: skip

Row = dict[str, Any]
Axes = list[tuple[str, tuple[str, ...]]]


@dataclasses.dataclass(frozen=True)
class Question:
    """The trace and the options of a simulation, without the plan."""

    trace: Trace
    replay: ReplayOptions
    over_memory: bool = False
    """Whether curves over memory are drawn. If so, memory sizes that are too small are skipped
    instead of raising an error."""


def axes_of_hits(texts: list[str]) -> Axes:
    """Parse the arguments of `--compare`: return pairs (option, values to compare).

    An empty tuple of values means that the option's usual values are compared. If `texts` is empty,
    the result is `[("", ("",))]`.

    >>> axes_of_hits(["policy,tier", "memory=1GiB,2GiB"])
    [('policy', ()), ('tier', ()), ('memory', ('1GiB', '2GiB'))]
    """
    found = []
    for text in texts:
        name, given, values = text.partition("=")
        for one in [name] if given else text.split(","):
            axis = one.strip().lower().replace("_", "-")
            if axis not in (*PLAN_AXES, *POOL_AXES):
                known = ", ".join((*PLAN_AXES, *POOL_AXES))
                problem = f"{axis!r} is not one of {known}."
                raise typer.BadParameter(problem, param_hint="'--compare'")
            found.append((axis, tuple(v.strip() for v in values.split(",") if v.strip())))
    return found or [("", ("",))]


def hit_rows(options: PlanOptions, question: Question, axes: Axes) -> Iterator[Row]:
    """Simulate the trace with each value of each compared option, and yield one row per value.

    If planning or simulation fails for a value, the row contains the error instead of hit rates.
    """
    cost = _cost(options, question)
    for axis, given in axes:
        if axis == "tier":
            _check_tiers(question.replay, given)
        check_memory_axis(options, axis)
        values = given or POOL_AXES.get(axis) or usual(options.load(), axis)
        for value in values:
            row: Row = {"model": options.model, "compare": axis or None, "value": value or None}
            row["curve"] = None
            try:
                yield row | _row(options, question, cost, axis, value) | {"refused_plan": None}
            except AtlasError as refusal:
                if not axis and not question.over_memory:
                    raise
                told = {"code": str(refusal.code), "message": str(refusal)}
                yield row | {"refused_plan": told}


def curve_rows(options: PlanOptions, question: Question, axes: Axes) -> Iterator[Row]:
    """Simulate the trace with each memory size and each value of the other compared options.

    Yield one row for each pair of a memory size and a value.
    """
    if options.gpu is not None:
        hint = "Omit --gpu: with --output, every curve is drawn over sizes of --memory"
        raise contradictory("--output and --gpu", hint)
    memories = next((given for axis, given in axes if axis == "memory"), ())
    others = [(axis, given) for axis, given in axes if axis != "memory"]
    for memory in memories or usual(options.load(), "memory"):
        sized = dataclasses.replace(options, memory=memory)
        for row in hit_rows(sized, question, others or [("", ("",))]):
            curve = f"{row['compare']} {row['value']}" if row["compare"] else None
            yield row | {"compare": "memory", "value": memory, "curve": curve}


def _row(
    options: PlanOptions, question: Question, cost: PrefillCost | None, axis: str, value: str
) -> Row:
    from kvatlas.simulate import simulate

    replay, changes, tier = question.replay, dict[str, Any](), "shared"
    if axis == "tier":
        tier = value
    elif axis == "eviction":
        replay = dataclasses.replace(replay, eviction=value)
    elif axis in ("checkpoints", "host-memory", "disk"):
        changed: dict[str, Any] = {axis.replace("-", "_"): value}
        replay = dataclasses.replace(replay, **changed)
    elif axis:
        numeric = axis in ("block-size", "tp") and value.isdecimal()
        changes[AXES[axis]] = int(value) if numeric else value
    found = options.fit(**changes)
    plan = plan_in(found)
    trace = within_limit(question.trace, options)
    with progress_bar(f"{plain(plan.model)} {value}") as told:
        rates = simulate(
            plan,
            trace,
            eviction=replay.eviction,
            checkpoints=replay.checkpoints,
            cost=cost and dataclasses.replace(cost, tflops=replay.tflops * plan.ranks),
            arrivals=replay.arrivals,
            tiers={} if tier == "none" else replay.tiers(options),
            state_share=int(tier) / 100 if tier.isdecimal() else None,
            progress=told,
        )
    return rates.as_dict() | {"warnings": list(found.warnings)}


def within_limit(trace: Trace, options: PlanOptions) -> Trace:
    """Return the trace without the requests that are too long.

    The limit is `--max-len` or, by default, the longest context of the model.
    """
    limit = options.load().max_len if options.max_len is None else length(options.max_len)
    found = trace.within(limit)
    if not len(found):
        problem = f"All requests of the trace exceed the limit of {limit:,} tokens"
        shortest = f"prompts of {int(trace.lengths.min()):,} tokens or more"
        raise contradictory(shortest, "Pass a greater --max-len, or another model", problem)
    return found


def _check_tiers(replay: ReplayOptions, values: tuple[str, ...]) -> None:
    """Raise an error if `--compare tier` lists an invalid value, or if no tier is configured."""
    if not (replay.host_memory or replay.disk):
        hint = "Add --host-memory, --disk or both"
        problem = "--compare tier requires a tier"
        raise contradictory("neither --host-memory nor --disk", hint, problem)
    for value in values:
        if value not in ("none", "shared") and not (value.isdecimal() and 0 < int(value) < 100):
            problem = f"tier must be none, shared or a percentage from 1 to 99, not {value!r}."
            raise typer.BadParameter(problem, param_hint="'--compare'")


def _cost(options: PlanOptions, question: Question) -> PrefillCost | None:
    """Return the cost of prefill in FLOPs; None if the model's active parameters are unknown."""
    from kvatlas.simulate import PrefillCost, active_parameters

    given = question.replay.active_params
    active = quantity(given, "the number of parameters") if given else None
    active = active or active_parameters(Weights.load(options.model))
    return None if active is None else PrefillCost.of(options.load(), active)
