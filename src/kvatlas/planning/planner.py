"""`plan()`: build a `Plan` from a model, memory and a topology."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import integer, natural, positive
from kvatlas.models import Model
from kvatlas.planning.applied_rules import applied_checkpoints
from kvatlas.planning.backends import EVERY_ORDER, backends_of, packed_for
from kvatlas.planning.engine_rules import (
    NEWEST,
    RELEASES,
    EngineRules,
    checked_chip,
    split_policy,
)
from kvatlas.planning.plans import Plan
from kvatlas.planning.policy_atlas import plan_atlas
from kvatlas.planning.policy_vllm import plan_uniform, plan_vllm
from kvatlas.planning.request import PlanRequest, length, quantity
from kvatlas.planning.topology import check_topology, check_vllm_topology, stages_of

Policy = Literal["atlas", "vllm", "uniform"]

DEFAULT_LENGTH = 32768
_BATCHED_TOKENS = 8192


def plan(
    model: Any,
    *,
    memory: int | str,
    tp: int = 1,
    pp: int = 1,
    dcp: int = 1,
    layout: str | None = None,
    backend: str | None = None,
    block_size: int | None = None,
    kv_dtype: str | None = None,
    policy: str = "atlas",
    chip: str | None = None,
    pack: int | Literal["auto"] = "auto",
    max_len: int | str | None = None,
    in_flight: int | None = None,
    prefix_caching: bool = True,
    requests: int | None = None,
    states: Literal["auto", "shared", "apart"] = "auto",
    runs_on: str | None = None,
) -> Plan:
    """Plan where a model's caches are stored in `memory` bytes per rank.

    - `model`: a `Model`, or anything that `Model.load` takes.
    - `layout`, `backend`, `block_size`, `kv_dtype`: replace the defaults for the model and policy.
    - `policy`: `"atlas"`, `"vllm"` (the plan of the newest known release of vLLM), `"vllm@0.32"`
      (of this release) or `"uniform"` (vLLM without its hybrid manager).
    - `chip`: the CUDA chip, such as `"sm90"`, on which vLLM selects its kernels. By default, only
      rules that hold on every chip apply.
    - `pack`: the number of attention layers in a page of a hybrid, under policy atlas.
    - `max_len`: the length of the longest request, in tokens.
    - `in_flight`: the number of tokens that an engine schedules before they are computed. Windows
      keep blocks for these tokens too.
    - `prefix_caching`: if true, a request holds additional blocks for saved recurrent states.
    - `states`: where hybrids store recurrent states under policy atlas. `"shared"` is the pool of
      attention, `"apart"` a separate pool for the states of `requests` requests, and `"auto"` is
      `"shared"` if possible.
    - `runs_on`: an engine that must be able to run the plan of policy atlas: `"vllm"` or
      `"vllm@0.32"`. The plan then has one pool and whole states, and follows the rules of that
      release.

    >>> made = plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2, policy="vllm")
    >>> made.block_size, made.num_blocks
    (2096, 2001)
    >>> made = plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2, policy="vllm@0.33", chip="sm90")
    >>> made.block_size, made.num_blocks
    (2112, 1985)
    >>> plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2, runs_on="vllm@0.32").block_size
    704
    """
    makers = {"atlas": plan_atlas, "vllm": plan_vllm, "uniform": plan_uniform}
    name, rules = split_policy(policy) if isinstance(policy, str) else (policy, NEWEST)
    _check_word("policy", name, tuple(makers))
    maker, chip = makers[name], checked_chip(chip)
    if runs_on is not None:
        rules = _engine_rules(runs_on, name, apart=states == "apart" or requests is not None)
    _check_word("states", states, ("auto", "shared", "apart"))
    loaded = Model.load(model)
    if not loaded.layers:
        problem = "No layer of the model has a cache"
        hint = "Pass a model with attention or recurrent layers"
        raise AtlasError(Code.NO_CACHE, problem, got=loaded.name, hint=hint)
    if pack != "auto":
        pack = integer(pack, "pack")
    if name != "atlas" and pack not in ("auto", 1):
        raise AtlasError(
            Code.BAD_PACK,
            "Only policy 'atlas' supports the option `pack`",
            got=f"pack={pack} with policy={policy!r}",
            hint="Omit pack=, or pass policy='atlas'",
        )
    if kv_dtype is not None:
        loaded = loaded.with_cache(kv_dtype)
    tp, pp, dcp = positive(tp, "tp"), positive(pp, "pp"), positive(dcp, "dcp")
    check_topology(loaded, tp, pp, dcp)
    if name != "atlas":
        check_vllm_topology(loaded, tp, dcp)
    if max_len is None:
        max_len = default_length(loaded)
    if in_flight is None:
        # Two batches are in flight at once, and one more for each additional stage.
        in_flight = _BATCHED_TOKENS * (pp + 1)
    backends = backends_of(loaded, backend, rules=rules, chip=chip, tp=tp)
    if runs_on is not None:
        backends = {name: one and one.with_strides() for name, one in backends.items()}
    loaded = packed_for(loaded, backends)
    request = PlanRequest(
        model=loaded,
        backends=backends,
        stages=stages_of(loaded, pp),
        memory=positive(quantity(memory), "the memory"),
        tp=tp,
        pp=pp,
        dcp=dcp,
        layout=layout,
        block_size=block_size,
        pack=pack,
        max_len=length(max_len),
        in_flight=natural(in_flight, "in_flight"),
        prefix_caching=prefix_caching,
        states=states,
        policy=policy,
        rules=rules,
        chip=chip,
        checkpoints=applied_checkpoints(loaded, rules, chip) if prefix_caching else {},
        requests=None if requests is None else positive(requests, "the number of requests"),
        runs_on=runs_on,
    )
    try:
        return maker(request)
    except AtlasError as refusal:
        if refusal.code not in _UNSOUND:
            raise
        raise _order_refused(request, maker, refusal) from refusal


def _engine_rules(runs_on: object, policy: str, *, apart: bool) -> EngineRules:
    """Return the rules of the engine that `runs_on` names.

    `apart` is true if the caller asks for a separate pool of states. No engine can run such a plan.
    """
    engine, rules = split_policy(runs_on) if isinstance(runs_on, str) else ("", NEWEST)
    if engine != "vllm":
        problem = "`runs_on` must be an engine that kvatlas supports"
        names = ("vllm", *(f"vllm@{release}" for release in RELEASES))
        hint = f"Use one of {', '.join(map(repr, names))}"
        raise AtlasError(Code.UNKNOWN_POLICY, problem, got=repr(runs_on), hint=hint)
    if policy != "atlas" or apart:
        got = f"policy={policy!r}" if policy != "atlas" else "a separate pool of states"
        problem = "The option `runs_on` requires policy 'atlas' and one pool for all groups"
        hint = "Omit runs_on=, or omit policy=, states= and requests="
        raise AtlasError(Code.CONTRADICTORY, problem, got=f"`runs_on` with {got}", hint=hint)
    return rules


def default_length(model: Model) -> int:
    """Return the default `max_len`: the model's limit, but at most `DEFAULT_LENGTH` tokens.

    >>> default_length(Model.load("Gemma-2-2b")), default_length(Model.load("Qwen3-8B"))
    (8192, 32768)
    """
    return min(DEFAULT_LENGTH, model.max_len or DEFAULT_LENGTH)


_UNSOUND = {
    Code.BAD_PLAN,
    Code.LAYOUT_REFUSED,
    Code.MISALIGNED,
    Code.NOT_CONTIGUOUS,
    Code.OUT_OF_BOUNDS,
    Code.OVERLAP,
    Code.PADDING_INSIDE_PAGE,
    Code.PAGE_TOO_SMALL,
    Code.UNDECIDED,
}
"""Error codes for pages that do not fit together in the layout."""


def _order_refused(
    request: PlanRequest, maker: Callable[[PlanRequest], Plan], refusal: AtlasError
) -> AtlasError:
    """Return the error for a requested layout. Its hint lists layouts that work.

    `refusal` is the error with which planning in the requested layout failed.
    """
    orders = []
    for order in EVERY_ORDER:
        with suppress(AtlasError):
            maker(msgspec.structs.replace(request, layout=order))
            orders.append(order)
    layout = request.layout or "the default layout"
    problem = "Some layers or backends do not support this layout"
    got = f"{layout}: {refusal.problem} ({refusal.got})"
    if refusal.code is Code.LAYOUT_REFUSED:
        problem, got = refusal.problem, str(refusal.got)
    hint = "No layout works; pass another block_size=, backend= or policy="
    if orders:
        hint = f"Use one of {', '.join(orders)}"
    return AtlasError(Code.LAYOUT_REFUSED, problem, got=got, hint=hint)


def _check_word(option: str, word: object, words: tuple[str, ...]) -> None:
    if not isinstance(word, str) or word not in words:
        problem, hint = (
            f"The option `{option}` has an unknown value",
            f"Use one of {', '.join(map(repr, words))}",
        )
        raise AtlasError(Code.UNKNOWN_POLICY, problem, got=repr(word), hint=hint)
