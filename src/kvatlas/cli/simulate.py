"""`kvatlas simulate`: replay a trace and report hit rates of the prefix cache."""

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
from kvatlas.cli.options import PlanOptions, TokenizerOption, completer, takes_models
from kvatlas.cli.progress import progress_bar
from kvatlas.cli.replay_options import ReplayOptions, takes_replay_options
from kvatlas.cli.tables import indented, labelled_notes, table, written
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.byte_sizes import size

if TYPE_CHECKING:
    from kvatlas.simulate import Trace

__all__ = ["simulate"]


@takes_models
@takes_replay_options
def simulate(
    options: list[PlanOptions],
    replay: ReplayOptions,
    trace: Annotated[
        Path,
        typer.Option(
            help="The trace: a file in one of the formats of `kvatlas trace`, or a folder of "
            "conversations of coding agents.",
            show_default=False,
        ),
    ],
    trace_block: Annotated[
        int | None,
        typer.Option(
            help="Tokens that each id of the trace represents. "
            "[dim]By default 512 in Mooncake's format.[/]"
        ),
    ] = None,
    tokenizer: TokenizerOption = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare different values of an option: policy, block-size, memory, states, pack, "
            "kv-dtype, tp, eviction, checkpoints, host-memory, disk or tier. To compare only some "
            "values, list them: memory=20GiB,40GiB. May be repeated. Values of tier: none, shared, "
            "or the percentage of the tier that is reserved for states.",
            autocompletion=completer(*PLAN_AXES, *POOL_AXES),
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write an HTML page of hit rates over memory, with a curve for each value of "
            "--compare.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a trace and report how many prompt tokens are cached, and the prefill time saved."""
    from kvatlas.simulate import read_trace

    with progress_bar(f"Reading {plain(trace.name)}") as told:
        read = read_trace(trace, block=trace_block, tokenizer=tokenizer, progress=told)
    question = Question(read, replay, output is not None)
    axes = axes_of_hits(compare or [])
    simulated = hit_rows if output is None else curve_rows
    rows = [row for one in options for row in simulated(one, question, axes)]
    if output is not None:
        _save(output, read, rows)
    parts = _parts(read, rows)
    if output is not None:
        parts.append(written(output))
    answer(as_json, {"rows": rows, "unseen": read.unseen, "notes": read.notes()}, *parts)


def _save(path: Path, trace: Trace, rows: list[Row]) -> None:
    from kvatlas.cli.hit_curves import hits_page, save_page

    found = [row for row in rows if not row["refused_plan"]]
    if not found:
        message = rows[0]["refused_plan"]["message"].rpartition(" [")[0].rstrip(".")
        raise AtlasError(
            Code.CONTRADICTORY,
            "No plan fits, so there is nothing to draw",
            got=f"the error: {message}",
            hint="Pass more memory with --compare memory=..., or a smaller --max-len",
        )
    if not trace.content_known:
        raise AtlasError(
            Code.CONTRADICTORY,
            "Hit rates of this trace are unknown, so there is nothing to draw",
            got="a trace with the lengths of prompts, but without their content",
            hint="Omit --output, or pass a trace with hash_ids, token ids or text",
        )
    facts = f"{len(trace):,} requests, {trace.tokens:,} prompt tokens. Hit rates over memory."
    aside = [f"{label}: {note}".removeprefix(": ") for label, note in _set_aside(found)]
    facts = " ".join([facts, *trace.notes(), *dict.fromkeys(aside)])
    save_page(path, hits_page(trace.name, facts, found))


def _parts(trace: Trace, rows: list[Row]) -> list[RenderableType]:
    title = Text(plain(trace.name), style="bold")
    facts = f"  {len(trace):,} requests, {trace.tokens:,} prompt tokens"
    parts: list[RenderableType] = [title.append(facts, style="not bold dim")]
    told: list[tuple[str, str]] = []
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
            told.append((_label(row), row["refused_plan"]["message"]))
        elif row["refused"]:
            told.append((_label(row), f"{row['refused']:,} requests are too long for the memory."))
    found = [row for row in rows if not row["refused_plan"]]
    told += [(row["model"], warning) for row in found for warning in row["warnings"]]
    told += [("", sentence) for sentence in trace.notes()] + _set_aside(found)
    if trace.content_known and any(row["seconds_saved"] is None for row in found):
        unknown = "The number of active parameters is unknown. Pass --active-params."
        models = dict.fromkeys(row["model"] for row in found if row["seconds_saved"] is None)
        told += [(model, unknown) for model in models]
    return [*parts, *_tier_table(found), *labelled_notes(told), *_legend(found)]


def _label(row: Row) -> str:
    """Return the label of a row: its model and the values of the compared options."""
    varied = f"{row['compare']} {row['value']}" if row["compare"] else None
    return " ".join(filter(None, (row["model"], row["curve"], varied)))


def _set_aside(rows: list[Row]) -> list[tuple[str, str]]:
    """Return (model, note) for each model for which some requests of the trace are too long.

    Requests that are too long are not replayed.
    """
    found = {
        row["model"]: f"{row['set_aside']:,} requests of the trace exceed the limit of "
        f"{row['limit']:,} tokens. They are set aside and not replayed."
        for row in rows
        if row["set_aside"]
    }
    return list(found.items())


def _tier_table(rows: list[Row]) -> list[RenderableType]:
    """Return a table of the tokens that each tier served, if there are tiers below the GPU."""
    tiers = list(dict.fromkeys(tier for row in rows for tier in row["found_by_tier"]))
    if len(tiers) < 2 or not rows[0]["content_known"]:
        return []
    made = table("found in", *tiers, words=(0,), wraps=(0,))
    for row in rows:
        name = " ".join(filter(None, (row["model"], row["curve"], row["value"])))
        shares = [row["found_by_tier"].get(tier, 0) / max(row["tokens"], 1) for tier in tiers]
        made.add_row(plain(name), *(f"{share:.1%}" for share in shares))
    return [indented(made)]


def _table(name: str, rows: list[Row], key: str) -> Table:
    columns = ("block", "total", "found", "mean", "half", "again", "saved", "evicted")
    made = table(name, *columns, words=(0,), wraps=(0,))
    best = max((row.get("hit_rate") or 0.0 for row in rows), default=0.0)
    for row in rows:
        if row["refused_plan"]:
            made.add_row(plain(row[key]), "-", "-", "refused", *["-"] * 5, style="yellow")
            continue
        style = "bold green" if len(rows) > 1 and row["hit_rate"] == best else ""
        made.add_row(plain(row[key]), *_figures(row), style=style)
    return made


def _figures(row: Row) -> tuple[str, ...]:
    if not row["content_known"]:
        unknown = ("unknown", *["-"] * 4)
        return f"{row['block']:,}", size(row["memory"]), *unknown, f"{row['evictions']:,}"
    saved = row["seconds_saved"]
    return (
        f"{row['block']:,}",
        size(row["memory"]),
        f"{row['hit_rate']:.1%}",
        f"{row['hit_rate_by_request']:.1%}",
        f"{row['hit_rate_last_half']:.1%}",
        _count(row["computed_again"]),
        "-" if saved is None else f"{saved:,.0f} s",
        f"{row['evictions']:,}",
    )


def _count(tokens: int) -> str:
    """Return a number of tokens: exact below 100,000, otherwise in millions.

    >>> _count(31_744), _count(2_345_678)
    ('31,744', '2.3M')
    """
    return f"{tokens:,}" if tokens < 100_000 else f"{tokens / 1e6:,.1f}M"


def _legend(found: list[Row]) -> list[RenderableType]:
    if not found or not found[0]["content_known"]:
        return []
    text = (
        "total: cache memory of all ranks. found: share of the prompt tokens that the cache "
        f"serves (at most {found[0]['ceiling']:.1%}, if every token were kept and could be "
        "reused). mean: average of this share over requests. half: the share in the last half of "
        "the requests. again: tokens that an earlier request had computed. saved: seconds of "
        "prefill, at 2 FLOPs per parameter and token, plus attention, at --tflops. evicted: "
        "evicted blocks."
    )
    return [Text(text, style="dim")]
