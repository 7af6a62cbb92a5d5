"""`kvatlas fit`, and plans with `--gpu`: caches get the memory that the weights leave free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from kvatlas.cli.failures import plain
from kvatlas.cli.fitted_table import FittedTable
from kvatlas.cli.merged_notes import merged_notes
from kvatlas.cli.options import PlanOptions, plan_in
from kvatlas.cli.tables import (
    headline,
    indented,
    labelled_notes,
    not_runnable,
    plan_details,
    table,
)
from kvatlas.errors import AtlasError
from kvatlas.geometry.byte_sizes import size
from kvatlas.models import Model, Weights, find_gpus
from kvatlas.planning import Fit, Plan, fit
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.request import length

_NARROWER = ((2, 5), (2, 2), (1, 2), (1, 1))
"""Table formats to try, from wide to narrow. Each is a pair: blanks between columns, and entries
of a topology (such as `tp 4`) per line."""


@dataclass(frozen=True)
class PlanOnMachine:
    """A plan and, if `--gpu` was given, the plan's fit on the GPUs.

    `suggestions` are fits on other topologies that serve more users.
    """

    plan: Plan
    fit: Fit | None
    dp: int
    suggestions: tuple[Fit, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return the data that `--json` prints for the plan."""
        facts = self.plan.summary()
        if self.fit is not None:
            facts["gpu"] = self.fit.as_dict()
            facts["warnings"] = list(self.fit.warnings)
            facts["suggestions"] = [one.as_dict() for one in self.suggestions]
        return facts | ({"dp": self.dp} if self.dp > 1 else {})

    def parts(self) -> list[RenderableType]:
        """Return the plan as text and tables."""
        facts = self.facts() | {"answer": self.answer()}
        return [headline(facts), *self.machine(), *plan_details(facts)]

    def answer(self) -> str:
        """Return a text on the number of requests that fit.

        With several replicas, the text begins with the number for all replicas together, and
        ends with the number for each replica.
        """
        of_each = str(self.plan.summary()["answer"])
        if self.dp == 1:
            return of_each
        return f"{self._of_all_replicas()} Each fits{of_each.removeprefix('Fits')}"

    def _of_all_replicas(self) -> str:
        users = [self.dp * int(self.plan.requests(in_flight=n)) for n in (None, DECODING)]
        length = f"requests of {self.plan.max_len:,} tokens"
        if users[0] == users[1]:
            return f"{self.dp} replicas fit {users[0]:,} {length}."
        return (
            f"{self.dp} replicas fit {users[0]:,} {length} while they prefill, "
            f"{users[1]:,} while they decode."
        )

    def machine(self) -> list[RenderableType]:
        """Return text about the GPUs: memory, and topologies that serve more users."""
        lines = []
        if self.fit is not None:
            lines.append(_memory_line(self.fit, self.plan))
        if self.suggestions:
            lines.append("Ranks hold copies of the cache. These topologies avoid that:")
            lines += [
                f"  {one.topology}: {one.users(decoding=False):,} users prefilling, "
                f"{one.users():,} decoding"
                for one in self.suggestions
            ]
        return [indented(Text("\n".join(lines)))] if lines else []


def plan_on(options: PlanOptions) -> PlanOnMachine:
    """Return the plan with these options and, if `--gpu` was given, its fit on the GPUs."""
    found = options.fit()
    made = plan_in(found)
    if isinstance(found, Plan):
        return PlanOnMachine(made, None, options.dp or 1)
    better = options.fitting().suggestions(found.topology)
    more = tuple(one for one in better if one.users() > found.users())
    return PlanOnMachine(made, found, found.topology.dp, more)


def _memory_line(found: Fit, made: Plan) -> str:
    return (
        f"{size(made.memory)} for caches on each of {found.topology.gpus} {found.gpu}: "
        f"{found.utilization:.0%} of its memory, minus {size(found.weights)} of weights "
        f"({found.weights_source}) and {size(found.overhead)} of overhead."
    )


def fit_models(
    models: Sequence[str], gpus: str, **options: Any
) -> tuple[list[Fit], list[AtlasError]]:
    """Fit each model on the topology that serves the most users, and return (fits, errors).

    A model that cannot be loaded has an error instead of a fit. Fits are sorted by the number of
    users, the largest first.
    """
    find_gpus(gpus)  # an unknown GPU is an error even if no model can be loaded
    found, failed = [], []
    for model in models:
        try:
            Model.load(model)
            Weights.load(model, dtype=options.get("weights_dtype"))
        except AtlasError as refusal:
            failed.append(refusal)
            continue
        found.append(fit(model, gpus, **options))
    return sorted(found, key=lambda one: (one.plan is None, -one.users())), failed


def fit_parts(fits: list[Fit], gpus: str, max_len: str | None) -> list[RenderableType]:
    """Return a line with the number of models that fit, and a table with a row for each model."""
    machine = find_gpus(gpus)
    fitting = [one for one in fits if one.plan]
    lengths = {length(max_len)} if max_len else {one.plan.max_len for one in fits if one.plan}
    at = f" at {lengths.pop():,} tokens" if len(lengths) == 1 else ""
    answer = f"{len(fitting)} of {len(fits)} models fit {machine.number} x {machine.gpu.name}{at}."
    console = Console()
    for gap, sizes_per_line in _NARROWER:
        made = _fit_table(fits, sizes_per_line, lengths=len(lengths) > 1)
        if made.natural_width(console, gap) + 2 <= console.width:
            break
    reasons = [
        (one.model, f"{why.problem}. Got {why.got}. {why.hint}.")
        for one in fits
        if (why := one.refusal)
    ]
    told = [Text(plain(reason), style="yellow") for reason in merged_notes(reasons)]
    warnings = [(one.model, warning) for one in fits for warning in one.warnings]
    warnings += [
        (one.model, not_runnable(reasons).replace("--runs-on", "kvatlas plan --runs-on"))
        for one in fits
        if one.plan and (reasons := one.plan.summary()["not_runnable"])
    ]
    seconds = [(one.model, _runner_up(one)) for one in fits if one.runner_up]
    legend = (
        "weights, cache: memory on each GPU. prefill, decode: requests of the greatest length "
        "that all replicas serve at once while all of them prefill, or all decode."
    )
    if any(one.weights_estimate for one in fitting):
        legend += " ~: an estimate."
    shown: list[RenderableType] = [Text(answer), indented(made), *told]
    others = [Text(plain(note)) for note in merged_notes(seconds)]
    return [*shown, *others, *labelled_notes(warnings), Text(legend, style="dim")]


def _runner_up(best: Fit) -> str:
    """Return the sentence on the second best topology of a search."""
    second = best.runner_up
    if second is None:
        return ""
    dtype = "" if second.kv_dtype == best.kv_dtype else f" with cache dtype {second.kv_dtype}"
    return (
        f"second is {second.topology}{dtype} with {second.users:,} users decoding, because "
        f"{second.reason}."
    )


def _fit_table(fits: list[Fit], sizes_per_line: int, *, lengths: bool) -> FittedTable:
    columns = ("model", "topology", "weights", "cache", "prefill", "decode")
    made = table(*columns, *(["max len"] if lengths else []), words=(0, 1), wraps=(0,))
    for one in fits:
        name = Text(plain(one.model), style="bold")
        if one.plan is None:
            refused = Text("no fit", style="yellow")
            made.add_row(name, refused, *["-"] * (len(made.columns) - 2))
            continue
        made.add_row(
            name,
            _broken(_named(one), sizes_per_line),
            ("~" if one.weights_estimate else "") + size(one.weights),
            size(one.plan.memory),
            f"{one.users(decoding=False):,}",
            f"{one.users():,}",
            *([f"{one.plan.max_len:,}"] if lengths else []),
        )
    return made


def _named(one: Fit) -> str:
    """Return a fit's topology, with the dtype of its cache if that is not the default."""
    return str(one.topology) + (f", kv {one.kv_dtype}" if one.kv_dtype != "auto" else "")


def _broken(topology: str, sizes: int) -> str:
    r"""Return a topology's text with a line break after every `sizes` entries such as `tp 1`.

    >>> _broken("tp 1, dp 16, ep 16", 2)
    'tp 1, dp 16,\nep 16'
    """
    parts = topology.split(", ")
    return ",\n".join(", ".join(parts[n : n + sizes]) for n in range(0, len(parts), sizes))
