"""Tiny models whose heads and groups divide by two and by three."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers

PROMPT, NEW = 37, 12
LONGEST = PROMPT + NEW + 1

_COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": 128, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("LlamaConfig", {"num_hidden_layers": 4}),
    "sliding": ("MistralConfig", {"num_hidden_layers": 4, "sliding_window": 20}),
    "latent": (
        "DeepseekV3Config",
        {
            "num_hidden_layers": 3, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12, "v_head_dim": 10, "first_k_dense_replace": 3,
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        },
    ),
    "delta hybrid": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 6, "head_dim": 16, "mlp_only_layers": list(range(6)),
            "layer_types": ["linear_attention", "full_attention", "full_attention"] * 2,
            "linear_num_key_heads": 6, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
            "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
        },
    ),
    "mamba hybrid": (
        "FalconH1Config",
        {
            "num_hidden_layers": 4, "head_dim": 16, "mamba_n_heads": 6, "mamba_d_head": 16,
            "mamba_d_ssm": 96, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4,
            "mamba_expand": 2, "mamba_chunk_size": 8,
        },
    ),
}  # fmt: skip


@lru_cache
def model_of(name: str) -> Any:
    """The model, with the same random weights in every process; attention reads the pages."""
    kind, options = MODELS[name]
    torch.set_num_threads(1)
    config = getattr(transformers, kind)(**{**_COMMON, **options})
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.25)
    model.set_attn_implementation("kvatlas")
    return model


def prompt(number: int) -> torch.Tensor:
    """One prompt; another number is another prompt."""
    seeded = torch.Generator().manual_seed(number)
    return torch.randint(1, 97, (1, PROMPT), generator=seeded)
