"""Simulate hit rates: replay the requests of a trace through the pools of a plan."""

from kvatlas.pool.simulation.choosing import BASELINE, POLICIES, TriedPlan, choose
from kvatlas.pool.simulation.hit_rates import HitRates, found_by_request, simulate
from kvatlas.pool.simulation.layer_classes import LayerClass, PoolModel
from kvatlas.pool.simulation.prefill_cost import TFLOPS, PrefillCost, active_parameters
from kvatlas.pool.simulation.prompt_spans import Spans
from kvatlas.pool.simulation.replay import Replay
from kvatlas.pool.simulation.replay_base import Outcome, ReplayPolicy
from kvatlas.pool.simulation.tiers import LowerTier, TieredReplay
from kvatlas.pool.simulation.vllm_replay import VllmReplay

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
    "Replay",
    "ReplayPolicy",
    "Spans",
    "TieredReplay",
    "TriedPlan",
    "VllmReplay",
    "active_parameters",
    "choose",
    "found_by_request",
    "simulate",
]
