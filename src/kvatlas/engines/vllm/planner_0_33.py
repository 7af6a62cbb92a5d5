"""The planner in vLLM 0.33: a builder of cache configs, through the hook of the platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder
from vllm.v1.engine import core

from kvatlas.engines.vllm.planner_core import (
    Configs,
    choose_configs,
    install_in_workers,
    with_packed_layout,
)
from kvatlas.engines.vllm.planner_hooks import PlannerSetting, checked, refuse_release, replace_once

_VLLMS_OWN = "vllm.v1.core.kv_cache_planning.DefaultKVCacheConfigBuilder"


class PackedConfigBuilder(DefaultKVCacheConfigBuilder):
    """vLLM's builder, which also places unlike pages next to each other in every block."""

    def get_kv_cache_config_from_groups(
        self, vllm_config: Any, kv_cache_groups: list[Any], num_blocks: int
    ) -> Any:
        """See vLLM's `KVCacheConfigBuilder`."""
        packed = with_packed_layout(vllm_config, kv_cache_groups)
        return super().get_kv_cache_config_from_groups(packed, kv_cache_groups, num_blocks)


def install_planner(setting: PlannerSetting) -> None:
    """Install the builder, and compare its configs with vLLM's in the engine core."""
    platform = type(current_platform)
    placed = ("self", "vllm_config", "kv_cache_groups", "num_blocks")
    configs = ("vllm_config", "kv_cache_specs", "available_memory", "global_kv_cache_groups")
    checked(platform.get_kv_cache_config_builder_cls, "vllm_config")
    checked(DefaultKVCacheConfigBuilder.get_kv_cache_config_from_groups, *placed)
    checked(core.get_kv_cache_configs, *configs)
    install_in_workers()

    def building(original: Callable[..., str]) -> Callable[..., str]:
        def get_kv_cache_config_builder_cls(vllm_config: Any) -> str:
            own = original(vllm_config)
            if own != _VLLMS_OWN:
                raise refuse_release(f"the platform {platform.__name__} with the builder {own}")
            return f"{__name__}.{PackedConfigBuilder.__name__}"

        return get_kv_cache_config_builder_cls

    def choosing(original: Callable[..., Configs]) -> Callable[..., Configs]:
        def get_kv_cache_configs(
            vllm_config: Any,
            kv_cache_specs: list[Any],
            available_memory: list[int],
            global_kv_cache_groups: list[Any],
        ) -> Configs:
            about = (vllm_config, kv_cache_specs, available_memory)
            theirs = original(*about, global_kv_cache_groups)
            return choose_configs(
                *about, setting, "0.33", theirs, lambda groups: original(*about, groups)
            )

        return get_kv_cache_configs

    replace_once(platform, "get_kv_cache_config_builder_cls", building)
    replace_once(core, "get_kv_cache_configs", choosing)
