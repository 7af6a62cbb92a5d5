"""A control: an engine that imports this has layers that overlap by half, after all checks."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import core

_original = core.generate_scheduler_kv_cache_config


def overlapping(kv_cache_configs: list[Any]) -> Any:
    for config in kv_cache_configs:
        for tensor in config.kv_cache_tensors:
            tensor.layer_stride //= 2
    return _original(kv_cache_configs)


core.generate_scheduler_kv_cache_config = overlapping
