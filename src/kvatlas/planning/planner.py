"""`plan()`: a model, memory and a topology in; a `Plan` out."""

from __future__ import annotations

from typing import Any, Literal

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import integer, natural, positive
from kvatlas.models import Model
from kvatlas.planning.backends import backends_of
from kvatlas.planning.block_size import stages_of
from kvatlas.planning.plans import Plan
from kvatlas.planning.policy_atlas import plan_atlas
from kvatlas.planning.policy_vllm import plan_uniform, plan_vllm
from kvatlas.planning.request import Request, length, quantity
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
    if not isinstance(policy, str) or policy not in makers:
        raise AtlasError(
            Code.UNKNOWN_POLICY,
            "A policy is one that kvatlas knows",
            got=repr(policy),
            hint=f"Use one of {', '.join(makers)}",
        )
    loaded = model if isinstance(model, Model) else Model.load(model)
    if not loaded.layers:
        raise AtlasError(
            Code.NO_CACHE,
            "A model that is planned keeps something",
            got=f"{loaded.name} without layers that cache",
            hint="There is nothing to plan",
        )
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
    default = min(DEFAULT_LENGTH, loaded.max_len or DEFAULT_LENGTH)
    asked = Request(
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
        max_len=length(max_len) if max_len is not None else default,
        # Two batches are under way at once, and one more for each further stage.
        in_flight=_BATCHED_TOKENS * (pp + 1)
        if in_flight is None
        else natural(in_flight, "in_flight"),
        prefix_caching=prefix_caching,
        states=_one_of(states, "auto", "shared", "apart"),
        requests=None if requests is None else positive(requests, "the number of requests"),
    )
    return makers[policy](asked)


def _one_of(word: Any, *words: Any) -> Any:
    if word not in words:
        raise AtlasError(
            Code.UNKNOWN_POLICY,
            "An option is one of its words",
            got=repr(word),
            hint=f"Use one of {', '.join(words)}",
        )
    return word


def check_topology(model: Model, tp: int, pp: int, dcp: int, *, strict: bool) -> None:
    """Refuse a topology that the model's heads, groups or layers do not allow.

    `strict` adds what vLLM refuses though the bytes would allow it.
    """

    def refuse(rule: str, got: str, hint: str) -> AtlasError:
        return AtlasError(Code.BAD_TOPOLOGY, rule, got=got, hint=hint)

    if model.attention_heads % tp:
        raise refuse(
            "Tensor parallelism divides the query heads",
            f"{model.attention_heads} heads over tp {tp}",
            f"Use a tp that divides {model.attention_heads}",
        )
    if pp > model.depth:
        raise refuse(
            "Every pipeline stage has a layer",
            f"{model.depth} layers over pp {pp}",
            f"Use a pp of at most {model.depth}",
        )
    if tp % dcp:
        raise refuse(
            "Decode context parallelism divides a tensor-parallel group",
            f"dcp {dcp} within tp {tp}",
            "Use a dcp that divides tp",
        )
    heads = {layer.spec.heads for layer in model.layers if isinstance(layer.spec, Attention)}
    if dcp > 1 and heads and tp // max(heads) < dcp:
        raise refuse(
            "Decode context parallelism divides tokens over ranks that hold the same heads",
            f"dcp {dcp} with {max(heads)} kv heads at tp {tp}",
            f"Use a tp of at least {dcp * max(heads)}",
        )
    if not strict:
        return
    if dcp > 1 and heads and model.attention_heads // max(heads) % dcp:
        raise refuse(
            "vLLM divides the query heads of each kv head over context-parallel ranks",
            f"{model.attention_heads} query and {max(heads)} kv heads with dcp {dcp}",
            "Use a dcp that divides their ratio, or policy atlas",
        )
    for layer in model.layers:
        spec = layer.spec
        if isinstance(spec, Mamba2) and spec.groups % tp and spec.groups != 1:
            raise refuse(
                "vLLM cuts Mamba-2 groups evenly, or repeats a single one",
                f"{spec.groups} groups over tp {tp}",
                "Use policy atlas, which repeats groups evenly",
            )
    if model.output_groups and tp > model.output_groups:
        raise refuse(
            "vLLM deals the groups of the output projection out to ranks",
            f"{model.output_groups} groups over tp {tp}",
            f"Use a tp of at most {model.output_groups}, or policy atlas",
        )
    if not model.repeats_heads and heads and tp > max(heads):
        raise refuse(
            "vLLM does not repeat this model's kv heads",
            f"{max(heads)} kv heads over tp {tp}",
            "Use policy atlas, which repeats them",
        )
