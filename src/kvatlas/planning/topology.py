"""Topologies: which a model allows, which vLLM refuses besides, and who holds which layer."""

from __future__ import annotations

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import natural, positive
from kvatlas.models import Model
from kvatlas.specs import Attention, Mamba2

MOST_RANKS = 1024
"""Ranks that a plan may have: no engine deals one model out to nearly as many."""


def stage_layers(depth: int, pp: int) -> list[int]:
    """Layers of each pipeline stage: equal shares, the rest before the last stage.

    A remainder goes to the stages from the last but one backwards, since the last
    also computes the logits.

    >>> stage_layers(61, 4)
    [15, 15, 16, 15]
    """
    if positive(pp, "pp") > MOST_RANKS:
        problem = "There are more stages than any engine deals a model out to"
        raise _refused(problem, f"pp {pp}", f"Use at most {MOST_RANKS:,} stages")
    shares = [natural(depth, "the number of layers") // pp] * pp
    for extra in range(depth % pp):
        shares[-2 - extra] += 1
    return shares


def stages_of(model: Model, pp: int) -> dict[str, int]:
    """The pipeline stage of each layer."""
    shares = stage_layers(model.depth, pp)
    ends = [sum(shares[: stage + 1]) for stage in range(pp)]
    return {
        layer.name: next((stage for stage, end in enumerate(ends) if layer.index < end), pp - 1)
        for layer in model.layers
    }


def check_topology(model: Model, tp: int, pp: int, dcp: int) -> None:
    """Refuse a topology that the model's heads, groups or layers do not allow."""
    query, kv = model.attention_heads, _kv_heads(model)
    if tp * pp > MOST_RANKS:
        problem = "There are more ranks than any engine deals a model out to"
        raise _refused(problem, f"tp {tp} x pp {pp}", f"Use at most {MOST_RANKS:,} ranks")
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


def check_vllm_topology(model: Model, tp: int, dcp: int) -> None:
    """Refuse what vLLM refuses though the bytes would allow it.

    >>> check_vllm_topology(Model.load("Zamba2-7B"), tp=8, dcp=1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: vLLM cannot divide these Mamba-2 groups evenly. ... [bad_topology]
    """
    query, kv = model.attention_heads, _kv_heads(model)
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


def _kv_heads(model: Model) -> int:
    """Heads of K and V in the layer that has the most; 0 without attention by heads."""
    return max((x.spec.heads for x in model.layers if isinstance(x.spec, Attention)), default=0)


def _refused(problem: str, got: str, hint: str) -> AtlasError:
    return AtlasError(Code.BAD_TOPOLOGY, problem, got=got, hint=hint)
