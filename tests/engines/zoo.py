"""Tiny models with real modeling code and random weights, large enough that tokens vary."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import transformers

VOCABULARY = 97
NEW = 40
PROMPTS = (37, 32, 25)
"""Tokens of each prompt of the batch; shorter ones are padded on the left. All are longer than
a block and a window, so that few new tokens cross blocks and leave windows behind."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_ALTERNATE = ["linear_attention", "full_attention", "full_attention"] * 2
"""As many attention layers as the largest pack, and two recurrent ones."""


@dataclass(frozen=True)
class Tiny:
    """A model's config class, what makes it tiny, and what it has."""

    config: str
    options: dict[str, Any]
    recurrent: bool = False
    attention: bool = True
    plain: dict[str, Any] = field(default_factory=lambda: _COMMON)
    spread: float = 0.25
    """Deviation of the random weights."""

    @property
    def argument(self) -> str:
        """What `generate` calls the cache of this model."""
        return "cache_params" if "Mamba" in self.config else "past_key_values"


ZOO: dict[str, Tiny] = {
    "Llama": Tiny("LlamaConfig", {"num_hidden_layers": 2}),
    "Qwen3": Tiny("Qwen3Config", {"num_hidden_layers": 2, "head_dim": 16}),
    "Mistral": Tiny("MistralConfig", {"num_hidden_layers": 2, "sliding_window": 24}),
    "Gemma2": Tiny(
        "Gemma2Config",
        {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    ),
    "Gemma3": Tiny(
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    # transformers writes the larger heads of full attention to `per_layer_config`.
    "Gemma4": Tiny(
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "GptOss": Tiny(
        "GptOssConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "sliding_window": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Llama4": Tiny(
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "attention_chunk_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 4,
        },
    ),
    "DeepseekV3": Tiny(
        "DeepseekV3Config",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
        },
    ),
    # The prompts are longer than the 12 tokens that its indexer selects.
    "DeepseekV32": Tiny(
        "DeepseekV32Config",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "index_topk": 12,
            "index_head_dim": 32,
            # With fewer heads, tokens have equal scores: 0, the sum of no positive products.
            "index_n_heads": 16,
        },
    ),
    "Qwen3Next": Tiny(
        "Qwen3NextConfig",
        {
            **_DELTA,
            **_EXPERTS,
            "num_hidden_layers": 6,
            "layer_types": _ALTERNATE,
            "mlp_only_layers": list(range(1, 6)),
        },
        recurrent=True,
    ),
    "Qwen3_5": Tiny(
        "Qwen3_5TextConfig",
        {**_DELTA, "num_hidden_layers": 6, "layer_types": _ALTERNATE},
        recurrent=True,
    ),
    "KimiLinear": Tiny(
        "KimiLinearConfig",
        {
            "num_hidden_layers": 6,
            "layer_types": _ALTERNATE,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "mlp_layer_types": ["dense"] * 5 + ["sparse"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        recurrent=True,
    ),
    "Bamba": Tiny(
        "BambaConfig",
        {**_MAMBA2, "num_hidden_layers": 6, "attn_layer_indices": [1, 2, 4, 5]},
        recurrent=True,
    ),
    "NemotronH": Tiny(
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention", "attention"] * 2 + ["mlp"],
            "num_hidden_layers": 7,
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "conv_kernel": 4,
            "chunk_size": 8,
        },
        recurrent=True,
    ),
    "Jamba": Tiny(
        "JambaConfig",
        {
            "num_hidden_layers": 8,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 8,
            "expert_layer_offset": 0,
            "num_experts": 2,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        recurrent=True,
    ),
    "FalconH1": Tiny(
        "FalconH1Config",
        {**_MAMBA2, "mamba_d_ssm": 64, "num_hidden_layers": 4, "head_dim": 16},
        recurrent=True,
    ),
    "Lfm2": Tiny(
        "Lfm2Config",
        {
            "num_hidden_layers": 6,
            "layer_types": ["conv", "full_attention", "full_attention"] * 2,
            "block_multiple_of": 8,
        },
        recurrent=True,
    ),
    "Mamba2": Tiny(
        "Mamba2Config",
        {
            "num_hidden_layers": 3,
            "num_heads": 4,
            "head_dim": 16,
            "expand": 2,
            "n_groups": 2,
            "state_size": 8,
            "conv_kernel": 4,
            "chunk_size": 8,
        },
        recurrent=True,
        attention=False,
    ),
}

LATENTS_OF_V32 = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
"""Whether this transformers caches the latents of DeepSeek-V3.2; 5.17 caches expanded K and V."""
if not LATENTS_OF_V32:
    del ZOO["DeepseekV32"]
OTHERS: dict[str, Tiny] = {
    "Bamba in parts": Tiny(
        "BambaConfig",
        {
            **_MAMBA2,
            "num_hidden_layers": 9,
            "attn_layer_indices": [1, 2, 3, 4, 5, 6, 7],
            "num_key_value_heads": 1,
            "mamba_d_state": 128,
        },
        recurrent=True,
    ),
    **{
        f"{name} for kernels": replace(
            ZOO[name], options={**ZOO[name].options, "qk_rope_head_dim": 16}
        )
        for name in ("DeepseekV3", "DeepseekV32", "KimiLinear")
        if name in ZOO
    },
}
"""Models for some tests alone: the first one's states are larger than a block of its attention,
the others' rotary parts are as wide as a GPU's kernels want them, and the last one's latents are
as wide as fp8 records want them."""
if LATENTS_OF_V32:
    OTHERS["DeepseekV32 of records"] = replace(
        OTHERS["DeepseekV32 for kernels"],
        options={**OTHERS["DeepseekV32 for kernels"].options, "kv_lora_rank": 128},
    )


@cache
def model_of(name: str) -> Any:
    """The model with random weights, the same ones every time."""
    tiny = tiny_of(name)
    config = getattr(transformers, tiny.config)(**{**tiny.plain, **tiny.options})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=tiny.spread)
    return model


def tiny_of(name: str) -> Tiny:
    """A model of the zoo, or one of the others."""
    return ZOO.get(name) or OTHERS[name]


def prompts() -> dict[str, torch.Tensor]:
    """Three prompts of unlike lengths, padded on the left."""
    longest = max(PROMPTS)
    ids = torch.randint(1, VOCABULARY, (len(PROMPTS), longest), generator=seeded(8))
    seen = torch.arange(longest) >= longest - torch.tensor(PROMPTS).unsqueeze(1)
    return {"input_ids": ids * seen, "attention_mask": seen.long()}


def behind(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The prompts with these tokens behind them."""
    ids, mask = prompts().values()
    more = torch.nn.functional.pad(mask, (0, tokens.shape[1]), value=1)
    return {"input_ids": torch.cat((ids, tokens), dim=1), "attention_mask": more}


def seeded(number: int) -> torch.Generator:
    """Random numbers that are the same every time."""
    return torch.Generator().manual_seed(number)


@cache
def own_tokens(name: str) -> torch.Tensor:
    """What the model says on transformers' own cache."""
    model_of(name).set_attn_implementation("eager")
    return generate(name)


def generate(name: str, cache: Any = None, **options: Any) -> torch.Tensor:
    """Greedy tokens behind the prompts."""
    inputs = {**prompts(), "max_new_tokens": NEW, "do_sample": False, **options}
    if cache is not None:
        inputs[tiny_of(name).argument] = cache
    tokens: torch.Tensor = model_of(name).generate(**inputs)
    return tokens[:, inputs["input_ids"].shape[1] :]
