"""`simulate`: how much of a trace's prompts a plan's pools find again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.pool.checkpoints import checkpoint_policy
from kvatlas.pool.eviction import eviction_policy
from kvatlas.pool.simulation.layer_classes import LayerClass, PoolModel
from kvatlas.pool.simulation.prefill_cost import PrefillCost
from kvatlas.pool.simulation.prefill_steps import batched_tokens
from kvatlas.pool.simulation.prompt_spans import Spans
from kvatlas.pool.simulation.replay import Replay
from kvatlas.pool.simulation.replay_base import Outcome, Progress, ReplayBase, ReplayPolicy
from kvatlas.pool.simulation.tiers import LowerTier, TieredReplay
from kvatlas.pool.simulation.timed_replay import TimedReplay
from kvatlas.pool.simulation.vllm_replay import VllmReplay
from kvatlas.pool.traces import Ints, Trace

BRANCH_POINTS = "branch-points"
"""Checkpoints where nobody says which."""


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation found. Rates are shares of prompt tokens that need not be computed."""

    model: str
    policy: str
    trace: str
    eviction: str
    checkpoints: str
    arrivals: bool
    block: int
    """Tokens that hits are multiples of."""
    memory: int
    """Bytes of the pools, over all ranks."""
    blocks: int
    requests: int
    tokens: int
    """Of all prompts."""
    found: int
    """Tokens that were found."""
    hit_rate: float
    """Over the tokens of all requests."""
    hit_rate_by_request: float
    """Mean over requests, short or long."""
    hit_rate_last_half: float
    """Over the tokens of the last half of the requests, when the pools are full."""
    ceiling: float
    """What a memory without bounds finds in the trace's own blocks."""
    computed: int
    """Tokens that were computed."""
    computed_again: int
    """Tokens that were computed although an earlier request had computed them."""
    evictions: int
    """Blocks that were evicted."""
    peak_blocks: int
    """Blocks in use at most, those that are only kept included."""
    refused: int
    """Requests that no empty pool has room for; all their tokens count as computed."""
    waited: float
    """Seconds that requests waited for room, where arrivals are respected."""
    flops: float | None
    """Of all prompts, without a cache."""
    flops_saved: float | None
    seconds_saved: float | None
    found_by_tier: dict[str, int] = {}
    """Of the tokens that were found, by the lowest tier that had some of what they need."""

    def as_dict(self) -> dict[str, Any]:
        """What machines read."""
        return msgspec.structs.asdict(self)


def simulate(
    plan: Plan,
    trace: Trace,
    *,
    eviction: str = "lru",
    checkpoints: str | None = None,
    cost: PrefillCost | None = None,
    arrivals: bool = False,
    by_group: bool | None = None,
    tiers: Mapping[str, Plan] | None = None,
    state_share: float | None = None,
    progress: Progress | None = None,
) -> HitRates:
    """Replay a trace through the pools of a plan.

    Checkpoints are kept at branch points unless `checkpoints` says otherwise. Plans of policy
    vllm let go group by group, and keep what is computed again twice, as vLLM does; others let
    go from the end on, and keep it once, unless `by_group` says otherwise. Without `arrivals`
    one request follows the other; with them, requests under way hold their blocks. What is
    evicted goes to `tiers`, plans by name, from the first to the last; `state_share` is the part
    of the first that checkpoints have for themselves.
    """
    policy = _policy(plan, eviction, checkpoints, by_group)
    model = PoolModel.of(plan)
    spans = spans_of(trace, model.step)
    options = _options(model, trace, spans, cost)
    waited, found = 0.0, None
    if tiers:
        lower = _lower_tiers(tiers, model, state_share, arrivals=arrivals)
        tiered = TieredReplay(model, spans, policy, tiers=lower, **options)
        outcome, found = tiered.run(progress), tiered.found
    elif arrivals:
        timed = TimedReplay(model, spans, policy, **options)
        timed.start(trace, cost)
        outcome, waited = timed.run(progress), timed.waited
    else:
        outcome = _one_by_one(plan, trace, policy, cost).run(progress)
    by_tier = outcome.hits[None] if found is None else found
    places = dict(zip(("gpu", *(tiers or ())), (by_tier.sum(1) * model.step).tolist(), strict=True))
    return _rates(
        plan, trace, model, outcome, cost,
        eviction=eviction, checkpoints=checkpoints or BRANCH_POINTS, arrivals=arrivals,
        waited=waited,
        found_by_tier=places,
    )  # fmt: skip


def found_by_request(
    plan: Plan,
    trace: Trace,
    *,
    eviction: str = "lru",
    checkpoints: str | None = None,
    by_group: bool | None = None,
) -> Ints:
    """Tokens of each request that `simulate` finds, one request after the other."""
    replay = _one_by_one(plan, trace, _policy(plan, eviction, checkpoints, by_group), None)
    return np.minimum(replay.run().hits * replay.spans.step, trace.lengths)


def _policy(
    plan: Plan, eviction: str, checkpoints: str | None, by_group: bool | None
) -> ReplayPolicy:
    eviction_policy(eviction)  # refused before the trace is cut into spans
    in_turn = plan.policy != "atlas" if by_group is None else by_group
    kept = checkpoint_policy(checkpoints or BRANCH_POINTS)
    return ReplayPolicy(eviction, kept, by_group=in_turn)


def _options(
    model: PoolModel, trace: Trace, spans: Spans, cost: PrefillCost | None
) -> dict[str, Any]:
    held = model.in_flight(trace.lengths + trace.outputs, np.diff(spans.starts))
    return {"in_flight": held, "saved": _saved(model, cost)}


def _one_by_one(
    plan: Plan, trace: Trace, policy: ReplayPolicy, cost: PrefillCost | None
) -> ReplayBase:
    """A replay of requests that follow each other: as vLLM serves them, where that is asked for."""
    as_vllm = policy.by_group and policy.eviction == "lru"
    model = PoolModel.of(plan, by_group=as_vllm)
    spans = spans_of(trace, model.step)
    if as_vllm:
        tokens = batched_tokens(plan)
        return VllmReplay(model, spans, policy, trace=trace, batched_tokens=tokens)
    return Replay(model, spans, policy, **_options(model, trace, spans, cost))


def _lower_tiers(
    tiers: Mapping[str, Plan], model: PoolModel, share: float | None, *, arrivals: bool
) -> list[LowerTier]:
    if arrivals:
        hint = "Simulate tiers without arrivals"
        raise AtlasError(Code.CONTRADICTORY, got="tiers and arrivals", hint=hint)
    return [
        LowerTier.of(name, plan, model, state_share=None if place else share)
        for place, (name, plan) in enumerate(tiers.items())
    ]


@lru_cache(maxsize=2)
def spans_of(trace: Trace, step: int) -> Spans:
    """The spans of a trace, remembered: comparisons ask for them again and again."""
    return Spans.of(trace, step)


@lru_cache(maxsize=2)
def ceiling(trace: Trace) -> Ints:
    """Tokens of each request that an unlimited memory finds, in the trace's own blocks."""
    counts = np.diff(trace.starts)
    requests = np.repeat(np.arange(len(trace)), counts)
    first = np.zeros(int(trace.ids.max(initial=-1)) + 1, np.int64)
    first[trace.ids[::-1]] = requests[::-1]  # the earliest request with an id is written last
    # An id stands for all before it: what is new in a request is its end.
    new = np.bincount(requests[first[trace.ids] == requests], minlength=len(trace))
    return np.minimum((counts - new) * trace.block, trace.lengths)


def _saved(
    model: PoolModel, cost: PrefillCost | None
) -> Callable[[LayerClass, Ints], NDArray[np.float64]]:
    """FLOPs that an entry saves, by byte: of its own tokens, or of all before a checkpoint."""
    priced = cost or PrefillCost(1.0)

    def saved(one: LayerClass, places: Ints) -> NDArray[np.float64]:
        stop = (places + 1) * model.step
        start = stop - model.step if one.needs == "all" else stop * 0
        return priced.flops(start, stop) / (one.blocks * one.block_bytes)

    return saved


def _rates(
    plan: Plan,
    trace: Trace,
    model: PoolModel,
    outcome: Outcome,
    cost: PrefillCost | None,
    **said: Any,
) -> HitRates:
    found = np.minimum(outcome.hits * model.step, trace.lengths)
    best = ceiling(trace)
    half = len(trace) // 2
    real = np.maximum(trace.lengths, 1)
    total = spent = None
    if cost is not None:
        total = float(cost.flops(trace.lengths * 0, trace.lengths).sum())
        spent = float(cost.flops(found, trace.lengths).sum())
    saved = None if total is None or spent is None else total - spent
    return HitRates(
        model=plan.model,
        policy=plan.policy,
        trace=trace.name,
        block=model.step,
        memory=sum(pool.nbytes for pool in plan.pools) * plan.tp,
        blocks=sum(model.blocks),
        requests=len(trace),
        tokens=trace.tokens,
        found=int(found.sum()),
        hit_rate=_share(found.sum(), trace.tokens),
        hit_rate_by_request=float((found / real).mean()),
        hit_rate_last_half=_share(found[half:].sum(), trace.lengths[half:].sum()),
        ceiling=_share(best.sum(), trace.tokens),
        computed=trace.tokens - int(found.sum()),
        computed_again=int(np.maximum(best - found, 0).sum()),
        evictions=outcome.evictions,
        peak_blocks=outcome.peak,
        refused=outcome.refused,
        flops=total,
        flops_saved=saved,
        seconds_saved=None if saved is None or cost is None else cost.seconds(saved),
        **said,
    )


def _share(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0
