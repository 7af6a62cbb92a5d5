"""A surprise: an engine that imports this has a vLLM that leaves a gap before the pages."""

from __future__ import annotations

from typing import Any

from tests.vllm.planning_functions import PLANNING

_original = PLANNING.get_kv_cache_config_from_groups


def get_kv_cache_config_from_groups(
    vllm_config: Any, kv_cache_groups: list[Any], available_memory: int
) -> Any:
    made = _original(vllm_config, kv_cache_groups, available_memory)
    if len({group.kv_cache_spec.page_size_bytes for group in kv_cache_groups}) > 1:
        for tensor in made.kv_cache_tensors:
            tensor.offset += 128
    return made


PLANNING.get_kv_cache_config_from_groups = get_kv_cache_config_from_groups  # type: ignore[attr-defined]
