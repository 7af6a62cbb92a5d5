"""Layers of vLLM without weights: each has what its own `get_kv_cache_spec` reads.

Side caches (indexers, compressors, windows) are built by their constructors; layers with weights
are created without a constructor, and receive the attributes that their spec depends on.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from tools.vllm_empty import UnsupportedError, empty, with_attributes
from tools.vllm_v41 import V41Builder

from kvatlas.models import Layer, Model
from kvatlas.specs import (
    Attention,
    ChunkedAttention,
    CompressorState,
    GatedDeltaNet,
    Indexer,
    KimiDelta,
    LatentAttention,
    Mamba2,
    Recurrent,
    Ring,
    SlidingAttention,
    SlidingLatentAttention,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BOUND = -5.0
"""The bound of Kimi-K3's gate; its value does not matter."""
SPARSE_BLOCKS = 16
"""Blocks that MiniMax-M3 selects."""
_INDEX_SCALES = 128
"""Elements of an indexer key that share a scale of 4 bytes."""


class LayerBuilder:
    """Builds the layers of one model at one tp on one chip."""

    def __init__(self, model: Model, tp: int, platform: Any, config: Any) -> None:
        self.model, self.tp, self.platform, self.config = model, tp, platform, config
        self.indexed = {x.index for x in model.layers if isinstance(x.spec, Indexer)}
        self.rings = {x.index: x.spec for x in model.layers if isinstance(x.spec, Ring)}
        self.cache = next((s for s in map(_requested, model.layers) if s != "auto"), "auto")

    def build(self) -> dict[str, Any]:
        """Return the layers by name, in the order in which vLLM registers them."""
        if any(isinstance(layer.spec, CompressorState) for layer in self.model.layers):
            self._resolve_v4()
        if self.model.architecture.startswith("DeepseekV41"):
            self.v41 = V41Builder(self.config, self.platform)
        registered = self.config.compilation_config.static_forward_context
        for layer in self.model.layers:
            made = self._layer(layer)
            registered[layer.name] = made
        return dict(registered)

    def states(self, spec: Recurrent) -> tuple[Any, Any]:
        """Return the shapes and dtypes of a recurrent layer's states."""
        fields = spec.page(1, tp=self.tp).fields
        shapes = tuple(tuple(axis.size for axis in field.axes) for field in fields)
        return shapes, tuple(DTYPES[field.dtype.name] for field in fields)

    def _layer(self, layer: Layer) -> Any:
        spec = layer.spec
        if self.model.architecture.startswith("DeepseekV41"):
            return self.v41.layer(layer)
        if isinstance(spec, Recurrent):
            return self._recurrent(spec)
        if layer.index in self.rings and not isinstance(spec, LatentAttention):
            return self._with_ring(layer, self.rings[layer.index])
        if isinstance(spec, Indexer):
            return self._index_cache(layer.name, spec)
        if isinstance(spec, CompressorState):
            return self._compressor(layer.name, spec)
        if isinstance(spec, SlidingLatentAttention):
            return self._window(layer.name, spec)
        if isinstance(spec, LatentAttention):
            return self._latent(spec, leads=layer.index in self.indexed)
        if layer.index in self.indexed:
            return self._block_sparse(spec)
        return self._dense(spec)

    def _dense(self, spec: Any) -> Any:
        window = spec.window if isinstance(spec, SlidingAttention) else None
        about = {"head_size": spec.head_dim, "num_kv_heads": self._heads(spec)}
        about |= {"sliding_window": window, "head_size_v": spec.v_dim or spec.head_dim}
        if isinstance(spec, ChunkedAttention):
            about["attention_chunk_size"] = spec.chunk
            made = _bare("chunked_local_attention", "ChunkedLocalAttention")
        else:
            made = _bare("attention", "Attention")
        backend = self._two_sizes(spec) if spec.v_dim else self._selected(spec)
        return with_attributes(made, **about, **self._cached(), attn_backend=backend)

    def _cached(self) -> dict[str, Any]:
        """Return the attributes about the cache dtype."""
        from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
        from vllm.v1.attention.backend import AttentionType

        dtype = kv_cache_dtype_str_to_dtype(self.cache, self.config.model_config)
        about = {"kv_cache_dtype": self.cache, "kv_cache_torch_dtype": dtype}
        return {**about, "attn_type": AttentionType.DECODER}

    def _heads(self, spec: Any) -> int:
        return int(spec.page(1, tp=self.tp).fields[0].sizes["H"])

    def _two_sizes(self, spec: Any) -> Any:
        """Return the backend of values of another size than keys, as MiMo-V2 selects it."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        first = AttentionBackendEnum.FLASH_ATTN_DIFFKV.get_class()
        usable = first.is_supported_on_current_device(
            head_size=spec.head_dim,
            head_size_v=spec.v_dim,
            has_sinks=isinstance(spec, SlidingAttention),
        )
        found = first if usable else AttentionBackendEnum.TRITON_ATTN_DIFFKV.get_class()
        found.set_head_size_v(spec.v_dim)
        return found

    def _latent(self, spec: LatentAttention, *, leads: bool) -> Any:
        """Return a layer of MLA; `leads` is whether it has an indexer of its own."""
        if spec.compress > 1:
            return self._compressed(spec)
        made = _bare("mla_attention", "MLAAttention")
        about: dict[str, Any] = {"head_size": spec.latent + spec.rope}
        about |= {"indexer": object() if leads else None, "sliding_window": None}
        about |= {"topk_buffer_width": None, "non_causal_multi_token_decode": False}
        backend = self._selected(spec, sparse=bool(self.indexed))
        return with_attributes(made, **about, **self._cached(), attn_backend=backend)

    def _selected(self, spec: Any, *, sparse: bool = False) -> Any:
        from vllm.utils.import_utils import resolve_obj_by_qualname
        from vllm.v1.attention.selector import AttentionSelectorConfig

        latent = isinstance(spec, LatentAttention)
        asked = AttentionSelectorConfig(
            head_size=spec.latent + spec.rope if latent else spec.head_dim,
            dtype=DTYPES[self.model.dtype],
            kv_cache_dtype=self.cache,
            block_size=None,
            use_mla=latent,
            use_sparse=sparse,
            has_sink=self.model.architecture.startswith("GptOss"),
            has_sliding_window=isinstance(spec, SlidingAttention),
        )
        heads = self.model.attention_heads // self.tp
        return resolve_obj_by_qualname(self.platform.get_attn_backend_cls(None, asked, heads))

    def _index_cache(self, name: str, spec: Indexer) -> Any:
        if spec.cache == "bf16":
            from vllm.models.minimax_m3.common import indexer

            selected = indexer.select_indexer_impl_cls(topk_blocks=SPARSE_BLOCKS)
            backend = selected.indexer_backend_cls
            return indexer.MiniMaxM3IndexerCache(spec.head_dim, name, backend_cls=backend)
        row: dict[str, Any] = {"dtype": torch.uint8, "cache_config": self.config.cache_config}
        row |= {"head_dim": spec.head_dim + spec.head_dim // _INDEX_SCALES * 4, "prefix": name}
        if spec.compress > 1:
            from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache

            return DeepseekV4IndexerCache(**row, compress_ratio=spec.compress)
        from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

        return DeepseekV32IndexerCache(**row)

    def _block_sparse(self, spec: Any) -> Any:
        """Return an attention layer of MiniMax-M3 that has an indexer."""
        from vllm.models.minimax_m3.common.sparse_attention import select_main_backend_and_impl_cls
        from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention

        heads = self._heads(spec)
        backend, _ = select_main_backend_and_impl_cls(
            topk_blocks=SPARSE_BLOCKS, kv_cache_dtype=self.cache, num_kv_heads=heads
        )
        made = empty(MiniMaxM3SparseAttention)
        about = {"num_kv_heads": heads, "head_dim": spec.head_dim, "attn_backend": backend}
        return with_attributes(made, **about, **self._cached())

    def _with_ring(self, layer: Layer, ring: Ring) -> Any:
        """Return a ring, or a cache of a layer that has one."""
        if ring.fills_page:
            return self._step5(layer)
        if ring.parts > 1:
            return self._pooled(layer)
        from vllm.models.qwen4_exp.common import qsa_cache

        spec: Any = layer.spec
        if isinstance(spec, Attention):
            importlib.import_module("vllm.models.qwen4_exp.nvidia.model")  # it and qsa are a cycle
            from vllm.models.qwen4_exp.nvidia import qsa

            made = empty(qsa.Qwen4ExpQSAAttention)
            about: dict[str, Any] = {"num_kv_heads": self._heads(spec), "head_dim": spec.head_dim}
            backend = qsa.Qwen4ExpQSAFlashAttentionBackend
            return with_attributes(made, **about, **self._cached(), attn_backend=backend)
        own: dict[str, Any] = {"dtype": torch.bfloat16, "cache_config": self.config.cache_config}
        own |= {"prefix": layer.name, "vllm_config": self.config, "compress_ratio": ring.group}
        if isinstance(spec, Ring):
            axes = spec.positions > 0
            return qsa_cache.QSAKeyStateCache(
                **own, head_size=spec.width, cache_rope_positions=axes
            )
        return qsa_cache.QSACompressedKeyCache(**own, head_size=spec.head_dim)

    def _pooled(self, layer: Layer) -> Any:
        """Return the ring or the indexer of GLM-5.3."""
        from vllm.models.glm5next.common import attention

        spec: Any = layer.spec
        own: dict[str, Any] = {"prefix": layer.name, "cache_config": self.config.cache_config}
        if isinstance(spec, Ring):
            own |= {"head_dim": spec.width, "dtype": torch.bfloat16, "index_kpool": spec.group}
            return attention.Glm5NextTailCache(**own)
        row = spec.head_dim + spec.head_dim // _INDEX_SCALES * 4
        own |= {"head_dim": row, "dtype": torch.uint8, "index_kpool": spec.compress}
        return attention.Glm5NextIndexerCache(**own)

    def _step5(self, layer: Layer) -> Any:
        """Return the attention, the summaries or the ring of a sparse layer of Step5."""
        from vllm.models.step5.nvidia import csa_tail_ring, sparse_summary_cache
        from vllm.models.step5.nvidia.sparse_attention import Step5DSAAttentionBackend

        about: dict[str, Any] = {
            "prefix": layer.name,
            "static_forward_context": self.config.compilation_config.static_forward_context,
        }
        spec: Any = layer.spec
        capability = self.platform.get_device_capability()
        if not Step5DSAAttentionBackend.supports_compute_capability(capability):
            raise UnsupportedError("STEP5_DSA does not support this chip")
        if isinstance(spec, Attention):
            sizes: dict[str, Any] = {"head_size": spec.head_dim, "head_size_v": spec.head_dim}
            sizes |= {"num_kv_heads": self._heads(spec), "sliding_window": None}
            made = _bare("attention", "Attention")
            return with_attributes(
                made, **sizes, **self._cached(), attn_backend=Step5DSAAttentionBackend
            )
        if isinstance(spec, Indexer):
            return sparse_summary_cache.Step5SparseSummaryCacheLayer(**about, target_impl=None)
        main = layer.name.rpartition(".")[0]
        return csa_tail_ring.Step5CSATailRing(
            **about, main_layer_name=main, num_speculative_tokens=0
        )

    def _resolve_v4(self) -> None:
        from vllm.models.deepseek_v4 import attention
        from vllm.models.deepseek_v4.nvidia import model

        self.v4 = model._select_dsv4_attn_cls(self.config)
        capability = self.platform.get_device_capability()
        if not self.v4.backend_cls.supports_compute_capability(capability):
            raise UnsupportedError(f"{self.v4.backend_cls.get_name()} does not support this chip")
        self.v4_dtypes = attention._resolve_dsv4_kv_cache_dtype(
            empty(self.v4)._uses_fp8_ds_mla_layout(),
            self.config.cache_config.cache_dtype,
            self.config.cache_config,
        )

    def _compressed(self, spec: LatentAttention) -> Any:
        cached, dtype = self.v4_dtypes
        about = {"kv_cache_dtype": cached, "kv_cache_torch_dtype": dtype}
        about |= {"compress_ratio": spec.compress, "head_dim": spec.latent + spec.rope}
        return with_attributes(empty(self.v4), **about)

    def _window(self, name: str, spec: SlidingLatentAttention) -> Any:
        from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

        about = {"dtype": self.v4_dtypes[1], "cache_config": self.config.cache_config}
        about |= {"backend_cls": getattr(self.v4, "swa_backend_cls", None)}
        return DeepseekV4SWACache(spec.latent + spec.rope, spec.window, prefix=name, **about)

    def _compressor(self, name: str, spec: CompressorState) -> Any:
        from vllm.models.deepseek_v4.compressor import CompressorStateCache

        ratio = {8: 4, 128: 128}[spec.window]
        return CompressorStateCache(spec.width, DTYPES[spec.dtype], ratio, prefix=name)

    def _recurrent(self, spec: Recurrent) -> Any:
        """Return a recurrent layer; vLLM decides which prefill kernel it has."""
        about: dict[str, Any] = {"vllm_config": self.config}
        if isinstance(spec, GatedDeltaNet):
            from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn

            base = gdn.QwenGatedDeltaNetAttention
            _, kernel = gdn._resolve_gdn_prefill_backend(self.config)
            # As the constructor of 0.33 does; older releases have no such attribute.
            step = getattr(gdn, "FLASHINFER_GDN_CHECKPOINT_ALIGNMENT", None)
            about["_checkpoint_alignment"] = step if kernel == "flashinfer" else None
        elif isinstance(spec, KimiDelta) and self.model.architecture.startswith("KimiK3"):
            from vllm.models.kimi_k3.nvidia import kda

            base = kda.KimiK3DeltaAttention
            dtype, state = DTYPES[self.model.dtype], DTYPES[spec.ssm_dtype]
            about["kda_prefill_backend"] = kda.resolve_kda_prefill_backend(
                "auto", spec.head_dim, dtype, state, BOUND
            )
        elif isinstance(spec, KimiDelta) and self.model.architecture.startswith("Glm5Next"):
            from vllm.models.glm5next.common import kda as glm_kda

            base = glm_kda.Glm5NextLinearAttention
            about["kda_prefill_backend"] = glm_kda._resolve_kda_prefill_backend(
                "auto", spec.head_dim, DTYPES[self.model.dtype], BOUND
            )
        elif isinstance(spec, Mamba2):
            from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

            base = MambaMixer2
        else:
            from vllm.model_executor.layers.mamba.abstract import MambaBase

            base = MambaBase
        return with_attributes(empty(_with_states(base)), **about, states=self.states(spec))


def _requested(layer: Layer) -> str:
    """Return the cache dtype of an attention layer, as vLLM's option names it."""
    dense = isinstance(layer.spec, Attention) or type(layer.spec) is LatentAttention
    found = str(getattr(layer.spec, "cache", "auto")) if dense else "auto"
    return "auto" if found.endswith("_ds_mla") else found


def _bare(module: str, name: str) -> Any:
    """Return an attention layer of vLLM on which no constructor has run."""
    found = importlib.import_module(f"vllm.model_executor.layers.attention.{module}")
    return empty(getattr(found, name))


@cache
def _with_states(base: Any) -> Any:
    """Return a subclass of a recurrent layer of vLLM that has the shapes of kvatlas's spec."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    return type(
        "WithStates",
        (base, torch.nn.Module),
        {
            "get_state_shape": lambda self: self.states[0],
            "get_state_dtype": lambda self: self.states[1],
            "mamba_type": MambaAttentionBackendEnum.MAMBA2,
        },
    )
