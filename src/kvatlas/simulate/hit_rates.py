"""`simulate`: the hit rates of a trace on the pools of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.pool.checkpoints import checkpoint_policy
from kvatlas.pool.eviction import eviction_policy
from kvatlas.simulate.fast_replay import FastReplay
from kvatlas.simulate.layer_classes import LayerClass, PoolModel
from kvatlas.simulate.prefill_cost import PrefillCost
from kvatlas.simulate.prefill_steps import batched_tokens
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.replay_policy import Outcome, Progress, ReplayPolicy
from kvatlas.simulate.tiers import LowerTier, TieredReplay
from kvatlas.simulate.timed_replay import TimedReplay
from kvatlas.simulate.traces import Ints, Trace
from kvatlas.simulate.upper_bound import upper_bound

BRANCH_POINTS = "branch-points"
"""The default checkpoint policy."""


_OF_HITS = (
    "found", "hit_rate", "hit_rate_by_request", "hit_rate_last_half", "ceiling", "computed",
    "computed_again", "flops_saved", "seconds_saved",
)  # fmt: skip
"""Fields of `HitRates` that require the content of prompts."""


class HitRates(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulation. A hit rate is the share of prompt tokens that were cached."""

    model: str
    policy: str
    trace: str
    eviction: str
    checkpoints: str
    arrivals: bool
    block: int
    """Granularity of hits in tokens: hits end at multiples of it."""
    memory: int
    """Total size of the pools of all ranks, in bytes."""
    blocks: int
    requests: int
    tokens: int
    """Number of tokens of all prompts."""
    found: int
    """Number of prompt tokens that were cached."""
    hit_rate: float
    """Hit rate over the tokens of all requests."""
    hit_rate_by_request: float
    """Mean of the hit rates of all requests, each with equal weight."""
    hit_rate_last_half: float
    """Hit rate over the tokens of the last half of the requests, after the pools filled up."""
    ceiling: float
    """Hit rate with unlimited memory and the block size of the trace."""
    computed: int
    """Number of tokens that were computed."""
    computed_again: int
    """Number of computed tokens that an earlier request had already computed."""
    evictions: int
    """Number of evicted blocks."""
    peak_blocks: int
    """Maximum number of blocks in use, including blocks kept for reuse."""
    refused: int
    """Requests that do not fit even into empty pools. All their tokens count as computed."""
    waited: float
    """Total seconds that requests waited for space, if arrival times are simulated."""
    flops: float | None
    """FLOPs of all prompts without a cache; None if the model's parameters are unknown."""
    flops_saved: float | None
    seconds_saved: float | None
    found_by_tier: dict[str, int] = {}
    """Number of cached tokens, by the lowest tier that was needed to serve them."""
    set_aside: int = 0
    """Requests beyond the limit of tokens. They are not replayed and count nowhere else."""
    limit: int | None = None
    """The limit of prompt and output tokens of a request (`Trace.within`)."""
    content_known: bool = True
    """False if the trace has lengths only. Figures of hits are then meaningless."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a dictionary, for JSON. Figures of hits are None if unknown."""
        found = msgspec.structs.asdict(self)
        return found if self.content_known else found | dict.fromkeys(_OF_HITS)


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
    """Replay a trace through the pools of a plan and return the hit rates.

    The default checkpoint policy is `branch-points`. Requests are served as `BlockPool` serves
    them. Plans of other policies than atlas are simulated as in vLLM, if eviction is LRU: groups
    release their blocks one after the other, recurrent groups allocate a state per step, and
    recomputed blocks are kept twice. With `by_group=True`, every plan is simulated in this way;
    with `by_group=False`, no plan is.

    `eviction="optimal"` uses the future of the trace. If every layer keeps all tokens, this policy
    is Belady's rule. If a layer does not keep all tokens, the trace is not replayed: the rates are
    upper bounds for all checkpoint and eviction policies (see `upper_bound`), and no blocks are
    counted.

    By default, requests run one after the other. With `arrivals`, they overlap in time, and active
    requests hold their blocks. Evicted blocks move to the first of `tiers` (plans by name), and
    from there to the next. `state_share` is the share of the first tier that is reserved for
    checkpoints.
    """
    policy = _policy(plan, eviction, checkpoints, by_group)
    model = PoolModel.of(plan, by_group=policy.by_group)
    spans = spans_of(trace, model.step)
    if eviction == "optimal":
        _require_gpu_alone(arrivals=arrivals, tiers=bool(tiers))
        if len(model.classes) > 1 or model.classes[0].needs != "all":
            return _bounds(plan, trace, model, spans, cost)
    waited, found = 0.0, None
    if tiers:
        lower = _lower_tiers(tiers, model, state_share, arrivals=arrivals)
        tiered = TieredReplay(model, trace, policy, tiers=lower, **_as_pool(plan, cost))
        outcome, found = tiered.run(progress), tiered.found
    elif arrivals:
        timed = TimedReplay(model, trace, policy, cost=cost, **_as_pool(plan, cost))
        outcome, waited = timed.run(progress), timed.waited
    else:
        outcome = FastReplay(model, trace, policy, **_as_pool(plan, cost)).run(progress)
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
    """Simulate a trace as `simulate` does, and return the cached tokens of each request."""
    policy = _policy(plan, eviction, checkpoints, by_group)
    model = PoolModel.of(plan, by_group=policy.by_group)
    replay = FastReplay(model, trace, policy, **_as_pool(plan, None))
    return np.minimum(replay.run().hits * replay.spans.step, trace.lengths)


def _policy(
    plan: Plan, eviction: str, checkpoints: str | None, by_group: bool | None
) -> ReplayPolicy:
    eviction_policy(eviction)  # raise an error for a wrong name before the slow part
    in_turn = plan.policy != "atlas" if by_group is None else by_group
    kept = checkpoint_policy(checkpoints or BRANCH_POINTS)
    return ReplayPolicy(eviction, kept, by_group=in_turn and eviction == "lru")


def _as_pool(plan: Plan, cost: PrefillCost | None) -> dict[str, Any]:
    """Return the options of a replay that serves requests as `BlockPool` does."""
    priced = cost or PrefillCost(1.0)

    def saved(one: LayerClass, block: int, stop: Ints) -> NDArray[np.float64]:
        start = stop - block if one.needs == "all" else stop * 0
        return priced.flops(start, stop) / (one.groups * one.block_bytes)

    return {"batched_tokens": batched_tokens(plan), "spans_of": spans_of, "saved": saved}


def _require_gpu_alone(*, arrivals: bool, tiers: bool) -> None:
    if arrivals or tiers:
        problem = "The `optimal` policy cannot be simulated together with arrival times or tiers"
        got = "eviction='optimal' with " + ("arrivals" if arrivals else "tiers")
        hint = "Omit the arrivals or tiers, or use another eviction policy"
        raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)


def _bounds(
    plan: Plan, trace: Trace, model: PoolModel, spans: Spans, cost: PrefillCost | None
) -> HitRates:
    """Return upper bounds of all rates. Each rate is bounded separately."""
    best = ceiling(trace)
    real = np.maximum(trace.lengths, 1)
    ones = np.ones(len(trace))
    late = np.arange(len(trace)) >= len(trace) // 2
    found, last, mean = (
        upper_bound(model, spans, trace, model.step * values, step_tokens=batched_tokens(plan))
        for values in (ones, ones * late, ones / real)
    )
    whole = int(found + 0.5) // model.step * model.step  # hits are whole spans
    plain = _rates(
        plan, trace, model, Outcome(np.zeros(len(trace), np.int64)), None,
        eviction="optimal", checkpoints="optimal", arrivals=False, waited=0.0, found_by_tier={},
    )  # fmt: skip
    total = saved = None
    if cost is not None:
        # FLOPs are not linear in tokens: use what unlimited memory would save.
        total = float(cost.flops(trace.lengths * 0, trace.lengths).sum())
        saved = float(cost.flops(trace.lengths * 0, best).sum())
    return msgspec.structs.replace(
        plain,
        found=whole,
        hit_rate=_share(whole, trace.tokens),
        hit_rate_by_request=mean / len(trace),
        hit_rate_last_half=_share(last, trace.lengths[len(trace) // 2 :].sum()),
        computed=trace.tokens - whole,
        computed_again=max(int(best.sum()) - whole, 0),
        found_by_tier={"gpu": whole},
        flops=total,
        flops_saved=saved,
        seconds_saved=None if saved is None or cost is None else cost.seconds(saved),
    )


def _lower_tiers(
    tiers: Mapping[str, Plan], model: PoolModel, share: float | None, *, arrivals: bool
) -> list[LowerTier]:
    if arrivals:
        problem = "Tiers cannot be simulated together with arrival times"
        got, hint = "both `tiers` and `arrivals`", "Omit one of them"
        raise AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)
    return [
        LowerTier.of(name, plan, model, state_share=None if place else share)
        for place, (name, plan) in enumerate(tiers.items())
    ]


@lru_cache(maxsize=4)
def spans_of(trace: Trace, step: int) -> Spans:
    """Cut the prompts of a trace into spans of `step` tokens.

    Results are cached, because comparisons repeat calls.
    """
    return Spans.of(trace, step)


@lru_cache(maxsize=2)
def ceiling(trace: Trace) -> Ints:
    """Return how many tokens of each request would be cached with unlimited memory.

    The trace determines the block size.
    """
    counts, new = np.diff(trace.starts), np.zeros(len(trace), np.int64)
    first = np.full(trace.distinct, len(trace))
    for some, ids in trace.pieces():
        requests = np.repeat(np.arange(some.start, some.stop), counts[some])
        unseen = first[ids] == len(trace)
        # Assign in reverse order, so that the earliest request with an id is written last.
        first[ids[unseen][::-1]] = requests[unseen][::-1]
        # An id represents everything before it, so the new ids of a request are its last ones.
        mine = requests[first[ids] == requests] - some.start
        new[some] = np.bincount(mine, minlength=some.stop - some.start)
    return np.minimum((counts - new) * trace.block, trace.lengths)


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
        set_aside=trace.set_aside,
        limit=trace.limit,
        content_known=trace.content_known,
        **said,
    )


def _share(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0
