"""Layers of DeepSeek-V4.1 without weights, for `record_vllm`; vLLM has this model since 0.33."""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from tools.vllm_empty import UnsupportedError, empty, with_attributes

from kvatlas.models import Layer
from kvatlas.specs import Indexer, LatentAttention, Ring, SlidingLatentAttention

WINDOW_BLOCK = 32
"""Tokens per block of a window, which the model passes to its cache."""


class V41Builder:
    """Builds the layers of DeepSeek-V4.1 on one chip."""

    def __init__(self, config: Any, platform: Any) -> None:
        from vllm.models.deepseek_v41 import attention
        from vllm.models.deepseek_v41.nvidia import flash_mla_mega_attn, model

        self.config, self.module = config, attention
        supported = platform.get_device_capability().major == 10
        vars(flash_mla_mega_attn)["is_flashmla_mega_attn_supported"] = lambda: (supported, None)
        self.kind = model._select_dsv4_attn_cls(config)
        backend = self.kind.backend_cls
        if not backend.supports_compute_capability(platform.get_device_capability()):
            raise UnsupportedError(f"{backend.get_name()} does not support this chip")
        made = empty(self.kind)
        self.cache, self.dtype = attention._resolve_dsv4_kv_cache_dtype(
            made._uses_fp8_ds_mla_layout(),
            config.cache_config.cache_dtype,
            config.cache_config,
            made.packed_kv_cache_dtype,
        )
        # As in the constructor of the attention layer.
        self.newer = attention._use_v41_mxfp8_kv_record()
        self.window_bytes = 528 if self.newer else 584
        self.row_bytes = 288 if self.cache == "nvfp4_ds_mla" else self.window_bytes
        self.alignment = 512 if self.newer else 576

    def layer(self, layer: Layer) -> Any:
        """Return the layer of vLLM for one cache."""
        spec: Any = layer.spec
        if isinstance(spec, SlidingLatentAttention):
            return self._window(layer.name, spec)
        if isinstance(spec, Indexer):
            return self._keys(layer.name, spec)
        if isinstance(spec, Ring):
            from vllm.models.deepseek_v41.compressor import CompressorStateCache

            return CompressorStateCache(spec.width, torch.float32, prefix=layer.name)
        return self._rows(spec)

    def _rows(self, spec: LatentAttention) -> Any:
        about = {"kv_cache_dtype": self.cache, "kv_cache_torch_dtype": self.dtype}
        about |= {"compress_ratio": spec.compress, "head_dim": spec.latent + spec.rope}
        about |= {"is_kv_source": True, "kv_page_alignment": self.alignment}
        return with_attributes(empty(self.kind), **about, compressed_bytes_per_token=self.row_bytes)

    def _keys(self, name: str, spec: Indexer) -> Any:
        width = self.module._indexer_k_cache_head_dim(spec.head_dim, use_fp4_kv=False)
        return self.module.DeepseekV4IndexerCache(
            head_dim=width,
            dtype=torch.uint8,
            prefix=name,
            cache_config=self.config.cache_config,
            compress_ratio=spec.compress,
        )

    def _window(self, name: str, spec: SlidingLatentAttention) -> Any:
        from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

        return DeepseekV4SWACache(
            spec.latent + spec.rope,
            spec.window,
            dtype=self.dtype,
            prefix=name,
            cache_config=self.config.cache_config,
            backend_cls=self.kind.swa_backend_cls,
            block_size=WINDOW_BLOCK,
            packed_bytes_per_token=self.window_bytes,
            packed_page_alignment=self.alignment,
            packed_block_stride_alignment=(
                lcm(self.window_bytes, self.row_bytes) if self.newer else None
            ),
            bounded_replay=self.config.cache_config.swa_bounded_replay,
        )
