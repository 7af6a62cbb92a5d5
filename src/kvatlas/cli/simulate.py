"""`kvatlas simulate`: how much of a trace's prompts the pools of a plan find again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvatlas.cli.app import Json, answer
from kvatlas.cli.failures import plain
from kvatlas.cli.hit_rows import (
    PLAN_AXES,
    POOL_AXES,
    Question,
    Row,
    axes_of_hits,
    curve_rows,
    hit_rows,
)
from kvatlas.cli.options import PlanOptions, completer, contradictory, takes_models
from kvatlas.cli.progress import progress_bar
from kvatlas.cli.replay_options import ReplayOptions, takes_replay_options
from kvatlas.cli.tables import indented, notes, table
from kvatlas.geometry.byte_sizes import size

if TYPE_CHECKING:
    from kvatlas.pool import Trace

__all__ = ["simulate"]


@takes_models
@takes_replay_options
def simulate(
    options: list[PlanOptions],
    replay: ReplayOptions,
    trace: Annotated[
        Path,
        typer.Option(
            help="Mooncake's form or token_ids, one request a line; or conversations of coding "
            "agents, one a file, or a folder of them; or a recording of `kvatlas events`, or KV "
            "events as lines of JSON.",
            show_default=False,
        ),
    ],
    trace_block: Annotated[
        int | None, typer.Option(help="Tokens of an id. [dim]By default 512 in Mooncake's form.[/]")
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Side by side over policy, block-size, memory, states, eviction, checkpoints, "
            "host-memory, disk, tier; or over values of one: memory=20GiB,40GiB. Commas, or "
            "repeated. Of a tier: none, shared, or how many percent of it are for states alone.",
            autocompletion=completer(*PLAN_AXES, *POOL_AXES),
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
    question = Question(read, replay, output is not None)
    axes = axes_of_hits(compare or [])
    simulated = hit_rows if output is None else curve_rows
    rows = [row for one in options for row in simulated(one, question, axes)]
    if output is not None:
        _save(output, read, rows)
    answer(as_json, {"rows": rows, "unseen": read.unseen}, *_parts(read, rows))


def _save(path: Path, trace: Trace, rows: list[Row]) -> None:
    from kvatlas.cli.hit_curves import hits_page, save_page

    found = [row for row in rows if not row["refused_plan"]]
    if not found:
        raise contradictory("a page without a plan", rows[0]["refused_plan"]["message"])
    facts = f"{len(trace):,} requests, {trace.tokens:,} prompt tokens. Hit rates over memory."
    facts = " ".join([facts, *_unseen(trace)])
    save_page(path, hits_page(trace.name, facts, found))


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
    return [*parts, *_tier_table(found), *notes([*told, *_unseen(trace)]), *_legend(found)]


def _unseen(trace: Trace) -> list[str]:
    return trace.unseen.sentences() if trace.unseen else []


def _tier_table(rows: list[Row]) -> list[RenderableType]:
    """Where what was found came from, of rows that have tiers below the GPU."""
    tiers = list(dict.fromkeys(tier for row in rows for tier in row["found_by_tier"]))
    if len(tiers) < 2:
        return []
    made = table("found in", *tiers, words=(0,), wraps=(0,))
    for row in rows:
        name = " ".join(filter(None, (row["model"], row["curve"], row["value"])))
        shares = [row["found_by_tier"].get(tier, 0) / max(row["tokens"], 1) for tier in tiers]
        made.add_row(plain(name), *(f"{share:.1%}" for share in shares))
    return [indented(made)]


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
