"""`choose`: find the plan and the policies with the highest hit rate on a trace.

Simulating all pairs of plans and policies would take long, so there are two rounds. The first
simulates every plan with checkpoints at branch points. The second simulates every policy with the
best plan and with vLLM's plan. vLLM's plan with vLLM's policies is always among the candidates, so
the result is never worse than vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvatlas.planning import Plan
from kvatlas.simulate.hit_rates import HitRates, simulate
from kvatlas.simulate.layer_classes import PoolModel
from kvatlas.simulate.prefill_cost import PrefillCost
from kvatlas.simulate.replay_policy import Progress
from kvatlas.simulate.traces import Trace

FIRST = ("branch-points", "lru")
"""Checkpoints and eviction of the first round."""
POLICIES = (FIRST, ("vllm-default", "lru"), ("every-block", "lru"), ("every-2048", "lru"))
"""Default checkpoint and eviction policies to try."""
BASELINE = ("vllm-default", "lru")
"""The default checkpoint and eviction policies of vLLM 0.32."""


@dataclass(frozen=True)
class TriedPlan:
    """A plan and its simulated hit rates with one pair of checkpoint and eviction policies."""

    name: str
    plan: Plan
    rates: HitRates
    by_group: bool = False
    """Whether groups release their blocks one after the other, as in vLLM."""


def choose(
    plans: Mapping[str, Plan],
    trace: Trace,
    *,
    policies: tuple[tuple[str, str], ...] = POLICIES,
    cost: PrefillCost | None = None,
    progress: Progress | None = None,
) -> list[TriedPlan]:
    """Simulate plans and policies, and return the results, the highest hit rate first.

    Results with equal hit rates are in the order of simulation. Plans with equal pools and groups
    have the same hits and are simulated once. A plan named `vllm` is also simulated with vLLM's
    policies. `policies` are pairs of checkpoint and eviction policies.
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
    """Yield the policies whose hits may differ from the hits of the first round's policy.

    For a model without windows and recurrent states, all checkpoint policies have the same hits.
    """
    sparse = any(one.needs != "all" for one in model.classes)
    seen = {FIRST if sparse else FIRST[1]}
    for kept, gone in policies:
        what = (kept, gone) if sparse else gone
        if what not in seen:
            seen.add(what)
            yield kept, gone
