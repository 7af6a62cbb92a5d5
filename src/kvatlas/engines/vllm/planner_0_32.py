"""The planner in vLLM 0.32, which has no hook: four functions are replaced.

The replacements call vLLM's own functions. While the engine core makes the configs of a plan,
`get_kv_cache_groups` returns the groups of the plan, and the two functions that place pages get a
layout in which a block may have pages of different sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core

from kvatlas.engines.vllm.planner_core import (
    Configs,
    EngineToPlan,
    choose_configs,
    install_in_workers,
    with_packed_layout,
)
from kvatlas.engines.vllm.planner_hooks import PlannerSetting, checked, replace_once

_GROUPS: ContextVar[list[Any] | None] = ContextVar("groups", default=None)
"""The groups of the plan while vLLM makes the configs of the plan; otherwise None."""


def replace_functions(setting: PlannerSetting) -> None:
    """Replace vLLM's functions, after a check of their signatures."""
    configs = ("vllm_config", "kv_cache_specs", "available_memory")
    placed = ("vllm_config", "kv_cache_groups", "available_memory")
    checked(core.get_kv_cache_configs, *configs)
    checked(kv_cache_utils.get_kv_cache_groups, "vllm_config", "kv_cache_spec")
    checked(kv_cache_utils.get_kv_cache_config_from_groups, *placed)
    checked(kv_cache_utils._pool_bytes_per_block, "vllm_config", "kv_cache_groups")
    install_in_workers()

    def choosing(original: Callable[..., Configs]) -> Callable[..., Configs]:
        def get_kv_cache_configs(
            vllm_config: Any, kv_cache_specs: list[Any], available_memory: list[int]
        ) -> Configs:
            about = (vllm_config, kv_cache_specs, available_memory)

            def build(groups: list[Any]) -> Configs:
                token = _GROUPS.set(groups)
                try:
                    return original(*about)
                finally:
                    _GROUPS.reset(token)

            return choose_configs(EngineToPlan(*about, setting, "0.32"), original(*about), build)

        return get_kv_cache_configs

    replace_once(core, "get_kv_cache_configs", choosing)
    replace_once(kv_cache_utils, "get_kv_cache_groups", _grouping)
    for name in ("get_kv_cache_config_from_groups", "_pool_bytes_per_block"):
        replace_once(kv_cache_utils, name, _placing)


def _grouping(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def get_kv_cache_groups(vllm_config: Any, kv_cache_spec: dict[str, Any]) -> list[Any]:
        groups = _GROUPS.get()
        return original(vllm_config, kv_cache_spec) if groups is None else copy.deepcopy(groups)

    return get_kv_cache_groups


def _placing(original: Callable[..., Any]) -> Callable[..., Any]:
    def place(vllm_config: Any, kv_cache_groups: list[Any], *rest: Any, **named: Any) -> Any:
        if _GROUPS.get() is not None:
            vllm_config = with_packed_layout(vllm_config, kv_cache_groups)
        return original(vllm_config, kv_cache_groups, *rest, **named)

    return place
