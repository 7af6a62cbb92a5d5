"""Plan a running vLLM engine: groups and a block size from vLLM's own specs and memory.

`kvatlas.plan` with the policy `atlas` makes the plan. This module describes the engine to
`kvatlas.plan`, and refuses engines for which a packed plan was not tested; vLLM then keeps its own
plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvatlas.engines.vllm.layer_specs import ServedModel, layer_spec
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout
from kvatlas.models import Layer, Model
from kvatlas.planning import BACKENDS, Backend, Plan
from kvatlas.planning.engine_rules import PrefillCheckpoint, split_policy
from kvatlas.planning.policy_atlas import plan_atlas
from kvatlas.planning.request import PlanRequest
from kvatlas.specs import AnySpec, Spec

_MODES = {"none": False, "align": True}
"""vLLM's modes of caching recurrent states, and whether prefixes are cached."""


class KernelBlocks(msgspec.Struct, frozen=True):
    """The block sizes that the kernels of one layer's attention backend support."""

    backend: str
    """The backend's name."""
    sizes: tuple[int, ...]
    """Block sizes in tokens."""
    multiples: bool
    """Whether the kernels also support multiples of these sizes."""


@dataclass(frozen=True)
class EngineGroup:
    """Layers that share a block table, and the tokens per block."""

    layers: tuple[str, ...]
    block: int


def planned_groups(plan: Plan) -> list[EngineGroup]:
    """Return the groups of a plan, with the names of their layers in the plan's order."""
    names: list[list[str]] = [[] for _ in plan.groups]
    for region in plan.regions:
        names[region.group] += [layer.name for layer in region.layers]
    return [
        EngineGroup(tuple(layers), group.block)
        for layers, group in zip(names, plan.groups, strict=True)
    ]


def plan_engine(
    vllm_config: Any,
    specs: Mapping[str, Any],
    kernels: Mapping[str, KernelBlocks],
    *,
    memory: int,
    release: str,
    pack: int | Literal["auto"] = "auto",
) -> Plan:
    """Return a plan with smaller blocks than vLLM's; raise an error if there is no such plan.

    - `specs`: vLLM's spec of every layer of the model.
    - `kernels`: for the name of each attention layer, the block sizes that its kernels support.
    - `memory`: bytes for caches on the rank with the least memory, times the number of pipeline
      stages.
    - `release`: the release of vLLM, such as `0.32`.
    """
    check_engine(vllm_config, specs)
    states = {name: spec for name, spec in specs.items() if _is_state(spec)}
    served = ServedModel.of(vllm_config)
    own = {name: layer_spec(name, spec, served, None) for name, spec in specs.items()}
    own_block = min(spec.block_size for name, spec in specs.items() if name not in states)
    batch = vllm_config.scheduler_config.max_num_batched_tokens
    request = PlanRequest(
        model=_model(served, own),
        backends={
            name: None if name in states else _backend(name, kernels.get(name)) for name in specs
        },
        memory=memory,
        max_len=served.max_len,
        stages=dict.fromkeys(specs, 0),
        tp=served.tp,
        layout=_packed_layout(str(vllm_config.cache_config.kv_cache_layout)),
        pack=pack,
        in_flight=batch * (vllm_config.parallel_config.pipeline_parallel_size + 1),
        prefix_caching=_cache_mode(states),
        rules=split_policy(f"vllm@{release}")[1],
        checkpoints=dict(_checkpoints(states, own)),
        runs_on=f"vllm@{release}",
    )
    made = plan_atlas(request)
    unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
    if unit and made.block_size % unit:
        got = f"prefix_match_unit={unit}, blocks of {made.block_size} tokens"
        raise declined("prefix_match_unit does not divide the planned blocks", got)
    if made.block_size >= own_block:
        raise declined(
            "with smaller blocks, it would fit fewer than 99% of the requests that it fits now",
            f"blocks of {own_block} tokens",
        )
    if _crashes_on_cpu(vllm_config, states, made.block_size):
        got = f"max_num_batched_tokens {batch}, blocks of {made.block_size} tokens"
        raise declined("on a CPU, vLLM crashes in prefills longer than a block", got)
    return made


def _crashes_on_cpu(vllm_config: Any, states: Mapping[str, Any], block: int) -> bool:
    """Return whether vLLM's CPU kernel would crash when it saves a recurrent state.

    The kernel crashes if it has to save a state in the middle of a prefill.
    """
    on_cpu = getattr(vllm_config.device_config, "device_type", None) == "cpu"
    saves = any(spec.num_prefill_checkpoint_blocks for spec in states.values())
    longest = vllm_config.scheduler_config.max_num_batched_tokens
    return on_cpu and saves and _cache_mode(states) and longest > block


def check_engine(vllm_config: Any, specs: Mapping[str, Any]) -> None:
    """Raise an error with the reason if an engine must keep vLLM's own plan."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    states = [spec for spec in specs.values() if _is_state(spec)]
    if not states or len(states) == len(specs):
        kind = "only recurrent layers" if states else "only attention layers"
        raise declined("the model is not a hybrid of attention and recurrent layers", kind)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            got = f"{name}={getattr(parallel, name)}"
            raise declined("the planner does not support context parallelism", got)
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise declined("the planner does not support speculative decoding", "a speculative_config")
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        raise declined("the planner does not support hisparse_config", "a hisparse_config")
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise declined("the hybrid cache manager is disabled", "disable_hybrid_kv_cache_manager")
    if cache.num_gpu_blocks_override is not None:
        raise declined(
            "the number of blocks is fixed",
            f"num_gpu_blocks_override={cache.num_gpu_blocks_override}",
        )
    if vllm_config.model_config.original_max_model_len == -1:
        raise declined("the longest request depends on the plan", "max_model_len=-1")
    if getattr(vllm_config.model_config, "supports_kv_cache_grouping", False):
        raise declined("the model groups its layers itself", "SupportsKVCacheGrouping")
    connector = getattr(vllm_config.kv_transfer_config, "kv_connector", None)
    if connector not in (None, "KVAtlasConnector"):
        raise declined("the connector was not tested with packed blocks", str(connector))
    padded = [
        name
        for name, spec in specs.items()
        if not _is_state(spec) and getattr(spec, "page_size_padded", None) is not None
    ]
    if padded:
        raise declined("pages of attention have padding", f"padding in {padded[0]}")


def _model(served: ServedModel, specs: Mapping[str, AnySpec]) -> Model:
    return Model(
        name=served.name,
        architecture=served.architecture,
        layers=tuple(
            Layer(name=name, index=index, spec=spec)
            for index, (name, spec) in enumerate(specs.items())
        ),
        depth=served.depth,
        attention_heads=served.query_heads,
        max_len=served.max_len,
    )


def _backend(name: str, kernels: KernelBlocks | None) -> Backend:
    """Return the backend of an attention layer, with the block sizes that its engine reported."""
    known = BACKENDS.get(kernels.backend) if kernels else None
    if kernels is None or known is None or not kernels.sizes:
        got = f"{kernels.backend if kernels else 'no backend'} in {name}"
        raise declined("the attention backend is unknown", got)
    sizes = {"sizes": kernels.sizes, "multiples": kernels.multiples}
    return msgspec.structs.replace(known, caches=None, **sizes).with_strides()


def _packed_layout(order: str) -> str:
    """Return layout `order`, changed so that all pages of a block are adjacent.

    Raise an error if the bytes of a page are not contiguous in `order`.

    >>> _packed_layout("LBHNC")
    'BLHNC'
    """
    layout = Layout(order)
    if not layout.page_contiguous:
        raise declined("pages are not contiguous in the engine's layout", order)
    return f"BL{layout.order[2:]}"


def _cache_mode(states: Mapping[str, Any]) -> bool:
    """Return whether recurrent layers keep states for prefix caching."""
    modes = {spec.mamba_cache_mode for spec in states.values()}
    if len(modes) != 1 or not modes <= set(_MODES):
        raise declined("the cache mode of recurrent states is unknown", f"modes {sorted(modes)}")
    return _MODES[modes.pop()]


def _checkpoints(
    states: Mapping[str, Any], own: Mapping[str, AnySpec]
) -> Iterator[tuple[Spec, PrefillCheckpoint]]:
    """Yield the specs whose states vLLM also saves in the middle of a prefill."""
    for name, spec in states.items():
        held = spec.num_prefill_checkpoint_blocks
        if held > 1 or spec.num_speculative_blocks:
            got = (
                f"{held} checkpoint and {spec.num_speculative_blocks} speculative blocks in {name}"
            )
            raise declined("a request holds more states than the planner counts", got)
        if held and _cache_mode(states):
            alignment = spec.prefill_checkpoint_alignment or 1
            yield own[name], PrefillCheckpoint(kernel="", states="", alignment=alignment)


def _is_state(spec: Any) -> bool:
    return "MambaSpec" in {kind.__name__ for kind in type(spec).__mro__}


def declined(reason: str, got: str) -> AtlasError:
    """Return the error for an engine that must keep vLLM's own plan."""
    hint = "Unset KVATLAS_PLAN to silence this message"
    return AtlasError(Code.ENGINE_REFUSES, f"vLLM keeps its own plan: {reason}", got=got, hint=hint)


def check_placement(config: Any, plan: Plan | None, places: str = "vLLM") -> None:
    """Raise an error if vLLM's `KVCacheConfig` does not place the layers as the plan does.

    If `plan` is None, as for one of several pipeline stages, only check that the pages of a group
    do not overlap and stay in their block. The error names `places` as the program that placed the
    layers.
    """
    try:
        _check_placement(config, plan)
    except _MisplacedError as found:
        raise declined(f"{places} does not place a layer as planned", str(found)) from None


class _MisplacedError(Exception):
    """A layer's place in vLLM's config differs from its place in the plan."""


def _check_placement(config: Any, plan: Plan | None) -> None:
    strides = {(tensor.block_stride, tensor.size) for tensor in config.kv_cache_tensors}
    if len(strides) != 1:
        raise _MisplacedError(f"tensors with {len(strides)} different strides or sizes")
    for group in config.kv_cache_groups:
        page, spans = group.kv_cache_spec.page_size_bytes, list[tuple[int, int]]()
        for tensor in config.kv_cache_tensors:
            starts = [tensor.offset + i * tensor.layer_stride for i in range(len(tensor.layers))]
            for layer, start in zip(tensor.layers, starts, strict=True):
                if layer in group.layer_names:
                    spans.append((start, tensor.block_stride))
                    _check_layer(layer, start, tensor, config.num_blocks, plan)
        spans.sort()
        ends = [start + page for start, _ in spans]
        limits = [*(start for start, _ in spans[1:]), *(stride for _, stride in spans[-1:])]
        if any(end > limit for end, limit in zip(ends, limits, strict=True)):
            raise _MisplacedError(f"{group.layer_names[0]} has pages that overlap")


def _check_layer(layer: str, start: int, tensor: Any, blocks: int, plan: Plan | None) -> None:
    if tensor.size != tensor.block_stride * blocks:
        raise _MisplacedError(f"{layer} in {tensor.size:,} bytes for {blocks:,} blocks")
    if plan is None:
        return
    at = plan.placement(layer)
    if (at.offset, at.stride("B")) != (start, tensor.block_stride):
        planned = f"byte {at.offset:,}, blocks {at.stride('B'):,} bytes apart"
        found = f"byte {start:,}, blocks {tensor.block_stride:,} bytes apart"
        raise _MisplacedError(f"{layer} at {found}, not at {planned}")


def engine_layers(specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the specs of all workers; return the spec of each layer by name."""
    merged: dict[str, Any] = {}
    for one in specs:
        merged.update({name: spec for name, spec in one.items() if name not in merged})
    return merged
