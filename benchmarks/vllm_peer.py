"""vLLM's own planning of the same layers, where vLLM is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvatlas.geometry import DType
from kvatlas.planning.sized_layers import SizedLayer

_TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "e4m3": "float8_e4m3fn"}


def installed() -> bool:
    """Whether vLLM can be imported."""
    return importlib.util.find_spec("vllm") is not None


def planner(layers: list[SizedLayer], layout: str, memory: int) -> Callable[[], Any]:
    """Grouping and sizing of these layers by vLLM, ready to be timed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    layouts = importlib.import_module("vllm.v1.kv_cache_layout")
    specs = {layer.name: _spec(layer) for layer in layers}
    resolved = layouts.KVCacheLayout[layout]
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: resolved,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
    )

    def act() -> Any:
        groups = utils.get_kv_cache_groups(config, dict(specs))
        return utils.get_kv_cache_config_from_groups(config, groups, memory)

    return act


def splitter(layers: int, blocks: int) -> Callable[[], Any]:
    """What vLLM does with a decode rank's descriptors when two prefill ranks feed it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    worker = importlib.import_module(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
    )
    kinds = importlib.import_module("vllm.v1.kv_cache_interface")
    page = 8 * 16 * 512
    count = layers * blocks
    rows = np.empty((count, 3), dtype=np.uint64)
    rows[:, 0] = np.arange(count) * page
    rows[:, 1], rows[:, 2] = page, 0
    stand_in = SimpleNamespace(
        _group_spec_types=[kinds.FullAttentionSpec],
        _fa_desc_replicated=lambda many, _ratio=1: [False] * many,
        _ple_region_index=None,
        _logical_num_blocks=blocks,
    )
    mapping = SimpleNamespace(
        source_ranks_per_group=((0, 1),),
        all_source_ranks=(0, 1),
        rank_to_attention_slot={0: 0, 1: 1},
    )
    split = worker.NixlBaseConnectorWorker._build_local_splits_from_plan
    return lambda: list(split(stand_in, mapping, rows, count))


def _spec(layer: SizedLayer) -> Any:
    """A layer as vLLM describes it."""
    kinds = importlib.import_module("vllm.v1.kv_cache_interface")
    torch = importlib.import_module("torch")
    spec: Any = layer.spec
    page = layer.page
    if layer.kind == "recurrent":
        shapes, dtypes = [], []
        for field in page.fields:
            shapes.append(tuple(axis.size for axis in field.axes))
            dtypes.append(getattr(torch, _TORCH[field.dtype.name]))
        return kinds.MambaSpec(
            block_size=layer.block,
            shapes=tuple(shapes),
            dtypes=tuple(dtypes),
            page_size_padded=layer.padded,
        )
    given: dict[str, Any] = {"block_size": layer.block, "page_size_padded": layer.padded}
    given["tokens_per_state"] = spec.tokens_per_state or 1
    given["state_content_bytes"] = page.content
    dtype = DType.of(getattr(spec, "dtype", "bf16"))
    given |= {"num_kv_heads": page.heads, "head_size": page.content // 2, "dtype": torch.uint8}
    if dtype.name in _TORCH:
        given["dtype"] = getattr(torch, _TORCH[dtype.name])
    match layer.kind:
        case "sliding_window":
            return kinds.SlidingWindowSpec(**given, sliding_window=layer.window)
        case "chunked_local_attention":
            return kinds.ChunkedLocalAttentionSpec(**given, attention_chunk_size=layer.window)
        case "mla_attention":
            return kinds.MLAAttentionSpec(**given, is_index_group_leader=layer.leader)
        case "sliding_window_mla":
            return kinds.SlidingWindowMLASpec(**given, sliding_window=layer.window)
        case "cross_attention":
            return kinds.CrossAttentionSpec(**given)
        case _:
            return kinds.FullAttentionSpec(**given)
