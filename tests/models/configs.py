"""One small config for each family: only the keys that decide its caches."""

from __future__ import annotations

from typing import Any

GQA: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
MLA: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}
DELTA: dict[str, Any] = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
SPARSE_FREQUENCY = [0, 1, 1]


def config(architecture: str, layers: int, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"architectures": [architecture], "num_hidden_layers": layers}
    for part in (*parts, more):
        values |= part
    return values


def nested(architecture: str, model_type: str, inner: dict[str, Any]) -> dict[str, Any]:
    text = {key: value for key, value in inner.items() if key != "architectures"}
    return {"architectures": [architecture], "text_config": {**text, "model_type": model_type}}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": config("LlamaForCausalLM", 2, GQA),
    "mistral": config("MistralForCausalLM", 2, GQA, sliding_window=4096),
    "qwen2": config(
        "Qwen2ForCausalLM", 3, GQA,
        use_sliding_window=True, sliding_window=4096, max_window_layers=2,
    ),
    "gemma2": config("Gemma2ForCausalLM", 4, GQA, head_dim=256, sliding_window=4096),
    "gemma3": nested(
        "Gemma3ForConditionalGeneration", "gemma3_text",
        config("", 8, GQA, sliding_window=1024, sliding_window_pattern=6),
    ),
    "gemma3n": config(
        "Gemma3nForCausalLM", 5, GQA, sliding_window=512, num_kv_shared_layers=2,
        layer_types=[*["sliding_attention"] * 4, "full_attention"],
    ),
    "gemma4": nested(
        "Gemma4ForConditionalGeneration", "gemma4_text",
        config(
            "", 6, GQA, head_dim=128, global_head_dim=256, num_global_key_value_heads=1,
            attention_k_eq_v=True, sliding_window=1024,
            layer_types=[*["sliding_attention"] * 5, "full_attention"],
        ),
    ),
    "chatglm": config(
        "ChatGLMModel", 2, GQA, num_key_value_heads=None, kv_channels=128,
        multi_query_attention=True, multi_query_group_num=2,
    ),
    "gpt_oss": config("GptOssForCausalLM", 4, GQA, head_dim=64, sliding_window=128),
    "olmo3": config("Olmo3ForCausalLM", 8, GQA, sliding_window=4096),
    "exaone4": config(
        "Exaone4ForCausalLM", 8, GQA, sliding_window=4096, sliding_window_pattern="LLLG"
    ),
    "cohere2": config("Cohere2ForCausalLM", 8, GQA, sliding_window=4096),
    "llama4": nested(
        "Llama4ForConditionalGeneration", "llama4_text",
        config("", 8, GQA, attention_chunk_size=8192),
    ),
    "mimo_v2": config(
        "MiMoV2FlashForCausalLM", 3, GQA, head_dim=192, v_head_dim=128, sliding_window=128,
        swa_num_key_value_heads=4, swa_head_dim=192, swa_v_head_dim=128,
        attention_chunk_size=128, hybrid_layer_pattern=[0, 1, 1],
    ),
    "step": config(
        "Step3p5ForCausalLM", 4, GQA, sliding_window=512, num_nextn_predict_layers=1,
        layer_types=["full_attention", *["sliding_attention"] * 4],
        attention_other_setting={
            "attention_type": "sliding_attention", "num_attention_groups": 4, "head_dim": 64,
        },
    ),
    "deci": config(
        "DeciLMForCausalLM", 3, GQA, num_key_value_heads=None,
        block_configs=[
            {"attention": {"no_op": False, "n_heads_in_group": 4}},
            {"attention": {"no_op": True, "n_heads_in_group": None}},
            {"attention": {"no_op": False, "n_heads_in_group": 8}},
        ],
    ),
    "minimax_m3": config(
        "MiniMaxM3ForCausalLM", 3, GQA,
        sparse_attention_config={
            "sparse_attention_freq": SPARSE_FREQUENCY, "sparse_index_dim": 128,
        },
    ),
    "falcon": config(
        "FalconForCausalLM", 2, GQA, multi_query=True, num_kv_heads=8, num_key_value_heads=None
    ),
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "dtype": "float32",
        "n_layer": 2, "n_embd": 768, "n_head": 12, "n_positions": 1024,
    },
    "dbrx": {
        "architectures": ["DbrxForCausalLM"], "dtype": "bfloat16", "n_layers": 2,
        "d_model": 1024, "n_heads": 8, "attn_config": {"kv_n_heads": 2},
    },
    "qwen2_5_vl": config("Qwen2_5_VLForConditionalGeneration", 2, GQA, vision_config={}),
    "deepseek_v3": config("DeepseekV3ForCausalLM", 2, MLA, num_nextn_predict_layers=1),
    "deepseek_v32": config(
        "DeepseekV32ForCausalLM", 2, MLA, index_head_dim=128, index_topk=2048
    ),
    "glm5_2": config(
        "GlmMoeDsaForCausalLM", 8, MLA, index_head_dim=128, index_topk=2048,
        index_topk_freq=4, index_skip_topk_offset=3,
    ),
    "deepseek_v4": config(
        "DeepseekV4ForCausalLM", 3, GQA, num_key_value_heads=1, head_dim=512,
        qk_rope_head_dim=64, sliding_window=128, index_head_dim=128,
        num_nextn_predict_layers=1, compress_ratios=[0, 4, 128, 0],
    ),
    "qwen3_next": config("Qwen3NextForCausalLM", 4, GQA, DELTA, head_dim=256),
    "qwen3_5": nested(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text",
        config("", 4, GQA, DELTA, head_dim=256, mamba_ssm_dtype="float32"),
    ),
    "kimi_linear": config(
        "KimiLinearForCausalLM", 4, MLA,
        linear_attn_config={
            "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 8, "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    ),
    "minimax_text": config(
        "MiniMaxText01ForCausalLM", 8, GQA, attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1]
    ),
    "lfm2": config("Lfm2ForCausalLM", 4, GQA, full_attn_idxs=[2], conv_L_cache=3),
    "rwkv7": {
        "architectures": ["RWKV7ForCausalLM"], "dtype": "bfloat16",
        "num_hidden_layers": 2, "hidden_size": 512, "head_dim": 64,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"], "dtype": "float16",
        "num_hidden_layers": 32, "encoder_layers": 32, "decoder_layers": 2, "d_model": 1280,
        "decoder_attention_heads": 20, "max_source_positions": 1500, "max_target_positions": 448,
    },
    "nemotron_h": config(
        "NemotronHForCausalLM", 5, GQA, hybrid_override_pattern="M-M*E", expand=2,
        mamba_num_heads=16, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4,
    ),
    "granite4": config(
        "GraniteMoeHybridForCausalLM", 3, GQA, MAMBA2,
        layer_types=["mamba", "attention", "mamba"],
    ),
    "bamba": config("BambaForCausalLM", 3, GQA, MAMBA2, attn_layer_indices=[1]),
    "jamba": config(
        "JambaForCausalLM", 8, GQA, attn_layer_period=8, attn_layer_offset=4,
        mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, intermediate_size=14336,
    ),
    "falcon_h1": config("FalconH1ForCausalLM", 2, GQA, MAMBA2, mamba_expand=2, mamba_d_ssm=1024),
    "zamba2": config(
        "Zamba2ForCausalLM", 6, GQA, hybrid_layer_ids=[1, 3, 5], num_mem_blocks=2,
        num_key_value_heads=8, n_mamba_heads=32, mamba_headdim=64, mamba_ngroups=1,
        mamba_d_state=64, mamba_d_conv=4,
    ),
    "mamba": {
        "architectures": ["MambaForCausalLM"], "dtype": "bfloat16", "num_hidden_layers": 2,
        "hidden_size": 768, "intermediate_size": 1536, "state_size": 16, "conv_kernel": 4,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"], "dtype": "bfloat16", "num_hidden_layers": 2,
        "hidden_size": 768, "num_heads": 24, "head_dim": 64, "n_groups": 1, "state_size": 128,
        "conv_kernel": 4,
    },
    "qwen4": config(
        "Qwen4ExpForCausalLM", 8, GQA, head_dim=64, model_type="qwen4_exp_text",
        max_position_embeddings=4096,
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64,
        linear_value_head_dim=64, linear_conv_kernel_dim=4, indexer_head_dim=128,
        indexer_compress_ratio=4, indexer_n_heads=4, indexer_kv_heads=1, indexer_budget=512,
    ),
    "glm5_next": {
        "architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next_text",
        "dtype": "bfloat16", "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8,
        "kv_lora_rank": 512, "qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "v_head_dim": 256,
        "q_lora_rank": 128, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
        "index_kpool": 16, "linear_head_dim": 128, "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4,
    },
    "step5": {
        "architectures": ["Step5ForCausalLM"], "model_type": "step5", "dtype": "bfloat16",
        "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
        "num_attention_groups": 2, "head_dim": 192, "sliding_window": 128, "max_seq_len": 4096,
        "sparse_config": {"proxy_dim": 256, "region_block_size": 8},
    },
    "deepseek_v41": {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "deepseek_v41_text", "num_hidden_layers": 8, "hidden_size": 5120,
            "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
            "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_groups": 8, "o_lora_rank": 1024,
            "sliding_window": 128, "compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 0],
            "kv_source_layer_ids": [1, 3, 5], "index_source_layer_ids": [1, 3, 5, 7],
            "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
            "num_nextn_predict_layers": 1, "engram_head_dim": 256, "engram_n_heads": 8,
        },
    },
}  # fmt: skip
