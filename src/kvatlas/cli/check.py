"""`kvatlas check`: check whether caches can be copied from one plan to another.

The plans are read from files, or computed for one model with different options.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from stat import S_ISREG
from typing import Any

import typer
from rich.console import RenderableType
from rich.text import Text

from kvatlas.cli.failures import plain
from kvatlas.cli.options import PlanOptions, number
from kvatlas.cli.tables import both_ends, indented, table
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.byte_sizes import size
from kvatlas.planning import Plan
from kvatlas.planning.plans import LARGEST_JSON
from kvatlas.routing import Check

_NUMBERS = ("tp", "pp", "dcp", "requests", "block_size", "in_flight")
_GPUS = ("gpu", "utilization", "overhead", "dp", "ep")
_OTHERS = ("model", "prefix_caching", *_GPUS, *_NUMBERS)
_WORDS = tuple(f.name for f in dataclasses.fields(PlanOptions) if f.name not in _OTHERS)


_ERROR_NOTE = "error: the largest relative change of a row, in the 2-norm."


def two_plans(first: str, second: str | None, source: str | None, target: str | None) -> list[Plan]:
    """Return the source's and the destination's plan.

    The plans are read from the files `first` and `second`. If `second` is None, `first` is a model,
    which is planned once with the options in `source` and once with the options in `target`.
    """
    if second is not None:
        if source is not None or target is not None:
            problem = "--from and --to cannot be combined with two plan files; pass a model."
            raise typer.BadParameter(problem, param_hint="'--from'")
        return [read_plan(first), read_plan(second)]
    ends = (("'--from'", source), ("'--to'", target))
    return [PlanOptions(model=first, **changes(text or "", where)).plan() for where, text in ends]


def changes(text: str, where: str) -> dict[str, Any]:
    """Parse plan options of the form `name=value,name=value`.

    `where` is the command line flag that contains the options; error messages name the flag.

    >>> changes("tp=2,layout=LBHNC,max-len=4k", "'--from'")
    {'tp': 2, 'layout': 'LBHNC', 'max_len': '4k'}
    """
    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, given, value = part.partition("=")
        name = name.strip().lower().replace("-", "_")
        if not given or name not in (*_NUMBERS, *_WORDS):
            known = ", ".join(word.replace("_", "-") for word in (*_NUMBERS, *_WORDS))
            raise typer.BadParameter(
                f"{plain(part)!r} must be name=value, where name is one of {known}.",
                param_hint=where,
            )
        options[name] = value.strip()
        if name in _NUMBERS:
            problem = f"{plain(name)} must be an integer, not {plain(value)!r}."
            options[name] = number(value, problem, where)
    return options


def read_plan(path: str) -> Plan:
    """Read and validate a plan that `kvatlas plan --save` wrote."""
    try:
        # Reading a pipe may block, and reading a device may never end.
        if not S_ISREG(Path(path).stat().st_mode):
            raise OSError(0, "not a regular file")
        with Path(path).open("rb") as file:
            text = file.read(LARGEST_JSON + 1)
    except (OSError, ValueError) as problem:  # a ValueError is an invalid file name
        reason = problem.strerror if isinstance(problem, OSError) else problem
        got = f"{path}: {reason}"
        hint = "Write a plan with `kvatlas plan --save`, or pass a model, --from and --to"
        problem_text = "The plan file cannot be read"
        raise AtlasError(Code.UNREADABLE, problem_text, got=got, hint=hint) from problem
    try:
        return Plan.from_json(text)
    except AtlasError as problem:  # add the path to the error
        got = f"{path}: {problem.got}"
        raise AtlasError(problem.code, problem.problem, got=got, hint=problem.hint) from problem


def check_parts(source: Plan, destination: Plan, answer: Check) -> list[RenderableType]:
    """Return a check's result as text and tables.

    The output shows the cost of the copy or, if caches cannot be copied, the reasons.
    """
    head = both_ends(source, destination)
    if not answer.ok:
        no = Text("No.", style="bold red")
        why = table("code", "difference", words=(0, 1), wraps=(1,))
        for reason in answer.reasons:
            why.add_row(str(reason.code), plain(reason.got))
        hints = dict.fromkeys(reason.hint for reason in answer.reasons if reason.hint)
        return [head, no, indented(why), *(Text(f"{plain(hint)}.", style="dim") for hint in hints)]
    yes = Text("Yes: ", style="bold green")
    yes.append(
        f"{answer.tokens:,} tokens take {size(answer.nbytes)} in {answer.descriptors:,} "
        "descriptors if blocks are scattered.",
        style="not bold default",
    )
    columns = ("from rank", "to rank", "bytes", "descriptors", "median", "largest", "faster")
    made = table(*columns, words=(6,))
    for pair in answer.pairs:
        report = pair.report
        made.add_row(
            str(pair.source_rank),
            str(pair.destination_rank),
            size(report.nbytes),
            f"{report.descriptors:,}",
            size(report.median),
            size(report.largest),
            "staged" if report.stage or answer.conversion else "direct",
        )
    note = "direct: one descriptor per run. staged: gather, send large pieces, scatter."
    shown: list[RenderableType] = [head, yes, indented(made), Text(note, style="dim")]
    if answer.conversion:
        shown += [_conversion_table(answer), Text(_ERROR_NOTE, style="dim")]
    return shown


def _conversion_table(answer: Check) -> RenderableType:
    """Return a table with one row for each dtype conversion.

    A row contains the largest conversion errors, and whether the source or the destination
    converts.
    """
    made = table("conversion", "layers", "by", "at the", "error", "with outliers", words=(0, 2, 3))
    for change in answer.conversion:
        errors = (f"{error:.2g}" for error in change.error)
        made.add_row(str(change), str(change.layers), change.way, change.at, *errors)
    return indented(made)
