"""Tables of plans and comparisons that fit in a terminal of 80 columns.

The functions take the same data that `--json` prints, so both outputs agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvatlas.cli.compare import Row
from kvatlas.cli.failures import plain
from kvatlas.cli.fitted_table import FittedTable
from kvatlas.cli.merged_notes import merged_notes
from kvatlas.geometry.byte_sizes import size

_WIDEST = 96
"""Maximum length of a paragraph's lines, in columns; longer lines are hard to read."""


def show(*parts: RenderableType) -> None:
    """Print the parts of a command's output, with an empty line between them.

    Output to a pipe has no colours, and no line has trailing blanks.
    """
    console = Console(highlight=False)
    with console.capture() as captured:
        for number, part in enumerate(parts):
            if number:
                console.print()
            console.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))
    lines = (line.rstrip() for line in captured.get().splitlines())
    console.out("\n".join(lines), highlight=False)


def table(*columns: str, words: Iterable[int] = (0,), wraps: Iterable[int] = ()) -> FittedTable:
    """Return an empty table with these column headers.

    Columns are right-aligned, except columns with an index in `words`. Columns with indices in
    `wraps` may take several lines.
    """
    made = FittedTable()
    for number, column in enumerate(columns):
        made.add_column(
            column,
            justify="left" if number in words else "right",
            no_wrap=number not in wraps,
            overflow="fold",
            header_style="dim",
        )
    return made


def tokens(count: int) -> str:
    """Return a number of tokens as text that `--max-len` accepts, in Ki if 1024 divides it.

    >>> tokens(131072), tokens(448)
    ('128Ki', '448')
    """
    return str(count) if count % 1024 else f"{count // 1024}Ki"


def requests(count: float) -> str:
    """Return the number of requests that fit as text, rounded to one decimal.

    A count half way between two results is rounded down. `count` was already rounded to four
    decimals, so it may be too large, and rounding up again would report too many requests.

    >>> requests(79.65), requests(1064.2)
    ('79.6', '1,064.2')
    """
    return f"{count - 1e-6:,.1f}"


def indented(part: RenderableType, by: int = 2) -> Padding:
    """Return a part of the output, indented by `by` columns."""
    return Padding(part, (0, 0, 0, by))


def both_ends(source: object, destination: object) -> Table:
    """Return a table that describes the source and the destination of a copy."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row("from", Text(plain(source)))
    grid.add_row("to", Text(plain(destination)))
    return grid


def written(path: Path, *, replaced: bool = False) -> Text:
    """Return the line that reports a written or replaced file. A long path is not wrapped."""
    text = f"{'Replaced' if replaced else 'Wrote'} {plain(path)}, {size(path.stat().st_size)}."
    return Text(text, no_wrap=True)


def notes(warnings: Iterable[str]) -> list[RenderableType]:
    """Return warnings as notes, one below the other.

    Notes that are equal or differ in one number are printed once.
    """
    return labelled_notes(("", warning) for warning in warnings)


def labelled_notes(warnings: Iterable[tuple[str, str]]) -> list[RenderableType]:
    """Return (label, warning) pairs as notes. Equal warnings share one note."""
    lines = [Text(f"Note: {plain(note)}", style="yellow") for note in merged_notes(warnings)]
    return [Group(*lines)] if lines else []


def headline(summary: dict[str, Any]) -> Group:
    """Return a title with the model and its options, and a table of the plan's main figures."""
    title = Text(plain(summary["model"]), style="bold")
    parts = [f"policy {summary['policy']}", f"layout {summary['layout']}"]
    parts += [f"{name} {summary[name]}" for name in ("tp", "pp", "dcp") if summary[name] > 1]
    parts += [f"pack {summary['pack']}"] if summary["pack"] > 1 else []
    parts += [f"{size(summary['memory'])} per rank"]
    title.append("  " + ", ".join(parts), style="not bold dim")
    answer = Text(plain(summary["answer"]))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(justify="right", style="bold")
    grid.add_column()
    length, nbytes = f"{summary['max_len']:,}", summary["bytes_per_block"]
    grid.add_row("block", f"{summary['block_size']:,}", "tokens")
    grid.add_row("blocks", f"{summary['num_blocks']:,}", f"of {nbytes:,} bytes ({size(nbytes)})")
    grid.add_row("tokens that fit", f"{summary['tokens']:,}", f"in requests of {length}")
    flying = f"requests of {length} tokens, {summary['in_flight']:,} in flight"
    grid.add_row("prefilling", requests(summary["requests_at_max_len"]), flying)
    decoding = f"requests of {length} tokens"
    grid.add_row("decoding", requests(summary["requests_decoding"]), decoding)
    grid.add_row("padding", f"{summary['padding_share']:.2%}", "of the memory of such a request")
    return Group(title, answer, Text(), indented(grid))


def plan_details(summary: dict[str, Any]) -> list[RenderableType]:
    """Return a table of a plan's groups, a table of its pools, and its notes.

    The table of pools is omitted if there is only one pool.
    """
    parts: list[RenderableType] = [indented(_groups(summary["groups"]))]
    if len(summary["pools"]) > 1:
        parts.append(indented(_pools(summary["pools"], stages=summary["pp"] > 1)))
    runnable = [not_runnable(reasons)] if (reasons := summary["not_runnable"]) else []
    return [*parts, *notes([*summary["warnings"], *runnable])]


def not_runnable(reasons: Sequence[str]) -> str:
    """Return a note that vLLM cannot run the plan, with these reasons."""
    return f"vLLM cannot run this plan: {'; '.join(reasons)}. --runs-on vllm plans what it can run."


def _groups(groups: list[dict[str, Any]]) -> Table:
    """Return a table of groups, in which groups with the same figures share one row."""
    columns = ("group", "layers", "block", "page bytes", "padding", "per request")
    made = table(*columns, wraps=(0,))
    alike: dict[tuple[str, ...], list[float]] = {}
    for group in groups:
        members = group.get("members") or [group]
        for number, member in enumerate(members):
            kind = group["kind"] + (f" {group['window']:,}" if group["window"] else "")
            row = (
                "  and" if number else kind,
                f"{member['block_size']:,}",
                f"{member['page_bytes']:,}",
                f"{member['page_bytes'] - member['unpadded_page_bytes']:,}",
                # Only a group's first row shows its blocks per request, to list them once.
                "" if number else _takes(group),
                group["first_layer"] if len(members) > 1 else "",
            )
            # A split state is stored in several groups, but counts as one layer.
            alike.setdefault(row, []).append(member["pages"] / member["splits"])
    for (kind, *figures, takes, _), layers in alike.items():
        times = f"{len(layers)} x " if takes and len(layers) > 1 else ""
        made.add_row(f"{times}{kind}", f"{sum(layers):,.0f}", *figures, f"{times}{takes}")
    return made


def _takes(group: dict[str, Any]) -> str:
    if group["bytes_per_token"]:
        return f"{group['bytes_per_token']:,.0f} B/token"
    return size(group["fixed_bytes_per_request"])


def _pools(pools: list[dict[str, Any]], *, stages: bool) -> Table:
    names = ("stage", "pool") if stages else ("pool",)
    figures = ("blocks", "bytes per block", "size", "prefilling", "decoding")
    made = table(*names, *figures, words=range(len(names)))
    for pool in pools:
        place = (str(pool["stage"]), str(pool["index"]))[-len(names) :]
        made.add_row(
            *place,
            f"{pool['blocks']:,}",
            f"{pool['block_bytes']:,}",
            size(pool["bytes"]),
            *(
                requests(pool[name]) if pool[name] else "-"
                for name in ("requests_at_max_len", "requests_decoding")
            ),
        )
    return made


def sentences(lines: list[str]) -> Group:
    """Return lines as paragraphs. A line that begins with a blank continues its paragraph."""
    parts: list[RenderableType] = []
    for line in lines:
        inner = line.startswith(" ")
        if parts and not inner:
            parts.append(Text())
        parts.append(indented(Text(plain(line.strip())), 4 if inner else 2))
    spare = max(0, Console().width - _WIDEST)
    return Group(Padding(Group(*parts), (0, spare, 0, 0)))


COMPARISON_LEGEND = (
    "prefill, decode: requests that fit while all of them prefill, or all decode. "
    "ratio: decode, relative to the first plan."
)
HYBRID_LEGEND = " hybrid: attention layers that share a page with a recurrent state, or apart."


_RANKS = ("tp", "pp", "dp", "dcp")
"""Options whose values determine the topology on a number of GPUs."""


def comparison(axis: str, rows: list[Row]) -> Group:
    """Return a table with a row for each plan and, below it, the reasons why plans were refused.

    The plan that fits the most decoding requests is highlighted.
    """
    ways = any(row["way"] for row in rows)
    plain_topologies = {None, *(f"{axis} {row['value']}" for row in rows)}
    placed = axis in _RANKS and any(row["topology"] not in plain_topologies for row in rows)
    columns = (axis, "block", "tokens", "prefill", "decode", "ratio", "padding")
    more = (*(["hybrid"] if ways else []), *(["topology"] if placed else []))
    made = table(*columns, *more, words=(0, 7, 8), wraps=(0, 6 + len(more)))
    best = max((row["requests_decoding"] or 0 for row in rows), default=0)
    reasons = []
    for row in rows:
        value = plain(row["value"])
        if row["refused"]:
            refused = Text("refused", style="yellow")
            made.add_row(value, "-", refused, *["-"] * 4, *([""] * len(more)))
            reasons.append((value, plain(row["refused"]["message"])))
            continue
        made.add_row(
            value,
            f"{row['block_size']:,}",
            f"{row['tokens']:,}",
            requests(row["requests_at_max_len"]),
            requests(row["requests_decoding"]),
            f"{row['ratio']:.2f}",
            f"{row['padding_share']:.2%}",
            *([(row["way"] or "").removeprefix("states ")] if ways else []),
            *([row["topology"] or ""] if placed else []),
            style="bold green" if row["requests_decoding"] == best else "",
        )
    told: list[RenderableType] = [
        indented(Text(reason, style="yellow")) for reason in merged_notes(reasons)
    ]
    parts: list[RenderableType] = [indented(made)]
    return Group(*parts, *([Text(), *told] if told else []))
