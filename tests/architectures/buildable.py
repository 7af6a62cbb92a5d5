"""The values without which the default config of an architecture cannot be built or run."""

from __future__ import annotations

from typing import Any

_HEAD = {"head_dim": 128}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 512,
    "indexer_compress_ratio": 4,
}

NEEDED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": ["mamba"] * 31 + ["attention"]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    # The kernel of grouped experts takes rows of a multiple of 16 bytes.
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8}},
    "dots1": {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6},
    # transformers makes a cache with one entry per encoder layer.
    "blenderbot": {"decoder_layers": 2},
    # The hidden size is no multiple of the default number of heads.
    "glm4_moe": _HEAD,
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    # One token per expert, as the meta device answers: 7 tokens, each for 2 experts.
    "jetmoe": {"num_local_experts": 14},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": _HEAD,
    "nemotron": {"num_key_value_heads": 48},
    "qwen4_exp_text": {**_INDEXER, "ple_embed_dim": 2048},
    "xmod": {"is_decoder": True, "languages": ["en_XX"], "default_language": "en_XX"},
}

TEXT_ONLY = {
    "dots3_note", "emu3", "gemma3n", "llama4", "qwen3_5",
    "qwen3_5_moe", "qwen4_exp",
}  # fmt: skip
"""Multimodal model types whose text model is built alone."""

NOT_BUILT = {
    "blt": "four models in one, without a common cache",
    "gemma4_assistant": "a draft model, which reads the caches of its target",
    "gemma4_unified_assistant": "a draft model, which reads the caches of its target",
    "reformer": "caches hidden rows and hash buckets, no K and V",
    "xlm": "has no cache",
    "xlnet": "caches hidden rows, no K and V",
}
"""Model types that are not built, and the reason."""
