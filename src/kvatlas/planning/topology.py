"""Topologies: check whether a model and vLLM support a topology, and assign layers to stages."""

from __future__ import annotations

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import natural, positive
from kvatlas.models import Model
from kvatlas.specs import Attention, LatentAttention, Mamba2

MOST_RANKS = 1024
"""Limit on the ranks of a plan, well above what engines use for one model."""


def stage_layers(depth: int, pp: int) -> list[int]:
    """Return the number of layers of each pipeline stage.

    Stages get equal shares. A remainder of r layers goes to the r stages before the last stage, one
    layer each. The last stage gets none of them, because it also computes the logits.

    >>> stage_layers(61, 4)
    [15, 15, 16, 15]
    """
    if positive(pp, "pp") > MOST_RANKS:
        raise _refused(
            f"A plan can have at most {MOST_RANKS:,} pipeline stages",
            f"pp {pp}",
            "Pass a smaller pp=",
        )
    shares = [natural(depth, "the number of layers") // pp] * pp
    for extra in range(depth % pp):
        shares[-2 - extra] += 1
    return shares


def stages_of(model: Model, pp: int) -> dict[str, int]:
    """Return the pipeline stage of each layer, by layer name."""
    shares = stage_layers(model.depth, pp)
    ends = [sum(shares[: stage + 1]) for stage in range(pp)]
    return {
        layer.name: next((stage for stage, end in enumerate(ends) if layer.index < end), pp - 1)
        for layer in model.layers
    }


def check_topology(model: Model, tp: int, pp: int, dcp: int) -> None:
    """Raise an error if a model's heads or layers cannot be divided by `tp`, `pp` and `dcp`."""
    query, kv = model.attention_heads, _kv_heads(model)
    if tp * pp > MOST_RANKS:
        raise _refused(
            f"A plan can have at most {MOST_RANKS:,} ranks",
            f"tp {tp} x pp {pp} = {tp * pp:,} ranks",
            "Use a smaller tp or pp",
        )
    if query % tp:
        raise _refused(
            "tp must divide the number of query heads",
            f"tp {tp} and {query} heads",
            f"Use a tp that divides {query}",
        )
    if pp > model.depth:
        raise _refused(
            "pp must not exceed the number of layers",
            f"pp {pp} and {model.depth} layers",
            f"Use a pp of at most {model.depth}",
        )
    _check_shared_rows(model, pp)
    if tp % dcp:
        raise _refused(
            "dcp must divide tp", f"dcp {dcp} and tp {tp}", f"Use a dcp that divides {tp}"
        )
    if dcp > 1 and kv and tp // kv < dcp:
        raise _refused(
            "dcp must not exceed the number of ranks that hold the same KV heads",
            f"dcp {dcp} and {max(1, tp // kv)} such rank(s): tp {tp} for {kv} KV heads",
            f"Use a tp of at least {dcp * kv}, or a smaller dcp",
        )


def _check_shared_rows(model: Model, pp: int) -> None:
    """Raise an error if a stage of DeepSeek-V4.1 would lack the compressed rows that it reads.

    A layer without compressed rows reads the rows of the nearest earlier layer that stores some.
    """
    if pp == 1 or not model.architecture.startswith("DeepseekV41"):
        return
    sources = {layer.index for layer in model.layers if type(layer.spec) is LatentAttention}
    shares = stage_layers(model.depth, pp)
    starts = [sum(shares[:stage]) for stage in range(1, pp)]
    for start in starts:
        if start > min(sources, default=0) and start not in sources:
            raise _refused(
                "A pipeline stage must start with a layer that stores compressed rows",
                f"pp {pp}, with a stage that starts at layer {start}; layers "
                f"{', '.join(map(str, sorted(sources)))} store them",
                "Use a smaller pp",
            )


def check_vllm_topology(model: Model, tp: int, dcp: int) -> None:
    """Raise an error if vLLM does not support a topology; policy atlas may still support it.

    >>> check_vllm_topology(Model.load("Zamba2-7B"), tp=8, dcp=1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: vLLM cannot divide the Mamba-2 groups evenly. ... [bad_topology]
    """
    query, kv = model.attention_heads, _kv_heads(model)
    if dcp > 1 and kv and query // kv % dcp:
        ratio = query // kv
        raise _refused(
            "In vLLM, dcp must divide the number of query heads per KV head",
            f"dcp {dcp} and {query} / {kv} = {ratio} query heads per KV head",
            f"Use a dcp that divides {ratio}, or policy='atlas'",
        )
    mamba = {layer.spec.groups for layer in model.layers if isinstance(layer.spec, Mamba2)}
    if uneven := [groups for groups in mamba if groups % tp and groups != 1]:
        problem = "vLLM cannot divide the Mamba-2 groups evenly"
        got = f"{uneven[0]} groups and tp {tp}"
        hint = f"Use a tp that divides {uneven[0]}, or policy='atlas', which replicates groups"
        raise _refused(problem, got, hint)
    groups = model.output_groups
    if groups and tp > groups:
        raise _refused(
            "In vLLM, tp must not exceed the number of groups of the output projection",
            f"tp {tp} and {groups} groups",
            f"Use a tp of at most {groups}, or policy='atlas'",
        )
    if not model.repeats_heads and 0 < kv < tp:
        problem = "tp must not exceed the number of KV heads, because vLLM does not replicate them"
        got = f"tp {tp} and {kv} KV heads of {model.name}"
        hint = f"Use a tp of at most {kv}, or policy='atlas', which replicates KV heads"
        raise _refused(problem, got, hint)


def _kv_heads(model: Model) -> int:
    """Return the largest number of KV heads of any layer; 0 without multi-head attention."""
    return max((x.spec.heads for x in model.layers if isinstance(x.spec, Attention)), default=0)


def _refused(problem: str, got: str, hint: str) -> AtlasError:
    return AtlasError(Code.BAD_TOPOLOGY, problem, got=got, hint=hint)
