"""`kvatlas doctor`: check whether two vLLM engines can exchange caches."""

from __future__ import annotations

from pathlib import Path
from stat import S_ISREG

import typer
from rich.console import RenderableType
from rich.text import Text

from kvatlas.cli.failures import plain
from kvatlas.cli.tables import indented, table
from kvatlas.engines.vllm import Diagnosis, EngineArguments, read_engine
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.byte_sizes import size
from kvatlas.planning import Plan
from kvatlas.planning.plans import LARGEST_JSON

_STYLES = {"ok": "green", "look": "yellow", "no": "bold red"}

Engines = tuple[EngineArguments | Plan, EngineArguments | Plan]


def two_engines(first: str, second: str | None, prefill: str | None, decode: str | None) -> Engines:
    """Read two engines from files, or make them from one model and two lists of options.

    With one model, `first` is its name, and `prefill` and `decode` are the engines' options.
    """
    if second is not None:
        if prefill is not None or decode is not None:
            problem = "--from and --to cannot be combined with two engine files; pass a model."
            raise typer.BadParameter(problem, param_hint="'--from'")
        return _read(first), _read(second)
    return (
        EngineArguments.of_changes(first, prefill or ""),
        EngineArguments.of_changes(first, decode or ""),
    )


def _read(path: str) -> EngineArguments | Plan:
    try:
        if not S_ISREG(Path(path).stat().st_mode):
            raise OSError(0, "not a regular file")
        with Path(path).open("rb") as file:
            return read_engine(file.read(LARGEST_JSON + 1))
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        hint = "Pass a file with a vllm serve command line, or a plan from `kvatlas plan --save`"
        raise AtlasError(
            Code.UNREADABLE,
            "The engine file cannot be read",
            got=f"{path}: {reason}",
            hint=hint,
        ) from problem


def doctor_parts(found: Diagnosis) -> list[RenderableType]:
    """Return a table of the findings, the cost of the transfer, and the answer."""
    made = table("", "prefill", "decode", "", "", words=range(5), wraps=(1, 2, 4))
    for one in found.findings:
        verdict = Text(one.verdict, style=_STYLES[one.verdict])
        made.add_row(one.what, plain(one.prefill), plain(one.decode), verdict, plain(one.why))
    parts: list[RenderableType] = [indented(made)]
    moves = found.moves
    if moves is not None:
        staged = any(pair.report.stage for pair in moves.pairs)
        pairs = "1 pair of ranks" if len(moves.pairs) == 1 else f"{len(moves.pairs)} pairs of ranks"
        parts.append(
            Text(
                f"{moves.tokens:,} tokens take {size(moves.nbytes)} in {moves.descriptors:,} runs "
                f"between {pairs} if blocks are scattered; "
                f"a {'staged' if staged else 'direct'} transfer is faster."
            )
        )
    style = "bold green" if found.ok else "bold red"
    return [*parts, Text(plain(found.answer), style=style)]
