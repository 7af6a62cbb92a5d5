"""`plan()`: a model, memory and a topology in; a `Plan` out."""

from __future__ import annotations

from typing import Any, Literal

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import integer, natural, positive
from kvatlas.models import Model
from kvatlas.planning.backends import backends_of
from kvatlas.planning.plans import Plan
from kvatlas.planning.policy_atlas import plan_atlas
from kvatlas.planning.policy_vllm import plan_uniform, plan_vllm
from kvatlas.planning.request import PlanRequest, length, quantity
from kvatlas.specs import Attention, Mamba2

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
    policy: Policy = "atlas",
    pack: int | Literal["auto"] = "auto",
    max_len: int | str | None = None,
    in_flight: int | None = None,
    prefix_caching: bool = True,
    requests: int | None = None,
    states: Literal["auto", "shared", "apart"] = "auto",
) -> Plan:
    """Where a model's caches lie in `memory` bytes of each rank.

    `model` is a `Model` or whatever `Model.load` takes. `in_flight` are the tokens
    that an engine schedules before it settles them, which windows must also cover.
    For hybrids under policy atlas, `states` says whether recurrent states share blocks
    with attention even where that pads more than vLLM, or lie in a pool of their own,
    which `requests` sizes.

    >>> made = plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2, policy="vllm")
    >>> made.block_size, made.num_blocks
    (2096, 2001)
    """
    makers = {"atlas": plan_atlas, "vllm": plan_vllm, "uniform": plan_uniform}
    _check_word("policy", policy, tuple(makers))
    _check_word("states", states, ("auto", "shared", "apart"))
    loaded = Model.load(model)
    if not loaded.layers:
        got = f"{loaded.name} without layers that cache"
        raise AtlasError(Code.NO_CACHE, got=got, hint="There is nothing to plan")
    if pack != "auto":
        pack = integer(pack, "the pack")
    if policy != "atlas" and pack not in ("auto", 1):
        raise AtlasError(
            Code.BAD_PACK,
            "Only policy atlas packs attention layers",
            got=f"pack {pack} with policy {policy}",
            hint="Leave pack out, or use policy atlas",
        )
    if kv_dtype is not None:
        loaded = loaded.with_cache(kv_dtype)
    tp, pp, dcp = positive(tp, "tp"), positive(pp, "pp"), positive(dcp, "dcp")
    check_topology(loaded, tp, pp, dcp, strict=policy != "atlas")
    if max_len is None:
        max_len = min(DEFAULT_LENGTH, loaded.max_len or DEFAULT_LENGTH)
    if in_flight is None:
        # Two batches are under way at once, and one more for each further stage.
        in_flight = _BATCHED_TOKENS * (pp + 1)
    request = PlanRequest(
        model=loaded,
        backends=backends_of(loaded, backend),
        stages=stages_of(loaded, pp),
        memory=quantity(memory),
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
        requests=None if requests is None else positive(requests, "the number of requests"),
    )
    return makers[policy](request)


def _check_word(option: str, word: object, words: tuple[str, ...]) -> None:
    if not isinstance(word, str) or word not in words:
        problem, hint = f"This is no word for {option}", f"Use one of {', '.join(words)}"
        raise AtlasError(Code.UNKNOWN_POLICY, problem, got=repr(word), hint=hint)


def stages_of(model: Model, pp: int) -> dict[str, int]:
    """The pipeline stage of each layer: equal shares, the rest before the last stage.

    A remainder goes to the stages from the last but one backwards, since the last
    also computes the logits.
    """
    shares = [model.depth // pp] * pp
    for extra in range(model.depth % pp):
        shares[-2 - extra] += 1
    ends = [sum(shares[: stage + 1]) for stage in range(pp)]
    return {
        layer.name: next((stage for stage, end in enumerate(ends) if layer.index < end), pp - 1)
        for layer in model.layers
    }


def check_topology(model: Model, tp: int, pp: int, dcp: int, *, strict: bool) -> None:
    """Refuse a topology that the model's heads, groups or layers do not allow.

    `strict` adds what vLLM refuses though the bytes would allow it.
    """
    query = model.attention_heads
    kv = max((x.spec.heads for x in model.layers if isinstance(x.spec, Attention)), default=0)
    if query % tp:
        problem = "Tensor parallelism does not divide the query heads"
        raise _refused(problem, f"{query} heads over tp {tp}", f"Use a tp that divides {query}")
    if pp > model.depth:
        problem = "There are more pipeline stages than layers"
        got = f"{model.depth} layers over pp {pp}"
        raise _refused(problem, got, f"Use a pp of at most {model.depth}")
    if tp % dcp:
        problem = "Decode context parallelism does not divide the tensor-parallel group"
        raise _refused(problem, f"dcp {dcp} within tp {tp}", "Use a dcp that divides tp")
    if dcp > 1 and kv and tp // kv < dcp:
        problem = "Too few ranks hold the same heads to divide tokens over them"
        got = f"dcp {dcp} with {kv} kv heads at tp {tp}"
        raise _refused(problem, got, f"Use a tp of at least {dcp * kv}")
    if not strict:
        return
    if dcp > 1 and kv and query // kv % dcp:
        problem = "vLLM cannot divide the query heads of each kv head over context-parallel ranks"
        got = f"{query} query and {kv} kv heads with dcp {dcp}"
        raise _refused(problem, got, "Use a dcp that divides their ratio, or policy atlas")
    mamba = {layer.spec.groups for layer in model.layers if isinstance(layer.spec, Mamba2)}
    if uneven := [groups for groups in mamba if groups % tp and groups != 1]:
        problem = "vLLM cannot divide these Mamba-2 groups evenly"
        got = f"{uneven[0]} groups over tp {tp}"
        raise _refused(problem, got, "Use policy atlas, which repeats groups evenly")
    groups = model.output_groups
    if groups and tp > groups:
        problem = "vLLM has fewer groups of the output projection than ranks"
        got = f"{groups} groups over tp {tp}"
        raise _refused(problem, got, f"Use a tp of at most {groups}, or policy atlas")
    if not model.repeats_heads and 0 < kv < tp:
        problem = "vLLM does not repeat this model's kv heads"
        got = f"{kv} kv heads over tp {tp}"
        raise _refused(problem, got, "Use policy atlas, which repeats them")


def _refused(problem: str, got: str, hint: str) -> AtlasError:
    return AtlasError(Code.BAD_TOPOLOGY, problem, got=got, hint=hint)
