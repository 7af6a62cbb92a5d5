"""The planner in vLLM 0.33: one function is replaced, in the engine core.

vLLM 0.33 lets a platform choose a `KVCacheConfigBuilder`. vLLM asks the builder for groups
before the memory of the workers is known, and the builder cannot return to vLLM's plan afterwards.
The planner therefore replaces the function that makes the configs, where the memory is known.

The planner is not a platform plug-in, because vLLM accepts only one plug-in. If another package
provides the plug-in, the plug-in's builder places the groups of kvatlas's plan. If that builder
groups the layers itself, or does not place pages as planned, vLLM's plan is used, and the logged
reason names the builder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder
from vllm.v1.engine import core

from kvatlas.engines.vllm.planned_groups import declined
from kvatlas.engines.vllm.planner_core import (
    Configs,
    EngineToPlan,
    choose_configs,
    install_in_workers,
    with_packed_layout,
)
from kvatlas.engines.vllm.planner_hooks import PlannerSetting, checked, replace_once


def replace_functions(setting: PlannerSetting) -> None:
    """Replace vLLM's function, after a check of the signatures."""
    about = ("vllm_config", "kv_cache_specs", "available_memory", "global_kv_cache_groups")
    placed = ("self", "vllm_config", "kv_cache_groups", "num_blocks")
    checked(core.get_kv_cache_configs, *about)
    checked(DefaultKVCacheConfigBuilder.get_kv_cache_config_from_groups, *placed)
    checked(current_platform.get_kv_cache_config_builder_cls, "vllm_config")
    install_in_workers()
    replace_once(core, "get_kv_cache_configs", lambda original: _choosing(original, setting))


def _choosing(original: Callable[..., Configs], setting: PlannerSetting) -> Callable[..., Configs]:
    def get_kv_cache_configs(
        vllm_config: Any,
        kv_cache_specs: list[Any],
        available_memory: list[int],
        global_kv_cache_groups: list[Any],
    ) -> Configs:
        about = (vllm_config, kv_cache_specs, available_memory)
        theirs = original(*about, global_kv_cache_groups)
        builder = type(get_kv_cache_config_builder(vllm_config))
        places = "vLLM" if builder is DefaultKVCacheConfigBuilder else builder_name(builder)

        def build(groups: list[Any]) -> Configs:
            check_builder(builder)
            return original(with_packed_layout(vllm_config, groups), *about[1:], groups)

        engine = EngineToPlan(*about, setting, "0.33", places)
        return choose_configs(engine, theirs, build)

    return get_kv_cache_configs


def check_builder(builder: type) -> None:
    """Raise an error that names the builder if a plug-in's builder groups the layers itself."""
    own = getattr(builder, "get_kv_cache_groups", None)
    if own is not DefaultKVCacheConfigBuilder.get_kv_cache_groups:
        raise declined("a platform plug-in groups the layers itself", builder_name(builder))


def builder_name(builder: type) -> str:
    """Return the full name of a builder, which includes the module of its plug-in."""
    return f"{builder.__module__}.{builder.__qualname__}"
