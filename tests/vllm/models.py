"""Tiny models with random weights, saved as checkpoints that vLLM serves on a CPU in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512

WINDOW = 64

_DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 32,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_DENSE, "num_hidden_layers": 3, "head_dim": 32}),
    # RoPE that is scaled in two of the ways that checkpoints have; "qwen3" and "gpt_oss" have YaRN.
    "llama_scaled": (
        "LlamaConfig",
        {
            **_DENSE,
            "num_hidden_layers": 2,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "llama_linear": (
        "LlamaConfig",
        {
            **_DENSE,
            "num_hidden_layers": 2,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {
            **_DENSE,
            "num_hidden_layers": 2,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **_DENSE,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 256,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 4,
        },
    ),
    "small_llama": ("LlamaConfig", {**_DENSE, "num_hidden_layers": 1, "head_dim": 32}),
    "mistral": (
        "MistralConfig",
        {**_DENSE, "num_hidden_layers": 3, "head_dim": 32, "sliding_window": WINDOW},
    ),
    # Little to compute, and 64 KiB of cache for each token: what is moved takes its time.
    "wide": (
        "LlamaConfig",
        {
            **_DENSE,
            "hidden_size": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "num_hidden_layers": 16,
            "head_dim": 64,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            **_DENSE,
            "tie_word_embeddings": True,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_DENSE,
            "tie_word_embeddings": True,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_DENSE,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "granite": (
        "GraniteMoeHybridConfig",
        {
            **_DENSE,
            **_MAMBA,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "rope",
        },
    ),
    # Four attention layers and eight states of 137,216 bytes: several pages fit in a block.
    "granite_packed": (
        "GraniteMoeHybridConfig",
        {
            **_DENSE,
            **_MAMBA,
            "mamba_d_state": 128,
            "num_hidden_layers": 12,
            "layer_types": ["mamba", "attention", "mamba"] * 4,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "rope",
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_DENSE,
            "head_dim": 32,
            "layers_block_type": ["linear_attention", "full_attention", "linear_attention"] * 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 128,
            "expand": 2,
            "conv_kernel": 4,
            "chunk_size": 32,
        },
    ),
    # Attention of twice the hidden size, in every other layer next to a state.
    "zamba2": (
        "Zamba2Config",
        {
            **_DENSE,
            "num_key_value_heads": 4,
            "num_hidden_layers": 8,
            "layers_block_type": ["mamba", "hybrid"] * 4,
            "hybrid_layer_ids": [1, 3, 5, 7],
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 32,
            "mamba_ngroups": 1,
            "chunk_size": 32,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "use_shared_attention_adapter": False,
        },
    ),
    # The sizes that vLLM's CPU backend for MLA takes.
    "deepseek": (
        "DeepseekV2Config",
        {
            **_DENSE,
            "num_key_value_heads": 4,
            "num_hidden_layers": 1,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "head_dim": 64,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_DENSE,
            **_MAMBA,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "mamba_d_ssm": 256,
            "mamba_n_groups": 2,
        },
    ),
}


def checkpoint(name: str, folder: Path, *, seed: int = 7) -> Path:
    """A folder with the checkpoint of a tiny model; made once, the same every time.

    Another `seed` makes other weights of the same shapes.
    """
    import torch
    import transformers

    path = folder / (name if seed == 7 else f"{name}-{seed}")
    if (path / "model.safetensors").exists():
        return path
    kind, values = CONFIGS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**values, initializer_range=0.08)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    return path
