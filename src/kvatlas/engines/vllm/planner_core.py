"""The part of the planner that is the same for all releases of vLLM.

The planner makes a plan, compares it with vLLM's plan and logs the result. If its plan is not
better, or cannot be made, vLLM's plan is used.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.worker.worker_base import WorkerWrapperBase

from kvatlas.engines.vllm.planned_groups import (
    KernelBlocks,
    check_placement,
    declined,
    engine_layers,
    plan_engine,
    planned_groups,
)
from kvatlas.engines.vllm.planner_hooks import PlannerSetting, checked, log, replace_once
from kvatlas.errors import AtlasError
from kvatlas.planning import Plan

PROMISE = 0.99
"""The fraction of the requests of vLLM's plan that a plan must fit to be used."""

Configs = list[Any]
"""vLLM's `KVCacheConfig` of every worker."""


class SpecsWithKernels(dict[str, Any]):
    """A worker's vLLM specs by layer name, with the attribute `kernels`.

    The attribute contains the block sizes that each layer's attention kernels support. A worker
    sends the attribute to the engine core together with the specs.
    """

    kernels: dict[str, KernelBlocks]


@dataclass(frozen=True)
class EngineToPlan:
    """The information that the engine core has about its workers when it makes their configs."""

    vllm_config: Any
    specs: Sequence[dict[str, Any]]
    """vLLM's spec of every layer, for each worker."""
    memory: Sequence[int]
    """Bytes for caches, for each worker."""
    setting: PlannerSetting
    release: str
    """The release of vLLM, such as `0.32`."""
    places: str = "vLLM"
    """The component that places the pages of the groups: vLLM, or a platform plug-in."""


def choose_configs(
    engine: EngineToPlan, theirs: Configs, build: Callable[[list[Any]], Configs]
) -> Configs:
    """Return the configs of the plan, or `theirs` if the plan is not better; log one line.

    `build` makes vLLM's configs from groups. If anything fails, return `theirs`.
    """
    vllm_config = engine.vllm_config
    try:
        ours, fits = _planned(engine, theirs, build)
        mine, own = _figures(ours, fits[0]), _figures(theirs, fits[1])
        for config in ours:
            config.of_kvatlas = True
    except (AtlasError, ValueError) as refusal:  # vLLM raises ValueError for too little memory
        log.warning("%s", _reason(refusal))
        return theirs
    except Exception:
        log.exception("vLLM keeps its own plan, because planning failed")
        return theirs
    described = f"The plan of kvatlas has {mine}. vLLM's plan has {own}."
    if fits[0] < PROMISE * fits[1]:
        log.warning("vLLM keeps its own plan, which fits more requests. %s", described)
        return theirs
    log.info("vLLM runs a plan of kvatlas. %s", described)
    device = vllm_config.device_config.device_type
    if device != "cpu":
        log.warning("The planner was tested only on CPUs. This engine runs on %s.", device)
    adopt_block_sizes(vllm_config, ours[0])
    return ours


def _planned(
    engine: EngineToPlan, theirs: Configs, build: Callable[[list[Any]], Configs]
) -> tuple[Configs, list[float]]:
    """Make a plan of kvatlas, and compare it with vLLM's plan `theirs`.

    Return vLLM's configs for the new plan, and two numbers: the requests that fit in the new plan
    and in `theirs`.
    """
    vllm_config = engine.vllm_config
    kernels = reported_kernels(engine.specs)
    merged = engine_layers(engine.specs)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    made = plan_engine(
        vllm_config,
        merged,
        kernels,
        memory=min(engine.memory) * stages,
        release=engine.release,
        pack=engine.setting.pack or "auto",
    )
    ours = build(groups_of(made, merged))
    for config in ours:
        check_placement(config, made if stages == 1 else None, engine.places)
    fits = [get_max_concurrency_for_kv_cache_config(vllm_config, c[0]) for c in (ours, theirs)]
    return ours, fits


def reported_kernels(specs: Sequence[dict[str, Any]]) -> dict[str, KernelBlocks]:
    """Return the block sizes that the kernels of each layer support, as the workers reported them.

    Raise an error if a worker reported no block sizes: such a worker runs without the planner and
    would not use the block sizes of a plan.
    """
    kernels: dict[str, KernelBlocks] = {}
    for rank, one in enumerate(specs):
        reported = getattr(one, "kernels", None)
        if one and not reported:
            raise declined("a worker has no planner", f"worker {rank} of {len(specs)}")
        kernels |= reported or {}
    return kernels


def _reason(refusal: Exception) -> str:
    if isinstance(refusal, AtlasError) and refusal.problem.startswith("vLLM keeps"):
        return str(refusal)
    return f"vLLM keeps its own plan: {refusal}"


def _figures(configs: Configs, requests: float) -> str:
    config = configs[0]
    block = min(
        group.kv_cache_spec.block_size
        for group in config.kv_cache_groups
        if not isinstance(group.kv_cache_spec, MambaSpec)
    )
    return (
        f"blocks of {block:,} tokens, {config.num_blocks:,} blocks, "
        f"{len(config.kv_cache_groups)} groups, and fits {requests:.1f} requests of max_model_len"
    )


def groups_of(plan: Plan, specs: dict[str, Any]) -> list[Any]:
    """Return vLLM's group specs for a plan: vLLM's specs with the plan's block sizes.

    Recurrent states are not padded.
    """
    groups = []
    for group in planned_groups(plan):
        changed = [_resized(specs[name], group.block) for name in group.layers]
        groups.append(KVCacheGroupSpec(list(group.layers), changed[0].merge(changed)))
    return groups


def _resized(spec: Any, block: int) -> Any:
    if not isinstance(spec, MambaSpec):
        return dataclasses.replace(spec, block_size=block)
    if spec.mamba_cache_mode == "none":  # one state per request, in a block of max_model_len
        block = spec.block_size
    return dataclasses.replace(spec, block_size=block, page_size_padded=None)


def with_packed_layout(vllm_config: Any, groups: Sequence[Any]) -> Any:
    """Return a config with which vLLM accepts pages of different sizes in one block.

    vLLM refuses such pages if its layout starts with L (one region per layer). The returned config
    has the corresponding layout that starts with B, in which the pages of a block are adjacent.
    vLLM's kernels support both layouts, because they take offsets and strides from the config. The
    result is `vllm_config` itself if no change is needed.
    """
    order = str(vllm_config.cache_config.kv_cache_layout)
    pages = {group.kv_cache_spec.page_size_bytes for group in groups}
    states = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
    if not order.startswith("LB") or len(pages) < 2 or not states:
        return vllm_config
    changed, cache = copy.copy(vllm_config), copy.copy(vllm_config.cache_config)
    cache.kv_cache_layout = f"BL{order[2:]}"
    changed.cache_config = cache
    return changed


def install_in_workers() -> None:
    """Change vLLM's workers for the planner, in this process.

    The changed workers report the block sizes that their kernels support, and use the block sizes
    of the plan.
    """
    checked(WorkerWrapperBase.initialize_from_config, "self", "kv_cache_configs")

    def initialize(original: Callable[..., None]) -> Callable[..., None]:
        def initialize_from_config(self: Any, kv_cache_configs: Configs) -> None:
            config = kv_cache_configs[self.global_rank]
            if getattr(config, "of_kvatlas", False):
                adopt_block_sizes(self.vllm_config, config)
            original(self, kv_cache_configs)

        return initialize_from_config

    def get_kv_cache_spec(self: Any) -> SpecsWithKernels:
        found = SpecsWithKernels(self.worker.get_kv_cache_spec())
        found.kernels = {}
        try:
            with set_current_vllm_config(self.vllm_config):
                found.kernels = kernel_blocks(self.vllm_config)
        except Exception:
            log.exception("cannot find the block sizes of the attention kernels")
        return found

    replace_once(WorkerWrapperBase, "initialize_from_config", initialize)
    # The wrapper passes on what it does not define, so this comes before the worker's method.
    WorkerWrapperBase.get_kv_cache_spec = get_kv_cache_spec


def kernel_blocks(vllm_config: Any) -> dict[str, KernelBlocks]:
    """In a worker, return the block sizes that the kernels of each attention layer support."""
    found = {}
    for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items():
        backend = layer.get_attn_backend()
        sizes = backend.get_supported_kernel_block_sizes()
        bases = tuple(getattr(size, "base", size) for size in sizes)
        multiples = all(hasattr(size, "base") for size in sizes)
        found[name] = KernelBlocks(backend.get_name(), bases, multiples)
    return found


def adopt_block_sizes(vllm_config: Any, kv_cache_config: Any) -> None:
    """Copy the block sizes of a worker's caches to its vLLM config.

    Every worker has a separate config, from which some model runners read the block size of
    recurrent states.
    """
    cache = vllm_config.cache_config
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    states = {spec.block_size for spec in groups if isinstance(spec, MambaSpec)}
    others = {spec.block_size for spec in groups if not isinstance(spec, MambaSpec)}
    if not states or not others:
        return
    cache.block_size = min(others)
    if cache.mamba_cache_mode == "align":
        cache.mamba_block_size = min(states)
