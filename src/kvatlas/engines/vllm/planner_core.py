"""The part of the planner that all releases of vLLM share: choose, compare, log, fall back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
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
    """A worker's specs by layer name, as vLLM expects them, and the blocks that kernels read."""

    kernels: dict[str, KernelBlocks]


def choose_configs(
    vllm_config: Any,
    specs: Sequence[dict[str, Any]],
    memory: Sequence[int],
    setting: PlannerSetting,
    release: str,
    theirs: Configs,
    build: Callable[[list[Any]], Configs],
) -> Configs:
    """Return the configs of the plan, or `theirs` if the plan is not better; log one line.

    `build` makes vLLM's configs from groups. Whatever fails, vLLM runs with `theirs`.
    """
    try:
        ours, fits = _planned(vllm_config, specs, memory, setting, release, theirs, build)
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
    vllm_config: Any,
    specs: Sequence[dict[str, Any]],
    memory: Sequence[int],
    setting: PlannerSetting,
    release: str,
    theirs: Configs,
    build: Callable[[list[Any]], Configs],
) -> tuple[Configs, list[float]]:
    """Return the configs of the plan, and the requests that they and `theirs` fit."""
    kernels = reported_kernels(specs)
    merged = engine_layers(specs)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    made = plan_engine(
        vllm_config,
        merged,
        kernels,
        memory=min(memory) * stages,
        release=release,
        pack=setting.pack or "auto",
    )
    ours = build(groups_of(made, merged))
    for config in ours:
        check_placement(config, made if stages == 1 else None)
    fits = [get_max_concurrency_for_kv_cache_config(vllm_config, c[0]) for c in (ours, theirs)]
    return ours, fits


def reported_kernels(specs: Sequence[dict[str, Any]]) -> dict[str, KernelBlocks]:
    """Return the blocks that kernels read, by layer, from what every worker reported.

    A worker without the planner would keep vLLM's block sizes, so then the plan is refused.
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
    """Return vLLM's groups for a plan: its own specs with the plan's block size, not padded."""
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
    """Return a config in which vLLM places unlike pages next to each other in every block.

    vLLM refuses groups with unlike pages if its layout starts with L. Its kernels take the offsets
    and strides of the config, so pages can be placed as in the layout that starts with B. The
    result is `vllm_config` itself if no placement changes.
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
    """Let workers report the blocks that kernels read, and adopt the block sizes of the plan."""
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
    """Return the blocks that the kernels of each attention layer read, in a worker."""
    found = {}
    for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items():
        backend = layer.get_attn_backend()
        sizes = backend.get_supported_kernel_block_sizes()
        bases = tuple(getattr(size, "base", size) for size in sizes)
        multiples = all(hasattr(size, "base") for size in sizes)
        found[name] = KernelBlocks(backend.get_name(), bases, multiples)
    return found


def adopt_block_sizes(vllm_config: Any, kv_cache_config: Any) -> None:
    """Set the block sizes of a process's config to those of its caches.

    Every worker has a config, and some runners read the block of recurrent states
    from the config.
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
