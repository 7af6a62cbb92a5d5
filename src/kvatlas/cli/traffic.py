"""`kvatlas plan --trace`: choose the plan with the highest hit rate on a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from kvatlas.cli.failures import plain
from kvatlas.cli.hit_rows import within_limit
from kvatlas.cli.options import PlanOptions, contradictory
from kvatlas.cli.progress import progress_bar
from kvatlas.cli.tables import indented, notes, table
from kvatlas.errors import AtlasError
from kvatlas.planning import Plan

if TYPE_CHECKING:
    from kvatlas.simulate import Trace, TriedPlan

_PACKS = (1, 2, 4, 8)
_BLOCKS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Candidates:
    """Plans to simulate on a trace, by name, and the reasons why others were refused."""

    plans: dict[str, Plan]
    changes: dict[str, dict[str, Any]]
    """For each plan, by name, the options that differ from those of the user."""
    refused: tuple[str, ...]


@dataclass(frozen=True)
class PlanForTrace:
    """The results of simulating several plans on a trace, the best first."""

    trace: Trace
    tried: list[TriedPlan]
    candidates: Candidates

    @property
    def options(self) -> dict[str, Any]:
        """The options of the chosen plan that differ from the options given by the user."""
        return self.candidates.changes[self.tried[0].name]

    def facts(self) -> list[dict[str, Any]]:
        """Return the data that `--json` prints for each plan."""
        return [
            {"plan": one.name, "as_vllm_runs_it": one.by_group, **one.rates.as_dict()}
            for one in self.tried
        ]

    def parts(self) -> list[RenderableType]:
        """Return the reason for the choice, and a table of all plans that were compared."""
        best = self.tried[0]
        made = table("plan", "block", "checkpoints", "eviction", "requests", "found", words=(0, 2))
        for one in self.tried:
            rates, style = one.rates, "bold green" if one is best else ""
            name = "vllm, as vLLM runs it" if one.by_group else one.name
            requests = f"{one.plan.summary()['requests_decoding']:,.1f}"
            block, found = f"{rates.block:,}", f"{rates.hit_rate:.1%}"
            made.add_row(
                name, block, rates.checkpoints, rates.eviction, requests, found, style=style
            )
        legend = (
            "found: share of the prompt tokens that the cache serves. requests: requests of the "
            "greatest length that fit while decoding. All plans use the same memory. Each was "
            "tried with checkpoints at branch points; the best one and vLLM's were also tried "
            "with every other policy."
        )
        reason = Text(plain(self.reason()))
        noted = notes([*self.candidates.refused, *self.trace.notes()])
        return [reason, indented(made), *noted, Text(legend, style="dim")]

    def reason(self) -> str:
        """Return sentences that name the best plan and compare its hit rate with vLLM's."""
        best = self.tried[0]
        rates = best.rates
        theirs = next((one.rates for one in self.tried if one.by_group), None)
        others = f"Unlimited memory would serve {rates.ceiling:.1%}"
        if theirs:
            others += f", vLLM's plan and defaults {theirs.hit_rate:.1%}"
        return (
            f"{self.trace.name}: the best plan is {best.name} with blocks of {rates.block:,} "
            f"tokens, checkpoints {rates.checkpoints} and eviction {rates.eviction}. Its cache "
            f"serves {rates.hit_rate:.1%} of the prompt tokens. {others}."
        )


def plan_for_trace(
    options: PlanOptions, path: Path, block: int | None = None, tokenizer: str | None = None
) -> PlanForTrace:
    """Simulate the trace at `path` with several plans, and each plan with several pool policies.

    `block` is the number of tokens that each id of the trace represents. `tokenizer` is for traces
    with text.
    """
    from kvatlas.simulate import choose, read_trace

    with progress_bar(f"Reading {plain(path.name)}") as told:
        read = read_trace(path, block=block, tokenizer=tokenizer, progress=told)
    if not read.content_known:
        got, hint = "a trace with lengths only", "Pass a trace with hash_ids, token ids or text"
        raise contradictory(got, hint, "Hit rates of this trace are unknown, so no plan is best")
    trace = within_limit(read, options)
    found = candidates(options)
    with progress_bar("Simulating") as told:
        tried = choose(found.plans, trace, progress=told)
    return PlanForTrace(trace, tried, found)


def candidates(options: PlanOptions) -> Candidates:
    """Return the plans to simulate: the plan with `options`, vLLM's plan, and variants.

    For a model with recurrent states, the variants differ in `pack`. For other models, they differ
    in the block size.
    """
    first = options.plan()
    plans, refused = {options.policy: first}, []
    changes: dict[str, dict[str, Any]] = {options.policy: {}, "vllm": {"policy": "vllm"}}
    recurrent = any(group.kind == "recurrent" for group in first.groups)
    if recurrent and options.pack == "auto":
        changes |= {f"pack {number}": {"pack": str(number)} for number in _PACKS}
    if not recurrent and options.block_size is None:
        changes |= {f"block {number}": {"block_size": number} for number in _BLOCKS}
    for name, change in changes.items():
        if name in plans:
            continue
        try:
            plans[name] = options.plan(**change)
        except AtlasError as refusal:
            refused.append(f"{name} was not tried: {refusal.problem}. Got {refusal.got}.")
    return Candidates(plans, changes, tuple(refused))
