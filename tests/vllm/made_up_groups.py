"""vLLM's manager of groups that are made up, and where its scheduler ends chunks of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvatlas.simulate.traces import Trace

BLOCK = 256
WINDOW = 1024


def tokens_of(trace: Trace, request: int) -> list[int]:
    """Tokens that are equal exactly where the trace's ids are."""
    ids = trace.ids[trace.starts[request] : trace.starts[request + 1]]
    spread = np.repeat(ids * trace.block, trace.block) + np.tile(np.arange(trace.block), len(ids))
    tokens: list[int] = spread[: trace.lengths[request]].tolist()
    return tokens


def manager_of(kinds: list[str], blocks: int, kept: str, **options: Any) -> Any:
    """vLLM's manager of these groups, which keeps checkpoints so."""
    dense = kept == "every-block"
    mode: Any = "all" if dense else "align"
    heads: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    specs = {
        "full": lambda: FullAttentionSpec(block_size=BLOCK, **heads),
        "window": lambda: SlidingWindowSpec(block_size=BLOCK, sliding_window=WINDOW, **heads),
        "state": lambda: MambaSpec(
            block_size=BLOCK, shapes=((16, 16),), dtypes=(torch.float32,), mamba_cache_mode=mode
        ),
    }
    groups = [KVCacheGroupSpec([f"layer.{n}"], specs[kind]()) for n, kind in enumerate(kinds)]
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=None if dense else 0,
    )
    sizes = {"scheduler_block_size": BLOCK, "hash_block_size": BLOCK}
    return KVCacheManager(config, 1 << 20, **sizes, **options)


def chunks(tokens: int, hit: int, junction: int, kinds: list[str], kept: str) -> list[int]:
    """Where vLLM's scheduler ends the chunks of a prompt: states are kept at ends of chunks."""
    stops = {tokens}
    if "state" in kinds and kept != "every-block":
        stops |= {(tokens - 1) // BLOCK * BLOCK, junction // BLOCK * BLOCK}
    return sorted(stop for stop in stops if stop > hit)
