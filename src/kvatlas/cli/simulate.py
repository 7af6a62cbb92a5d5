"""`kvatlas simulate`: how much of a trace's prompts the pools of a plan find again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvatlas.cli.app import Json, answer
from kvatlas.cli.compare import AXES, usual
from kvatlas.cli.failures import plain
from kvatlas.cli.options import PlanOptions, completer, contradictory, takes_models
from kvatlas.cli.progress import progress_bar
from kvatlas.cli.tables import indented, notes, table
from kvatlas.errors import AtlasError
from kvatlas.models import Weights
from kvatlas.planning import quantity, size

if TYPE_CHECKING:
    from kvatlas.pool import PrefillCost, Trace

__all__ = ["simulate"]

_PLAN_AXES = ("policy", "block-size", "memory", "states", "pack", "kv-dtype", "tp")
_POOL_AXES = ("eviction", "checkpoints")
_EVICTIONS = ("fifo", "lru", "lfu", "s3-fifo", "saved-compute", "optimal")
_CHECKPOINTS = (
    "every-block", "vllm-default", "prompt-end", "branch-points", "every-2048", "every-8192",
)  # fmt: skip

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Question:
    """What is simulated, but for the plan."""

    trace: Trace
    eviction: str
    checkpoints: str | None
    arrivals: bool
    tflops: float
    active: int | None
    over_memory: bool = False
    """Whether curves are drawn: a memory that is too small is a point that is missing."""


@takes_models
def simulate(
    options: list[PlanOptions],
    trace: Annotated[
        Path,
        typer.Option(
            help="Mooncake's form or token_ids, one request a line; or conversations of coding "
            "agents, one a file, or a folder of them.",
            show_default=False,
        ),
    ],
    trace_block: Annotated[
        int | None, typer.Option(help="Tokens of an id. [dim]By default 512 in Mooncake's form.[/]")
    ] = None,
    eviction: Annotated[
        str,
        typer.Option(help="What goes first: lru, ...", autocompletion=completer(*_EVICTIONS)),
    ] = "lru",
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Where states and windows are kept: every-block, vllm-default, prompt-end, "
            "branch-points, every-4096; within-25 behind it for a quarter of the memory. "
            "[dim]By default branch-points.[/]",
            autocompletion=completer(*_CHECKPOINTS),
        ),
    ] = None,
    arrivals: Annotated[
        bool, typer.Option("--arrivals", help="Requests come at their times, and hold blocks.")
    ] = False,
    tflops: Annotated[
        float, typer.Option(help="TFLOP/s that a rank sustains while it computes prompts.")
    ] = 400.0,
    active_params: Annotated[
        str | None,
        typer.Option(help="Parameters that a token meets: 5.1G. [dim]By default the model's.[/]"),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Side by side over policy, block-size, memory, states, eviction, checkpoints; "
            "or over values of one: memory=20GiB,40GiB. Commas, or repeated.",
            autocompletion=completer(*_PLAN_AXES, *_POOL_AXES),
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write curves over memory to a page; what else is compared makes more of them.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """How much of a trace's prompts is found again, and what that saves."""
    from kvatlas.pool import read_trace

    with progress_bar(f"Reading {plain(trace.name)}") as told:
        read = read_trace(trace, block=trace_block, progress=told)
    active = quantity(active_params, "the parameters") if active_params else None
    question = _Question(read, eviction, checkpoints, arrivals, tflops, active, output is not None)
    axes = _axes(compare or [])
    simulated = _rows if output is None else _curve_rows
    rows = [row for one in options for row in simulated(one, question, axes)]
    if output is not None:
        _save(output, read, rows)
    answer(as_json, {"rows": rows}, *_parts(read, rows))


def _axes(texts: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Axes to vary, with their values; one without a name where nothing varies."""
    found = []
    for text in texts:
        name, given, values = text.partition("=")
        for one in [name] if given else text.split(","):
            axis = one.strip().lower().replace("_", "-")
            if axis not in (*_PLAN_AXES, *_POOL_AXES):
                known = ", ".join((*_PLAN_AXES, *_POOL_AXES))
                problem = f"{axis!r} is none of {known}."
                raise typer.BadParameter(problem, param_hint="'--compare'")
            found.append((axis, tuple(v.strip() for v in values.split(",") if v.strip())))
    return found or [("", ("",))]


def _rows(
    options: PlanOptions, question: _Question, axes: list[tuple[str, tuple[str, ...]]]
) -> Iterator[Row]:
    cost = _cost(options, question)
    for axis, given in axes:
        own = {"eviction": _EVICTIONS, "checkpoints": _CHECKPOINTS}
        values = given or own.get(axis) or usual(options.load(), axis)
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


def _curve_rows(
    options: PlanOptions, question: _Question, axes: list[tuple[str, tuple[str, ...]]]
) -> Iterator[Row]:
    """A row for each memory, for every value of what else is compared."""
    memories = next((given for axis, given in axes if axis == "memory"), ())
    others = [(axis, given) for axis, given in axes if axis != "memory"] or [("", ("",))]
    for memory in memories or usual(options.load(), "memory"):
        for row in _rows(dataclasses.replace(options, memory=memory), question, others):
            curve = f"{row['compare']} {row['value']}" if row["compare"] else None
            yield row | {"compare": "memory", "value": memory, "curve": curve}


def _save(path: Path, trace: Trace, rows: list[Row]) -> None:
    from kvatlas.cli.hit_curves import hits_page, save_page

    found = [row for row in rows if not row["refused_plan"]]
    if not found:
        raise contradictory("a page without a plan", rows[0]["refused_plan"]["message"])
    facts = f"{len(trace):,} requests, {trace.tokens:,} prompt tokens. Hit rates over memory."
    save_page(path, hits_page(trace.name, facts, found))


def _row(
    options: PlanOptions, question: _Question, cost: PrefillCost | None, axis: str, value: str
) -> Row:
    from kvatlas.pool import simulate as simulate_plan

    chosen = {"eviction": question.eviction, "checkpoints": question.checkpoints}
    changes: dict[str, Any] = {}
    if axis in chosen:
        chosen[axis] = value
    elif axis:
        numeric = axis in ("block-size", "tp") and value.isdecimal()
        changes[AXES[axis]] = int(value) if numeric else value
    plan = options.plan(**changes)
    with progress_bar(f"{plain(plan.model)} {value}") as told:
        rates = simulate_plan(
            plan,
            question.trace,
            eviction=chosen["eviction"] or "lru",
            checkpoints=chosen["checkpoints"],
            cost=cost and dataclasses.replace(cost, tflops=question.tflops * plan.ranks),
            arrivals=question.arrivals,
            progress=told,
        )
    return rates.as_dict()


def _cost(options: PlanOptions, question: _Question) -> PrefillCost | None:
    """What a prompt costs; None where nobody says how many parameters a token meets."""
    from kvatlas.pool import PrefillCost, active_parameters

    active = question.active or active_parameters(Weights.load(options.model))
    return None if active is None else PrefillCost.of(options.load(), active)


def _parts(trace: Trace, rows: list[Row]) -> list[RenderableType]:
    title = Text(plain(trace.name), style="bold")
    facts = f"  {len(trace):,} requests, {trace.tokens:,} prompt tokens"
    parts: list[RenderableType] = [title.append(facts, style="not bold dim")]
    told = []
    tables: dict[tuple[str, str | None], list[Row]] = {}
    for row in rows:
        heading = " ".join(filter(None, (row["model"] if row["compare"] else "", row["curve"])))
        tables.setdefault((heading, row["compare"]), []).append(row)
    for (model, axis), some in tables.items():
        parts.append(indented(_table(axis or "model", some, "value" if axis else "model")))
        if axis:
            parts.insert(len(parts) - 1, Text(plain(model), style="bold"))
    for row in rows:
        if row["refused_plan"]:
            told.append(f"{row['compare']} {row['value']}: {row['refused_plan']['message']}")
        elif row["refused"]:
            told.append(f"{row['model']} {row['value'] or ''}: {row['refused']:,} never fit.")
    found = [row for row in rows if not row["refused_plan"]]
    return [*parts, *notes(told), *_legend(found)]


def _table(name: str, rows: list[Row], key: str) -> Table:
    columns = ("block", "memory", "found", "mean", "half", "again", "saved", "evicted")
    made = table(name, *columns, words=(0,), wraps=(0,))
    best = max((row.get("hit_rate", 0.0) for row in rows), default=0.0)
    for row in rows:
        if row["refused_plan"]:
            made.add_row(plain(row[key]), "-", "-", "refused", *["-"] * 5, style="yellow")
            continue
        style = "bold green" if len(rows) > 1 and row["hit_rate"] == best else ""
        made.add_row(plain(row[key]), *_figures(row), style=style)
    return made


def _figures(row: Row) -> tuple[str, ...]:
    saved = row["seconds_saved"]
    return (
        f"{row['block']:,}",
        size(row["memory"]),
        f"{row['hit_rate']:.1%}",
        f"{row['hit_rate_by_request']:.1%}",
        f"{row['hit_rate_last_half']:.1%}",
        f"{row['computed_again'] / 1e6:,.1f}M",
        "-" if saved is None else f"{saved:,.0f} s",
        f"{row['evictions']:,}",
    )


def _legend(found: list[Row]) -> list[RenderableType]:
    if not found:
        return []
    text = (
        f"found: prompt tokens that need not be computed, of {found[0]['ceiling']:.1%} that any "
        "memory would find; mean: over requests; half: of the last half of them. again: tokens "
        "computed although an earlier request had them. saved: seconds of prefill, at 2 FLOPs a "
        "parameter and token, attention, and the rate of --tflops. evicted: blocks."
    )
    lines: list[RenderableType] = [Text(text, style="dim")]
    if any(row["seconds_saved"] is None for row in found):
        hint = "A mixture of experts: --active-params says how many parameters a token meets."
        lines += notes([hint])
    return lines
