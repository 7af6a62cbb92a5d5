"""What vLLM makes of a plan's groups: its own spec objects, laid out by its own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvatlas.models import Model
from kvatlas.planning import Plan
from kvatlas.planning.backends import backends_of
from kvatlas.specs import (
    Attention,
    ChunkedAttention,
    CompressorState,
    Indexer,
    LatentAttention,
    Recurrent,
    SlidingAttention,
    SlidingLatentAttention,
)
from tests.vllm.planning_functions import PLANNING

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def alignment(made: Plan, model: Model, name: str) -> Any:
    """What vLLM asks of the distance between blocks of a layer."""
    backend = backends_of(model, None)[name]
    if backend is None or (backend.multiples and not backend.whole_rows):
        return None
    rows = backend.whole_rows and getattr(made.spec(name), "cache", "auto") == "auto"
    return made.page(name).content if rows else MultipleOf(max(backend.sizes))


def vllm_spec(made: Plan, model: Model, name: str) -> Any:
    """vLLM's spec of one rank's layer, at the block size and padding that it is planned with."""
    spec, (region, index) = made.spec(name), made.region_of(name)
    page = spec.page(region.block, tp=made.tp)
    padded = region.page_bytes if region.page_bytes > page.unpadded else None
    about: dict[str, Any] = {"block_size": region.block, "page_size_padded": padded}
    if isinstance(spec, Recurrent):
        return MambaSpec(
            shapes=tuple(tuple(axis.size for axis in field.axes) for field in page.fields),
            dtypes=tuple(DTYPES[field.dtype.name] for field in page.fields),
            **about,
        )
    about |= {"dtype": torch.uint8, "state_content_bytes": page.content}
    about |= {"block_stride_alignment": alignment(made, model, name)}
    about |= {"num_kv_heads": 1, "head_size": page.content}
    if isinstance(spec, Attention):
        rank = made.page(name).fields[0]
        about |= {
            "num_kv_heads": rank.sizes["H"],
            "head_size": spec.head_dim,
            "head_size_v": spec.v_dim or spec.head_dim,
            "kv_quant_mode": get_kv_quant_mode(spec.cache),
            "num_head_slots": page.heads,
        }
        if spec.cache == "auto":
            about["dtype"] = DTYPES[spec.dtype]
        if isinstance(spec, SlidingAttention):
            return SlidingWindowSpec(**about, sliding_window=spec.window)
        if isinstance(spec, ChunkedAttention):
            return ChunkedLocalAttentionSpec(**about, attention_chunk_size=spec.chunk)
        return FullAttentionSpec(**about)
    assert isinstance(spec, LatentAttention | Indexer | CompressorState)
    about |= {"tokens_per_state": spec.tokens_per_state}
    if isinstance(spec, SlidingLatentAttention | CompressorState):
        return SlidingWindowMLASpec(**about, sliding_window=spec.window)
    own = region.layers[index].index
    indexed = any(one.index == own and isinstance(one.spec, Indexer) for one in model.layers)
    leads = type(spec) is LatentAttention and spec.compress == 1 and indexed
    return MLAAttentionSpec(**about, is_index_group_leader=leads)


def kv_cache_config(made: Plan, model: Model) -> KVCacheConfig:
    """vLLM's own layout of a plan's groups, whose layers are in the order of the model."""
    groups = []
    for index in range(len(made.groups)):
        specs = {
            layer.name: vllm_spec(made, model, layer.name)
            for layer in model.layers
            if made.region_of(layer.name)[0].group == index
        }
        several = len(set(specs.values())) > 1
        first = next(iter(specs.values()))
        spec = first
        if several:
            spec = UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=specs)
        groups.append(KVCacheGroupSpec(list(specs), spec))
    layout = KVCacheLayout[made.layout]
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
    )
    made_config: KVCacheConfig = PLANNING.get_kv_cache_config_from_groups(
        config, groups, made.pools[0].nbytes
    )
    made_config.kv_cache_layout = made.layout
    return made_config
