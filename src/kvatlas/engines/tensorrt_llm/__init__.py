"""Description of TensorRT-LLM's memory: the pools of its two KV cache managers.

| manager | memory of a pool | recorded from |
|---|---|---|
| `KVCacheManager` (V1) | (blocks, layers, K and V, H * N * D), one pool for each window | \
`_torch/disaggregation/resource/kv_extractor.py`, `build_page_table` |
| `KVCacheManagerV2` | slots of equal buffers [buf0 buf1 ...], one pool for each buffer size | \
`runtime/kv_cache_manager_v2/_storage/_config.py`, `create_storage_config` |

TensorRT-LLM cannot be installed without CUDA, so its classes were not run: the functions take
tensors and the few numbers of the configuration. Heads are outside of tokens (HND) by default.
"""

from kvatlas.engines.tensorrt_llm.pools import KNOWN, SlotPool, describe_pools, describe_slots

__all__ = ["KNOWN", "SlotPool", "describe_pools", "describe_slots"]
