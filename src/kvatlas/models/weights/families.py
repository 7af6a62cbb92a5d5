"""The table of model families: how to count their layers, and the traits that configs omit.

Traits are, for example, the number of norms in a layer, whether queries and keys are
normalised, which projections have biases, and whether an MLP has a gate.
"""

from __future__ import annotations

from kvatlas.models.weights import rare_families as rare
from kvatlas.models.weights import rare_mixers as mixed
from kvatlas.models.weights.decoders import Layers, Traits, stacked
from kvatlas.models.weights.family_layers import (
    deepseek_v4,
    deepseek_v41,
    falcon,
    gemma4,
    llama4,
    mixers_alone,
    one_or_the_other,
    pruned,
    rwkv,
    whisper,
    with_shared_mlp,
    zamba,
)

_TIED = Traits(tied=True)
_DEEPSEEK = Traits(mtp="embeds")

_GPT = Traits(norm_bias=True, gated=False, biases=("bias", True), mlp_ratio=4)
_DECODER = _GPT._replace(
    norms=3, crosses=True, decodes=True, positions=("max_position_embeddings", 0), tied=True
)
_BERT = _GPT._replace(positions=("max_position_embeddings", 0), head="bert", tied=True)

_FAMILIES: tuple[tuple[str, Layers, Traits], ...] = (
    ("llama mistral ministral3 mixtral phi3 smollm3 granite granitemoe", stacked, Traits()),
    ("aria_text cwm emu3 emu3_text_model ernie4_5 granitemoeshared helium internlm3 iquestcoder "
     "solar_open telechat3 ministral diffllama", stacked, Traits()),
    ("granite_swa granitemoe_swa", stacked, Traits(sinks=True)),
    ("hyperclovax", stacked, Traits(norms=4)),
    ("kolibri1", stacked, Traits(norms=4, qk_norm="head")),
    ("beam", stacked, Traits(norms=4, qk_norm="head", gate="element")),
    ("laguna", stacked, Traits(qk_norm="head", gate="head")),
    ("flint", stacked, Traits(qk_norm="head", sinks=True)),
    ("modernbert-decoder", stacked,
     Traits(outer_norms=3, head="bias", tied=True, more=rare.dense_head)),
    ("qwen2 qwen2_5_vl_text qwen2_vl_text mimo", stacked, Traits(qkv_bias=True, out_bias=False)),
    (
        "qwen2_moe",
        stacked,
        Traits(qkv_bias=True, out_bias=False, shared_gate=True),
    ),
    (
        "qwen3 qwen3_moe qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text",
        stacked,
        Traits(qk_norm="head"),
    ),
    (
        "qwen3_next qwen3_5_text qwen3_5_moe_text",
        stacked,
        Traits(qk_norm="head", shared_gate=True, gate="element", mtp="bare"),
    ),
    ("gemma", stacked, _TIED),
    ("gemma2", stacked, Traits(norms=4, tied=True)),
    ("vaultgemma", stacked, _TIED),
    ("gemma3_text", stacked, Traits(norms=4, qk_norm="head", tied=True)),
    ("gemma4_text gemma4_unified_text", gemma4, Traits(norms=4, qk_norm="head", tied=True)),
    ("gpt_oss", stacked, Traits(qkv_bias=True, out_bias=True, expert_bias=True, sinks=True)),
    ("llama4_text", llama4, Traits(feed_forward="feed_forward")),
    ("olmo2 olmo3 olmoe flex_olmo minimax_m2", stacked, Traits(qk_norm="row")),
    ("mimo_v2_flash mimo_v2", stacked, Traits()),
    ("exaone4 dots1 exaone_moe hy_v3 mellum hunyuan_v1_dense", stacked,
     Traits(qk_norm="head")),
    ("glm4_moe", stacked, Traits(qk_norm="head", out_bias=False, mtp="embeds")),
    ("minimax_m3 minimax_m3_text minimax_m3_vl minimax_m3_vl_text", stacked,
     Traits(qk_norm="head")),
    ("step3p5 step3p7", stacked, Traits(qk_norm="head", gate="head")),
    (
        "deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa kimi_k2 glm4_moe_lite kimi_linear axk1",
        stacked,
        _DEEPSEEK,
    ),
    ("deepseek_v4", deepseek_v4, _DEEPSEEK),
    ("deepseek_v41 deepseek_v41_text", deepseek_v41, _DEEPSEEK),
    ("minimax minimax_text_01 minimax_m1", stacked, Traits()),
    ("lfm2 lfm2_moe", stacked, Traits(qk_norm="head", tied=True, feed_forward="feed_forward")),
    ("nemotron_h", one_or_the_other,
     Traits(norms=1, gated=False, mixer="mixer", feed_forward="mixer", mtp="bare")),
    ("bamba jamba falcon_h1", stacked, Traits(feed_forward="feed_forward")),
    ("granitemoehybrid", with_shared_mlp, _TIED),
    ("mamba mamba2 falcon_mamba", mixers_alone, Traits(norms=1, mixer="mixer")),
    ("zamba2", zamba, Traits(norms=1, tied=True)),
    ("nemotron-nas deci", pruned, Traits()),
    ("rwkv7", rwkv, Traits(norm_bias=True)),
    ("whisper", whisper, Traits(norms=3, norm_bias=True, tied=True)),
    ("arcee", stacked, Traits(gated=False)),
    ("nemotron", stacked, Traits(gated=False, norm_bias=True)),
    ("cohere cohere2 cohere2_moe cohere_compass_text", stacked, Traits(norms=1, tied=True)),
    ("glm", stacked, Traits(out_bias=False)),
    ("glm4", stacked, Traits(norms=4, out_bias=False)),
    ("olmo", stacked, Traits(norms=0, outer_norms=0)),
    ("phimoe stablelm", stacked, Traits(norm_bias=True)),
    ("afmoe", stacked, Traits(norms=4, qk_norm="head", gate="element")),
    ("ernie4_5_moe", stacked, Traits(biases=("use_bias", False))),
    ("apertus", stacked, Traits(gated=False, qk_norm="head")),
    ("nanochat", stacked, Traits(norms=0, outer_norms=0, gated=False)),
    ("jais2", stacked, Traits(norm_bias=True, gated=False)),
    ("starcoder2", stacked,
     Traits(norm_bias=True, gated=False, biases=("use_bias", True), tied=True)),
    ("falcon", falcon, Traits(norm_bias=True, gated=False, biases=("bias", False), tied=True,
                              mlp_ratio=4)),
    ("phi", stacked, _GPT._replace(norms=1, head="bias")),
    ("persimmon", stacked, _GPT._replace(qk_norm="head")),
    ("gpt_neox", stacked, _GPT._replace(biases=None, mlp_bias=True)),
    ("gptj codegen", stacked,
     _GPT._replace(norms=1, biases=None, qkv_bias=False, out_bias=False, mlp_bias=True,
                   head="bias")),
    ("bloom", stacked, _GPT._replace(outer_norms=2, tied=True)),
    ("gpt2 gpt-sw3 gpt_bigcode", stacked, _GPT._replace(positions=("n_positions", 0), tied=True)),
    ("openai-gpt", stacked,
     _GPT._replace(positions=("n_positions", 0), tied=True, outer_norms=0)),
    ("gpt_neo", mixed.gpt_neo,
     _GPT._replace(positions=("max_position_embeddings", 0), biases=None, qkv_bias=False,
                   out_bias=True, mlp_bias=True, tied=True)),
    ("gpt_neox_japanese", stacked, _GPT._replace(biases=None, mlp_bias=False, tied=True)),
    ("mpt", stacked, Traits(gated=False, mlp_ratio=4, tied=True)),
    ("ctrl", stacked, _GPT._replace(head="bias", tied=True)),
    ("opt", stacked, _GPT._replace(biases=("enable_bias", True), tied=True,
                               positions=("max_position_embeddings", 2),
                               embedding_width="word_embed_proj_dim")),
    ("biogpt", stacked, _GPT._replace(positions=("max_position_embeddings", 2), tied=True)),
    ("xglm", stacked, _GPT._replace(tied=True)),
    ("bart plbart mvp trocr", stacked,
     _DECODER._replace(positions=("max_position_embeddings", 2))),
    ("mbart", stacked,
     _DECODER._replace(positions=("max_position_embeddings", 2), outer_norms=2)),
    ("blenderbot blenderbot-small pegasus", stacked, _DECODER),
    ("marian", stacked, _DECODER._replace(outer_norms=0)),
    ("bigbird_pegasus", stacked,
     _DECODER._replace(ties=False, biases=None, qkv_bias=False, out_bias=False, mlp_bias=True)),
    ("bert ernie camembert data2vec-text xlm-roberta roberta", stacked, _BERT),
    ("big_bird", stacked, _BERT._replace(more=rare.pooler)),
    ("roc_bert", stacked, _BERT._replace(more=rare.pronunciation)),
    ("roformer", stacked, _BERT._replace(positions=None, more=rare.rotations,
                                         embedding_width="embedding_size")),
    ("xmod", rare.xmod, _BERT),
    ("hunyuan_v1_moe", rare.hunyuan_moe, Traits(qk_norm="head")),
    ("jetmoe", rare.jetmoe, _TIED),
    ("moshi", rare.moshi, Traits(decodes=True, more=rare.padding_row)),
    ("doge", rare.doge, Traits(qk_norm="head")),
    ("bitnet", rare.bitnet, Traits()),
    ("gemma3n_text", rare.gemma3n,
     Traits(norms=4, qk_norm="head", tied=True, more=rare.altup)),
    ("hrm_text", rare.hrm, Traits(norms=0, outer_norms=0, gate="element")),
    ("youtu minicpm3", stacked, _TIED),
    ("olmo_hybrid", stacked, Traits(qk_norm="row")),
    ("lfm3", stacked, Traits(norms=4, qk_norm="head", gate="head", tied=True,
                             feed_forward="feed_forward")),
    ("recurrent_gemma", mixed.recurrent_gemma, _TIED),
    ("rwkv", mixed.rwkv4, Traits(norm_bias=True)),
    ("zamba", mixed.zamba1, Traits(norms=1, tied=True)),
    ("bailing_hybrid", mixed.bailing, Traits()),
    ("hy_v4", mixed.hy_v4, Traits()),
    ("qwen4_exp_text", mixed.qwen4,
     Traits(norms=0, outer_norms=0, qk_norm="head", shared_gate=True, gate="element",
            more=mixed.last_mix)),
    ("mllama_text_model", mixed.mllama, Traits(more=mixed.image_rows)),
    ("longcat_flash", mixed.longcat, Traits(norms=4)),
    ("dbrx", mixed.dbrx, Traits()),
    ("musicgen_decoder", stacked,
     _DECODER._replace(biases=None, positions=None, ties=False, more=mixed.codebooks)),
    ("musicgen_melody_decoder", stacked,
     _DECODER._replace(norms=2, crosses=False, biases=None, positions=None, ties=False,
                       more=mixed.codebooks)),
    ("prophetnet", mixed.prophetnet, _DECODER._replace(more=mixed.ngrams)),
    ("cpmant", stacked, Traits(ties=False, more=rare.prompts)),
    ("megatron-bert xlm-roberta-xl", stacked, _BERT),
    ("roberta-prelayernorm", stacked, _BERT._replace(outer_norms=2)),
    ("bert-generation", stacked, _BERT._replace(head="bias")),
    ("electra", stacked, _BERT._replace(embedding_width="embedding_size")),
    ("seed_oss", stacked, Traits(out_bias=False)),
)  # fmt: skip

FAMILIES: dict[str, tuple[Layers, Traits]] = {
    name: (layers, traits) for names, layers, traits in _FAMILIES for name in names.split()
}
"""For each model type, the function that lists its layers' tensors, and its traits."""

UNVERIFIED = frozenset(
    (
        "rwkv7", "mimo", "nemotron-nas", "deci", "mimo_v2", "longcat_flash", "deepseek_v41",
        "deepseek_v41_text",
    )
)  # fmt: skip
"""Model types whose counts were not checked against another implementation."""
