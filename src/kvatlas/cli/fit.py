"""`kvatlas fit`, and plans on GPUs: weights first, then what their caches have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvatlas.cli.failures import plain
from kvatlas.cli.options import PlanOptions
from kvatlas.cli.tables import headline, indented, notes, plan_details, table
from kvatlas.geometry.byte_sizes import size
from kvatlas.models import find_gpus
from kvatlas.planning import Fit, Fitting, Plan
from kvatlas.planning.request import length


@dataclass(frozen=True)
class PlanOnMachine:
    """A plan, the GPU whose memory it has where one was named, and what would serve more."""

    plan: Plan
    fit: Fit | None
    dp: int
    suggestions: tuple[Fit, ...] = ()

    def facts(self) -> dict[str, Any]:
        """What machines read."""
        facts = self.plan.summary()
        if self.fit is not None:
            facts["gpu"] = self.fit.as_dict()
            facts["suggestions"] = [one.as_dict() for one in self.suggestions]
        return facts | ({"dp": self.dp} if self.dp > 1 else {})

    def parts(self) -> list[RenderableType]:
        """What people read."""
        facts = self.facts()
        return [headline(facts), *self.machine(), *plan_details(facts)]

    def machine(self) -> list[RenderableType]:
        """Where the memory comes from, what replicas add, and what would serve more."""
        lines = []
        if self.fit is not None:
            lines.append(_memory_line(self.fit, self.plan))
        if self.dp > 1:
            users = [self.dp * int(self.plan.requests(in_flight=n)) for n in (None, 1)]
            lines.append(
                f"{self.dp} replicas: {users[0]:,} users prefilling, {users[1]:,} decoding."
            )
        if self.suggestions:
            lines.append("Ranks hold copies of the cache. Without copies:")
            lines += [
                f"  {one.topology}: {one.users(decoding=False):,} users prefilling, "
                f"{one.users():,} decoding"
                for one in self.suggestions
            ]
        return [indented(Text("\n".join(lines)))] if lines else []


def plan_on(options: PlanOptions) -> PlanOnMachine:
    """The plan of these options, on a GPU or in plain memory."""
    found = options.fit()
    if isinstance(found, Plan):
        return PlanOnMachine(found, None, options.dp)
    if found.plan is None:
        raise found.refusal or AssertionError("neither a plan nor a refusal")
    better = options.fitting().suggestions(found.topology)
    more = tuple(one for one in better if one.users() > found.users())
    return PlanOnMachine(found.plan, found, found.topology.dp, more)


def _memory_line(fit: Fit, made: Plan) -> str:
    return (
        f"{size(made.memory)} for caches on each of {fit.topology.gpus} {fit.gpu}: "
        f"{fit.utilization:.0%} of its memory, less {size(fit.weights)} of weights "
        f"({fit.weights_source}) and {size(fit.overhead)} of overhead."
    )


def fit_models(models: Sequence[str], gpus: str, **options: Any) -> list[Fit]:
    """Each model on the topology that serves the most users, the most first."""
    number, gpu = find_gpus(gpus)
    found = [Fitting(model, gpu, **options).best(number) for model in models]
    return sorted(found, key=lambda one: (one.plan is None, -one.users()))


def fit_parts(fits: list[Fit], gpus: str, max_len: str | None) -> list[RenderableType]:
    """A sentence, and a row for each model."""
    number, gpu = find_gpus(gpus)
    fitting = [one for one in fits if one.plan]
    at = f" at {length(max_len):,} tokens" if max_len else ""
    answer = f"{len(fitting)} of {len(fits)} models fit {number} x {gpu.name}{at}."
    columns = ("model", "topology", "weights", "cache", "prefilling", "decoding", "max len")
    made = table(*columns, words=(0, 1), wraps=(0, 1))
    reasons = []
    for one in fits:
        name = Text(plain(one.model), style="bold")
        if one.plan is None:
            made.add_row(name, Text("does not fit", style="yellow"), *["-"] * 5)
            why = one.refusal
            reasons.append(f"{one.model}: {why.problem}. Got {why.got}." if why else one.model)
            continue
        made.add_row(
            name,
            str(one.topology),
            size(one.weights),
            size(one.plan.memory),
            f"{one.users(decoding=False):,}",
            f"{one.users():,}",
            f"{one.plan.max_len:,}",
        )
    legend = (
        "weights, cache: of each GPU. Users of the greatest length, over all replicas: prefilling "
        "all at once, or all decoding."
    )
    warnings = dict.fromkeys(
        f"{one.model}: {warning}" for one in fitting if one.plan for warning in one.plan.warnings
    )
    told = [Text(plain(reason), style="yellow") for reason in reasons]
    return [Text(answer), indented(made), *told, *notes(warnings), Text(legend, style="dim")]
