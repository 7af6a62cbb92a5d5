"""Topologies: check them against a model and vLLM, and assign layers to pipeline stages."""

from __future__ import annotations

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import natural, positive
from kvatlas.models import Model
from kvatlas.specs import Attention, Mamba2

MOST_RANKS = 1024
"""Limit on the ranks of a plan, well above what engines use for one model."""


def stage_layers(depth: int, pp: int) -> list[int]:
    """Return the number of layers of each pipeline stage.

    Stages get equal shares. A remainder goes to the second-to-last stage and those before it,
    one layer each, because the last stage also computes the logits.

    >>> stage_layers(61, 4)
    [15, 15, 16, 15]
    """
    if positive(pp, "pp") > MOST_RANKS:
        problem = f"A plan may have at most {MOST_RANKS:,} pipeline stages"
        raise _refused(problem, f"pp {pp}", "Use a smaller pp")
    shares = [natural(depth, "the number of layers") // pp] * pp
    for extra in range(depth % pp):
        shares[-2 - extra] += 1
    return shares


def stages_of(model: Model, pp: int) -> dict[str, int]:
    """Return the pipeline stage of each layer."""
    shares = stage_layers(model.depth, pp)
    ends = [sum(shares[: stage + 1]) for stage in range(pp)]
    return {
        layer.name: next((stage for stage, end in enumerate(ends) if layer.index < end), pp - 1)
        for layer in model.layers
    }


def check_topology(model: Model, tp: int, pp: int, dcp: int) -> None:
    """Raise an error if the model's heads or layers do not allow a topology."""
    query, kv = model.attention_heads, _kv_heads(model)
    if tp * pp > MOST_RANKS:
        problem = f"A plan may have at most {MOST_RANKS:,} ranks"
        raise _refused(problem, f"tp {tp} x pp {pp}", "Use a smaller tp or pp")
    if query % tp:
        problem = "tp must divide the number of query heads"
        raise _refused(problem, f"{query} heads over tp {tp}", f"Use a tp that divides {query}")
    if pp > model.depth:
        problem = "pp must not exceed the number of layers"
        got = f"{model.depth} layers over pp {pp}"
        raise _refused(problem, got, f"Use a pp of at most {model.depth}")
    if tp % dcp:
        problem = "dcp must divide tp"
        raise _refused(problem, f"dcp {dcp} with tp {tp}", "Use a dcp that divides tp")
    if dcp > 1 and kv and tp // kv < dcp:
        problem = "dcp must not exceed the number of ranks that hold the same KV heads"
        got = f"dcp {dcp} with {kv} KV heads at tp {tp}"
        raise _refused(problem, got, f"Use a tp of at least {dcp * kv}, or a smaller dcp")


def check_vllm_topology(model: Model, tp: int, dcp: int) -> None:
    """Raise an error for a topology that vLLM does not support, even if a plan is possible.

    >>> check_vllm_topology(Model.load("Zamba2-7B"), tp=8, dcp=1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: vLLM cannot divide the Mamba-2 groups evenly. ... [bad_topology]
    """
    query, kv = model.attention_heads, _kv_heads(model)
    if dcp > 1 and kv and query // kv % dcp:
        problem = "In vLLM, dcp must divide the number of query heads per KV head"
        got = f"{query} query heads and {kv} KV heads with dcp {dcp}"
        raise _refused(problem, got, "Use a dcp that divides their ratio, or policy atlas")
    mamba = {layer.spec.groups for layer in model.layers if isinstance(layer.spec, Mamba2)}
    if uneven := [groups for groups in mamba if groups % tp and groups != 1]:
        problem = "vLLM cannot divide the Mamba-2 groups evenly"
        got = f"{uneven[0]} groups over tp {tp}"
        raise _refused(problem, got, "Use policy atlas, which replicates groups")
    groups = model.output_groups
    if groups and tp > groups:
        problem = "In vLLM, tp must not exceed the number of groups of the output projection"
        got = f"{groups} groups over tp {tp}"
        raise _refused(problem, got, f"Use a tp of at most {groups}, or policy atlas")
    if not model.repeats_heads and 0 < kv < tp:
        problem = "vLLM does not replicate this model's KV heads"
        got = f"{kv} KV heads over tp {tp}"
        raise _refused(problem, got, "Use policy atlas, which replicates them")


def _kv_heads(model: Model) -> int:
    """Return the KV heads of the layer that has the most; 0 without multi-head attention."""
    return max((x.spec.heads for x in model.layers if isinstance(x.spec, Attention)), default=0)


def _refused(problem: str, got: str, hint: str) -> AtlasError:
    return AtlasError(Code.BAD_TOPOLOGY, problem, got=got, hint=hint)
