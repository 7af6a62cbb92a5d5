"""Simulate hit rates: read a trace of requests and replay it through the pools of a plan.

`read_trace` reads the public formats of traces. `simulate` replays a trace with the policies of
`kvatlas.pool` and reports hit rates, and `choose` compares several plans.
"""

from kvatlas.simulate.choosing import BASELINE, POLICIES, TriedPlan, choose
from kvatlas.simulate.hit_rates import HitRates, found_by_request, simulate
from kvatlas.simulate.layer_classes import LayerClass, PoolModel
from kvatlas.simulate.prefill_cost import TFLOPS, PrefillCost, active_parameters
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.replay_policy import Outcome, ReplayPolicy
from kvatlas.simulate.tiers import LowerTier, TieredReplay
from kvatlas.simulate.trace_contents import TraceFacts, trace_facts
from kvatlas.simulate.traces import Trace, Unseen, read_trace

__all__ = [
    "BASELINE",
    "POLICIES",
    "TFLOPS",
    "HitRates",
    "LayerClass",
    "LowerTier",
    "Outcome",
    "PoolModel",
    "PrefillCost",
    "ReplayPolicy",
    "Spans",
    "TieredReplay",
    "Trace",
    "TraceFacts",
    "TriedPlan",
    "Unseen",
    "active_parameters",
    "choose",
    "found_by_request",
    "read_trace",
    "simulate",
    "trace_facts",
]
