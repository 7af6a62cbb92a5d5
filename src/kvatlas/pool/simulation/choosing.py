"""`choose`: which plan, and which checkpoints and eviction, find the most of a trace.

Everything is simulated. All pairs of plans and policies would take long, so there are two rounds:
every plan with checkpoints at branch points, then every policy with the best plan and with vLLM's.
vLLM's plan as vLLM runs it is always tried, so what is chosen finds no less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvatlas.planning import Plan
from kvatlas.pool.simulation.hit_rates import HitRates, simulate
from kvatlas.pool.simulation.layer_classes import PoolModel
from kvatlas.pool.simulation.prefill_cost import PrefillCost
from kvatlas.pool.simulation.replay_base import Progress
from kvatlas.pool.traces import Trace

FIRST = ("branch-points", "lru")
"""Checkpoints and eviction of the first round."""
POLICIES = (FIRST, ("vllm-default", "lru"), ("every-block", "lru"), ("every-2048", "lru"))
"""Checkpoints and evictions that are tried where nobody says which."""
BASELINE = ("vllm-default", "lru")
"""What vLLM 0.32 does with its plan where nobody tells it otherwise."""


@dataclass(frozen=True)
class TriedPlan:
    """A plan with policies, and what they found together."""

    name: str
    plan: Plan
    rates: HitRates
    by_group: bool = False
    """Groups let go one after the other, as in vLLM's engine."""


def choose(
    plans: Mapping[str, Plan],
    trace: Trace,
    *,
    policies: tuple[tuple[str, str], ...] = POLICIES,
    cost: PrefillCost | None = None,
    progress: Progress | None = None,
) -> list[TriedPlan]:
    """All that was tried, what finds the most first; of equals, the plan that was named first.

    Plans that decide the same hits are tried once. The plan named `vllm`, where there is one,
    is also tried as vLLM runs it.
    """
    distinct: dict[PoolModel, str] = {}
    for name, plan in plans.items():
        distinct.setdefault(PoolModel.of(plan), name)
    names = list(distinct.values())
    most = len(names) + 2 * len(policies)
    tried: list[TriedPlan] = []

    def one(name: str, policy: tuple[str, str], *, by_group: bool = False) -> TriedPlan:
        begun = len(tried)
        tell = None if progress is None else lambda part: progress((begun + part) / most)
        kept, gone = policy
        rates = simulate(
            plans[name], trace,
            checkpoints=kept, eviction=gone, cost=cost, by_group=by_group, progress=tell,
        )  # fmt: skip
        tried.append(TriedPlan(name, plans[name], rates, by_group))
        return tried[-1]

    best = max((one(name, FIRST) for name in names), key=lambda found: found.rates.found)
    if "vllm" in plans:
        one("vllm", BASELINE, by_group=True)
    for name in dict.fromkeys([best.name, *(name for name in names if name == "vllm")]):
        for policy in _that_differ(PoolModel.of(plans[name]), policies):
            one(name, policy)
    return sorted(tried, key=lambda found: -found.rates.found)


def _that_differ(
    model: PoolModel, policies: tuple[tuple[str, str], ...]
) -> Iterator[tuple[str, str]]:
    """Policies beside the first: without windows and states, checkpoints make no difference."""
    sparse = any(one.needs != "all" for one in model.classes)
    seen = {FIRST if sparse else FIRST[1]}
    for kept, gone in policies:
        what = (kept, gone) if sparse else gone
        if what not in seen:
            seen.add(what)
            yield kept, gone
