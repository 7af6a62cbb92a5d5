"""The table of model families: which function reads the config of which architecture.

Each row lists a reader, the architectures and model types whose configs the reader supports, and
vLLM's names for the caches if they differ from `model.layers.N.self_attn.attn`. An
architecture that is not in the table is read as a plain decoder if it looks like one;
`Model.warnings` then records the assumptions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.models import dense, hybrids, latent, mamba, ring_readers, window_patterns
from kvatlas.models.config import QUERY_HEADS, Config
from kvatlas.models.decoder import Decoder
from kvatlas.models.layer import Layer
from kvatlas.models.not_decoders import refuse_without_decoder

Reader = Callable[[Decoder], Iterator[Layer]]


class Family(NamedTuple):
    """A config reader, the models that it supports, and vLLM's names for their caches."""

    reader: Reader
    names: str = ""
    """Architectures and model types as configs spell them, separated by spaces."""
    layers: str = "model.layers"
    attention: str = "self_attn.attn"


_PLAIN = """
    LlamaForCausalLM LLaMAForCausalLM llama MistralForCausalLM mistral Ministral3ForCausalLM
    ministral3 MixtralForCausalLM mixtral Qwen2ForCausalLM qwen2 Qwen2MoeForCausalLM qwen2_moe
    Qwen3ForCausalLM qwen3 Qwen3MoeForCausalLM qwen3_moe qwen3_vl_text qwen3_vl_moe_text
    qwen2_5_vl_text qwen2_vl_text qwen2_5_omni_text qwen3_omni_moe_text
    Qwen2VLForConditionalGeneration
    Qwen2_5_VLForConditionalGeneration MiniMaxM2ForCausalLM minimax_m2 GemmaForCausalLM gemma
    GlmForCausalLM glm Glm4ForCausalLM glm4 Glm4MoeForCausalLM glm4_moe glm4v_text glm4v_moe_text
    Phi3ForCausalLM phi3 PhiForCausalLM phi PhiMoEForCausalLM phimoe Phi3VForCausalLM
    Phi4MMForCausalLM StableLmForCausalLM stablelm SolarForCausalLM solar OrionForCausalLM orion
    OlmoForCausalLM olmo Olmo2ForCausalLM olmo2 OlmoeForCausalLM olmoe FlexOlmoForCausalLM
    NemotronForCausalLM nemotron GraniteForCausalLM granite GraniteMoeForCausalLM granitemoe
    GraniteMoeSharedForCausalLM granitemoeshared InternLM3ForCausalLM internlm3
    Ernie4_5ForCausalLM ernie4_5 Ernie4_5_MoeForCausalLM ernie4_5_moe ApertusForCausalLM apertus
    ArceeForCausalLM arcee SeedOssForCausalLM seed_oss
    Starcoder2ForCausalLM starcoder2 MiMoForCausalLM mimo MiniCPMForCausalLM minicpm
    CohereForCausalLM cohere DeepseekForCausalLM deepseek Dots1ForCausalLM dots1
    HunYuanDenseV1ForCausalLM hunyuan_v1_dense HunYuanMoEV1ForCausalLM hunyuan_v1_moe
    HyperCLOVAXForCausalLM TeleChat3ForCausalLM Step1ForCausalLM
"""


def _full_every(interval: int) -> Reader:
    """Return a reader for configs without a layer pattern.

    The reader assumes full attention in every `interval`-th layer, and a sliding window in the
    others. If the config has a layer pattern after all, the reader uses the pattern.
    """
    return partial(dense.dense, every=interval)


_FAMILIES: tuple[Family, ...] = (
    Family(dense.dense, _PLAIN),
    Family(_full_every(2), "Gemma2ForCausalLM gemma2 VaultGemmaForCausalLM vaultgemma"),
    # gpt-oss's sinks are learned logits, not cached rows.
    Family(_full_every(2), "GptOssForCausalLM gpt_oss", attention="attn.attn"),
    Family(_full_every(6), "Gemma3ForCausalLM gemma3_text"),
    Family(partial(dense.dense, every=5, shared=True), "Gemma3nForCausalLM gemma3n_text"),
    Family(_full_every(5), "Kolibri1ForCausalLM kolibri1"),
    Family(
        _full_every(4),
        "Olmo3ForCausalLM olmo3 Exaone4ForCausalLM exaone4 AfmoeForCausalLM afmoe",
    ),
    Family(
        window_patterns.listed,
        "LagunaForCausalLM laguna MellumForCausalLM mellum CohereCompassForCausalLM "
        "cohere_compass_text",
    ),
    Family(
        partial(window_patterns.first_full, every=4),
        "CwmForCausalLM cwm GraniteSWAForCausalLM granite_swa "
        "GraniteMoeSWAForCausalLM granitemoe_swa",
    ),
    Family(partial(window_patterns.last_full, every=6), "BeamForCausalLM beam"),
    Family(window_patterns.flint, "FlintForCausalLM flint"),
    Family(window_patterns.modernbert, "ModernBertDecoderForCausalLM modernbert-decoder"),
    Family(window_patterns.smollm3, "SmolLM3ForCausalLM smollm3"),
    Family(window_patterns.recurrent_stacks, "HrmTextForCausalLM hrm_text"),
    Family(dense.cohere, "Cohere2ForCausalLM cohere2 Cohere2MoeForCausalLM cohere2_moe"),
    Family(dense.llama4, "Llama4ForCausalLM llama4_text"),
    Family(
        dense.gemma4,
        "Gemma4ForCausalLM gemma4_text Gemma4UnifiedForCausalLM gemma4_unified_text",
    ),
    Family(dense.mimo, "MiMoV2FlashForCausalLM MiMoV2ForCausalLM mimo_v2_flash mimo_v2"),
    Family(dense.step, "Step3p5ForCausalLM step3p5 Step3p7FlashForCausalLM step3p7"),
    Family(dense.pruned, "DeciLMForCausalLM nemotron-nas deci"),
    Family(
        dense.block_sparse,
        "MiniMaxM3ForCausalLM MiniMaxM3SparseForCausalLM minimax_m3 minimax_m3_text "
        "MiniMaxM3VLForCausalLM minimax_m3_vl_text",
    ),
    Family(dense.falcon, "FalconForCausalLM falcon", "transformer.h", "self_attention.attn"),
    Family(dense.dense, "BloomForCausalLM bloom", "transformer.h", "self_attention.attn"),
    Family(dense.dense, "GPT2LMHeadModel gpt2 GPTJForCausalLM gptj", "transformer.h", "attn.attn"),
    Family(
        dense.chatglm,
        "ChatGLMModel ChatGLMForConditionalGeneration chatglm",
        "transformer.encoder.layers",
        "self_attention.attn",
    ),
    Family(dense.dbrx, "DbrxForCausalLM dbrx", "transformer.blocks", "norm_attn_norm.attn.attn"),
    Family(
        dense.dense,
        "InternLM2ForCausalLM internlm2 BailingMoeForCausalLM BailingMoeV2ForCausalLM bailing_moe",
        attention="attention.attn",
    ),
    Family(dense.dense, "OPTForCausalLM opt", "model.decoder.layers"),
    # The decoders of encoder-decoder models, used alone: they have no cross-attention then.
    Family(
        dense.dense,
        "BartForCausalLM BigBirdPegasusForCausalLM BlenderbotForCausalLM "
        "BlenderbotSmallForCausalLM MarianForCausalLM MBartForCausalLM MvpForCausalLM "
        "PegasusForCausalLM PLBartForCausalLM ProphetNetForCausalLM TrOCRForCausalLM "
        "XGLMForCausalLM",
        "model.decoder.layers",
    ),
    Family(dense.gpt_neo, "GPTNeoForCausalLM gpt_neo", "transformer.h", "attn.attn"),
    Family(dense.multi_query, "GPTBigCodeForCausalLM gpt_bigcode", "transformer.h", "attn.attn"),
    Family(dense.expanded_latent, "MiniCPM3ForCausalLM minicpm3"),
    Family(dense.cross_attending, "MllamaForCausalLM mllama_text_model"),
    Family(latent.doubled_latent, "LongcatFlashForCausalLM longcat_flash"),
    Family(latent.mixed_latent, "Dots3NoteForCausalLM dots3_note_text"),
    Family(
        latent.latent,
        "DeepseekV2ForCausalLM deepseek_v2 DeepseekV3ForCausalLM deepseek_v3 kimi_k2 "
        "Glm4MoeLiteForCausalLM glm4_moe_lite AXK1ForCausalLM axk1 PanguUltraMoEForCausalLM "
        "pangu_ultra_moe YoutuForCausalLM youtu MistralLarge3ForCausalLM",
    ),
    Family(
        latent.sparse_latent,
        "DeepseekV32ForCausalLM deepseek_v32 GlmMoeDsaForCausalLM glm_moe_dsa AXK2ForCausalLM axk2",
    ),
    Family(latent.hy_v4, "HYV4ForCausalLM hy_v4"),
    Family(latent.compressed, "DeepseekV4ForCausalLM deepseek_v4"),
    Family(
        ring_readers.shared_compression,
        "DeepseekV41ForCausalLM deepseek_v41 deepseek_v41_text",
    ),
    Family(hybrids.delta_net, "Qwen3NextForCausalLM qwen3_next"),
    Family(hybrids.olmo_delta_net, "OlmoHybridForCausalLM olmo_hybrid"),
    Family(ring_readers.qwen4, "Qwen4ExpForCausalLM qwen4_exp_text"),
    Family(ring_readers.glm5_next, "Glm5NextForCausalLM glm5_next_text"),
    Family(ring_readers.step5, "Step5ForCausalLM step5"),
    Family(
        hybrids.bailing_delta,
        "BailingHybridForCausalLM BailingMoeV3ForCausalLM bailing_hybrid",
        attention="self_attn",
    ),
    Family(hybrids.gated_linear_recurrence, "RecurrentGemmaForCausalLM recurrent_gemma"),
    Family(
        partial(hybrids.delta_net, dtype_key="mamba_ssm_dtype"),
        "Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM qwen3_5_text qwen3_5_moe_text",
    ),
    # vLLM names both kinds of Kimi layers after the module that contains them.
    Family(hybrids.kimi_delta, "KimiLinearForCausalLM kimi_linear", attention="self_attn"),
    Family(
        hybrids.lightning,
        "MiniMaxText01ForCausalLM MiniMaxM1ForCausalLM MiniMaxForCausalLM minimax_text_01 "
        "minimax_m1 minimax",
    ),
    Family(
        hybrids.short_conv, "Lfm2ForCausalLM lfm2 Lfm2MoeForCausalLM lfm2_moe Lfm3ForCausalLM lfm3"
    ),
    Family(hybrids.rwkv, "RWKV7ForCausalLM rwkv7"),
    Family(hybrids.rwkv4, "RwkvForCausalLM rwkv", "rwkv.blocks"),
    Family(
        hybrids.whisper,
        "WhisperForConditionalGeneration whisper",
        ".decoder.layers",
        "layers.self_attn.attn",
    ),
    Family(mamba.nemotron, "NemotronHForCausalLM nemotron_h", attention="mixer.attn"),
    Family(mamba.mamba2_hybrid, "GraniteMoeHybridForCausalLM granitemoehybrid"),
    Family(mamba.mamba2_hybrid, "BambaForCausalLM bamba", attention="attn"),
    Family(mamba.jamba, "JambaForCausalLM jamba", attention="attn"),
    Family(mamba.side_by_side, "FalconH1ForCausalLM falcon_h1", attention="attn"),
    Family(mamba.zamba, "Zamba2ForCausalLM zamba2"),
    Family(mamba.zamba1, "ZambaForCausalLM zamba"),
    Family(
        mamba.mamba_alone,
        "MambaForCausalLM mamba FalconMambaForCausalLM falcon_mamba",
        "backbone.layers",
    ),
    Family(mamba.mamba2_alone, "Mamba2ForCausalLM mamba2", "backbone.layers"),
)

FAMILIES: dict[str, Family] = {
    name: family for family in _FAMILIES for name in family.names.split()
}
"""Families by architecture and by model type."""

PREFIXES = {
    "DeepseekV41ForCausalLM": "language_model.",
    "Qwen2VLForConditionalGeneration": "language_model.",
    "Qwen2_5_VLForConditionalGeneration": "language_model.",
    "MiniCPMV": "llm.",
    "MiniCPMO": "llm.",
    "Ovis": "llm.",
    "Ovis2_5": "llm.",
    "DeepseekVLV2ForCausalLM": "language.",
    "Lfm2VlForConditionalGeneration": "language.",
}
"""Prefixes of the text model's layer names in multimodal wrappers, if not `language_model.`."""

# Config keys that match this pattern indicate caches other than plain K and V.
_SIGNS = (
    r"lora_rank|ssm|mamba|linear_|conv_|_conv|compress|index_|indexer|rwkv|recurrent|lightning"
    r"|state_size|block_type|hybrid|sparse_attention|attn_type|delta|retention|kda|cross_attention"
    r"|is_encoder_decoder|kv_shared|block_configs|layer_group|time_mix|attention_other"
)


def find_family(config: Config, *candidates: str | None) -> Family | None:
    """Return the family of the first architecture or model type in `candidates` that is known.

    Returns None if none of them is known. A DeepSeek or GLM config that has an indexer is read
    as sparse, whatever its architecture is called.
    """
    family = next((FAMILIES[name] for name in candidates if name in FAMILIES), None)
    if family and family.reader is latent.latent and config.has("index_topk"):
        return Family(latent.sparse_latent)
    return family


def unlike_families(architecture: str | None, model_type: str | None) -> str | None:
    """Return a warning if an architecture and a model type are read by different readers.

    >>> unlike_families("LlamaForCausalLM", "gemma2")
    "LlamaForCausalLM is not an architecture of model type 'gemma2': reading it as LlamaForCausalLM"
    """
    one, other = FAMILIES.get(architecture or ""), FAMILIES.get(model_type or "")
    if one is None or other is None or one.reader is other.reader:
        return None
    if {one.reader, other.reader} == {latent.latent, latent.sparse_latent}:
        return None  # the keys of an indexer decide
    return (
        f"{architecture} is not an architecture of model type {model_type!r}: reading it as "
        f"{architecture}"
    )


def plain_family(config: Config, architecture: str, warnings: list[str]) -> Family:
    """Return the family of plain decoders, for a config whose architecture is unknown.

    Raises an error if the config does not look like a plain decoder. `warnings` receives a
    message for each assumption.
    """
    refuse_without_decoder(config, architecture)
    signs = sorted(key for key in config.filled_keys() if re.search(_SIGNS, key))
    needed = {
        "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        "num_attention_heads": QUERY_HEADS,
        "hidden_size": ("hidden_size", "n_embd", "d_model", "head_dim"),
    }
    lacking = [name for name, names in needed.items() if not config.has(*names)]
    if signs or lacking:
        why = [f"the config lacks {', '.join(lacking)}"] if lacking else []
        why += [f"the keys {', '.join(signs)} imply caches other than K and V"] if signs else []
        raise AtlasError(
            Code.UNKNOWN_ARCHITECTURE,
            "The architecture is unknown and does not look like a plain decoder",
            got=f"{architecture or 'no architecture'}: {'; '.join(why)}",
            hint="Upgrade kvatlas, or pass the config of a known model with the same caches",
        )
    warnings.append(f"unknown architecture {architecture or '(none)'}: read as a plain decoder")
    if not config.has("num_key_value_heads", "num_kv_heads", "n_head_kv"):
        warnings.append("num_key_value_heads is missing: using the number of query heads")
    if not config.has("head_dim"):
        warnings.append("head_dim is missing: using hidden size / query heads")
    if not config.has("layer_types", "sliding_window"):
        warnings.append("layer_types and sliding_window are missing: assuming full attention")
    elif not config.has("layer_types", "sliding_window_pattern", "_sliding_window_pattern"):
        warnings.append("layer_types is missing: assuming the same attention in all layers")
    warnings.append("assuming one cache per layer, named as in Llama")
    return Family(dense.dense)
