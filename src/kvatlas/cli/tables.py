"""Plans and comparisons as tables that are read at 80 columns.

Everything here takes what `--json` prints, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvatlas.cli.compare import Row
from kvatlas.cli.failures import plain
from kvatlas.geometry.byte_sizes import size

_WIDEST = 96
"""Columns after which sentences are hard to read."""


def show(*parts: RenderableType) -> None:
    """Print parts with an empty line between them: colourless, and without blanks, when piped."""
    console = Console(highlight=False)
    with console.capture() as captured:
        for number, part in enumerate(parts):
            if number:
                console.print()
            console.print(part)
    lines = (line.rstrip() for line in captured.get().splitlines())
    console.out("\n".join(lines), highlight=False)


def table(*columns: str, words: Iterable[int] = (0,), wraps: Iterable[int] = ()) -> Table:
    """A table of numbers, but for the columns of `words`; those of `wraps` may wrap."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
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
    """A length as `--max-len` takes it, short where it is round.

    >>> tokens(131072), tokens(448)
    ('128Ki', '448')
    """
    return str(count) if count % 1024 else f"{count // 1024}Ki"


def indented(part: RenderableType, by: int = 2) -> Padding:
    """A part moved to the right."""
    return Padding(part, (0, 0, 0, by))


def both_ends(src: object, dst: object) -> Text:
    """The two plans of a copy."""
    text = Text("from  ", style="dim").append(plain(src), style="not dim")
    return text.append("\nto    ", style="dim").append(plain(dst), style="not dim")


def notes(warnings: Iterable[str]) -> list[RenderableType]:
    """What was assumed, as lines."""
    return [Text(f"Note: {plain(warning)}", style="yellow") for warning in warnings]


def headline(summary: dict[str, Any]) -> Group:
    """The model, its topology, and the figures of its plan."""
    title = Text(plain(summary["model"]), style="bold")
    parts = [f"policy {summary['policy']}", f"layout {summary['layout']}"]
    parts += [f"{name} {summary[name]}" for name in ("tp", "pp", "dcp") if summary[name] > 1]
    parts += [f"pack {summary['pack']}"] if summary["pack"] > 1 else []
    parts += [f"{size(summary['memory'])} a rank"]
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
    flying = f"of {length} tokens, {summary['in_flight']:,} of them in flight"
    grid.add_row("prefilling", f"{summary['requests_at_max_len']:,.1f}", f"requests {flying}")
    decoding = f"requests of {length} tokens"
    grid.add_row("decoding", f"{summary['requests_decoding']:,.1f}", decoding)
    grid.add_row("padding", f"{summary['padding_share']:.2%}", "of what such a request claims")
    return Group(title, answer, Text(), indented(grid))


def plan_details(summary: dict[str, Any]) -> list[RenderableType]:
    """A plan behind its headline: its groups, its pools where there are several, notes."""
    parts: list[RenderableType] = [indented(_groups(summary["groups"]))]
    if len(summary["pools"]) > 1:
        parts.append(indented(_pools(summary["pools"], stages=summary["pp"] > 1)))
    return [*parts, *notes(summary["warnings"])]


def _groups(groups: list[dict[str, Any]]) -> Table:
    """Groups, alike ones in one row; unlike pages of a group in a row each."""
    made = table("group", "layers", "block", "page bytes", "padding", "a request takes", wraps=(0,))
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
                # A group takes whole blocks, whatever its members.
                "" if number else _takes(group),
                group["first_layer"] if len(members) > 1 else "",
            )
            # A state that is split lies in several groups: it is one layer all the same.
            alike.setdefault(row, []).append(member["pages"] / member["splits"])
    for (kind, *figures, takes, _), layers in alike.items():
        times = f"{len(layers)} x " if len(layers) > 1 else ""
        made.add_row(f"{times}{kind}", f"{sum(layers):,.0f}", *figures, f"{times}{takes}")
    return made


def _takes(group: dict[str, Any]) -> str:
    if group["bytes_per_token"]:
        return f"{group['bytes_per_token']:,.0f} B/token"
    return size(group["fixed_bytes_per_request"])


def _pools(pools: list[dict[str, Any]], *, stages: bool) -> Table:
    names = ("stage", "pool") if stages else ("pool",)
    figures = ("blocks", "bytes per block", "in all", "prefilling", "decoding")
    made = table(*names, *figures, words=range(len(names)))
    for pool in pools:
        place = (str(pool["stage"]), str(pool["index"]))[-len(names) :]
        made.add_row(
            *place,
            f"{pool['blocks']:,}",
            f"{pool['block_bytes']:,}",
            size(pool["bytes"]),
            *(
                f"{pool[name]:,.1f}" if pool[name] else "-"
                for name in ("requests_at_max_len", "requests_decoding")
            ),
        )
    return made


def sentences(lines: list[str]) -> Group:
    """Sentences as paragraphs, continuations indented below them."""
    parts: list[RenderableType] = []
    for line in lines:
        inner = line.startswith(" ")
        if parts and not inner:
            parts.append(Text())
        parts.append(indented(Text(plain(line.strip())), 4 if inner else 2))
    spare = max(0, Console().width - _WIDEST)
    return Group(Padding(Group(*parts), (0, spare, 0, 0)))


def comparison(axis: str, rows: list[Row]) -> Group:
    """Plans beside each other, with what each fits of the first; a refusal says why.

    The one that fits most while decoding is set off.
    """
    columns = ("block", "tokens", "prefilling", "decoding", "ratio", "padding")
    last = "states" if any(row["way"] for row in rows) else ""
    made = table(axis, *columns, last, words=(0, 7), wraps=(7,))
    parts: list[RenderableType] = [indented(made)]
    best = max((row["requests_decoding"] or 0 for row in rows), default=0)
    for row in rows:
        value = plain(row["value"])
        if row["refused"]:
            code = Text(row["refused"]["code"], style="yellow")
            made.add_row(value, "-", code, *["-"] * 4, "")
            reason = Text(f"{value}: {plain(row['refused']['message'])}", style="yellow")
            parts += [Text(), indented(reason)]
            continue
        made.add_row(
            value,
            f"{row['block_size']:,}",
            f"{row['tokens']:,}",
            f"{row['requests_at_max_len']:,.1f}",
            f"{row['requests_decoding']:,.1f}",
            f"{row['ratio']:.2f}",
            f"{row['padding_share']:.2%}",
            (row["way"] or "").removeprefix("states "),
            style="bold green" if row["requests_decoding"] == best else "",
        )
    return Group(*parts)
