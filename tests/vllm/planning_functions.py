"""vLLM's planning functions, which release 0.33 has moved to another module."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from vllm.v1.core import kv_cache_utils

PLANNING: ModuleType = kv_cache_utils
if find_spec("vllm.v1.core.kv_cache_planning"):
    from vllm.v1.core import kv_cache_planning

    PLANNING = kv_cache_planning
