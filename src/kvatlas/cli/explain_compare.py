"""`kvatlas explain --compare`: the figures and the sentences in which plans differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import RenderableType
from rich.text import Text

from kvatlas.cli.compare import AXES, axes_of, compared_plans, compared_title, usual
from kvatlas.cli.options import PlanOptions
from kvatlas.cli.tables import COMPARISON_LEGEND, comparison, notes, sentences
from kvatlas.errors import AtlasError


@dataclass(frozen=True)
class PlanDifferences:
    """A comparison of plans that differ in one option, as JSON data and as text."""

    facts: dict[str, Any]
    title: Text
    axis: str

    def parts(self) -> list[RenderableType]:
        """Return a table of the plans, and the sentences that do not hold for all plans."""
        rows = self.facts["rows"]
        parts: list[RenderableType] = [self.title, comparison(self.axis, rows)]
        for row in rows:
            if row["explain"]:
                parts += [Text(str(row["value"]), style="bold"), sentences(row["explain"])]
        noted = dict.fromkeys(note for row in rows for note in row["warnings"] or ())
        return [*parts, *notes(noted), Text(COMPARISON_LEGEND, style="dim")]


def plan_differences(options: PlanOptions, text: str) -> PlanDifferences:
    """Compare plans with different values of one option, such as `policy=vllm@0.32,vllm@0.33`."""
    axes = axes_of([text])
    if len(axes) != 1:
        raise typer.BadParameter(
            "compare exactly one option, such as policy=vllm@0.32,vllm@0.33.",
            param_hint="'--compare'",
        )
    ((axis, values),) = axes.items()
    model = options.load()
    rows = compared_plans(options, axis, values)
    explained = [_lines(options, axis, row["value"]) for row in rows]
    seen = Counter(line for lines in explained for line in set(lines))
    for row, lines in zip(rows, explained, strict=True):
        row["explain"] = [line for line in lines if seen[line] < len(values or usual(model, axis))]
    return PlanDifferences({"rows": rows}, compared_title(options, model, axis), axis)


def _lines(options: PlanOptions, axis: str, value: object) -> list[str]:
    """Return the sentences that explain one plan, without the title; empty if there is no plan."""
    try:
        made = options.plan(**{AXES[axis]: value})
    except AtlasError:
        return []
    return [line.strip() for line in made.explain().splitlines()[1:]]
