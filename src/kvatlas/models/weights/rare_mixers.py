"""Layers of rare families that combine mixers in ways that no other family does."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.models.config import Config
from kvatlas.models.weights import mixers
from kvatlas.models.weights.decoders import Text, attention_options, feed_forward, stacked
from kvatlas.models.weights.feed_forward import experts, mlp, sparse_layers
from kvatlas.models.weights.tensor import Tensor, linear, norm
from kvatlas.specs import Attention, Indexer, KimiDelta, Mamba1


def recurrent_gemma(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each RecurrentGemma layer: an RG-LRU or attention, then an MLP."""
    config, hidden = text.config, text.hidden
    kinds = config.listing("block_types") or ["recurrent", "recurrent", "attention"]
    width, heads = config.count("lru_width", default=hidden), config.query_heads()
    taps = config.count("conv1d_width", default=4)
    lru = [
        *linear("recurrent", "linear_y", width, hidden, parts=heads, bias=True),
        *linear("recurrent", "linear_x", width, hidden, parts=heads, bias=True),
        *linear("recurrent", "linear_out", hidden, width, parts=heads, bias=True, whole_bias=True),
        Tensor("recurrent", "conv_1d", width, taps + 1, parts=heads),
        # The input gate and the recurrent gate are block-diagonal, with a bias each.
        Tensor("recurrent", "rg_lru", width, 2 * (width // heads + 1) + 1, parts=heads),
    ]
    attention = mixers.attention(
        config, qkv_bias=config.flag("attention_bias"), out_bias=True, name="temporal_block"
    )
    wide = mlp(config, width=config.count("intermediate_size") // 2, bias=True)
    for index in range(text.depth):
        mixed = attention if kinds[index % len(kinds)] == "attention" else lru
        yield [*text.norms(), *mixed, *wide]


def gpt_neo(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each GPT-Neo layer, whose config counts heads in `num_heads`."""
    number = text.config.count("num_heads", "num_attention_heads")
    return stacked(Text(text.config.under({"n_head": number}), text.traits, text.caches))


def zamba1(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Zamba layer: Mamba and, in some layers, a projection.

    The projection connects a layer to the shared attention block. The first such layer also
    includes the weights of the block.
    """
    config, hidden, shared = text.config, text.hidden, False
    rank = config.get("mamba_dt_rank")
    rank = rank if isinstance(rank, int) else -(-hidden // 16)
    for caches in text.caches:
        tensors = text.norms()
        for spec in caches:
            if isinstance(spec, Mamba1):
                tensors += mixers.mamba1(hidden, spec, name="mamba", rank=rank, normed=False)
            if not isinstance(spec, Attention):
                continue
            tensors += linear("attention", "linear", hidden, hidden)
            if not shared:
                options = attention_options(text, spec)
                tensors += mixers.attention(config, width=2 * hidden, **options)
                tensors += [norm("layernorm", 3 * hidden), *mlp(config)]
                shared = True
        yield tensors


def bailing(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Bailing hybrid layer; its KDA has full-rank gates."""
    config, hidden, heads = text.config, text.hidden, text.config.query_heads()
    sparse = sparse_layers(config, text.depth)
    for index, caches in enumerate(text.caches):
        tensors = [*text.norms(), *feed_forward(text, sparse=sparse[index])]
        for spec in caches:
            if isinstance(spec, KimiDelta):
                made = mixers.kimi_delta(hidden, spec, full_gate=True)
                width = spec.heads * spec.head_dim
                low = ("f_a_proj", "f_b_proj")
                tensors += [tensor for tensor in made if not tensor.name.endswith(low)]
                tensors += linear("recurrent", "self_attn.f_proj", width, hidden, parts=spec.heads)
            else:
                tensors += mixers.latent(config)
                tensors += linear("attention", "self_attn.g_proj", heads, hidden, parts=heads)
        yield tensors


def hy_v4(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each HY-V4 layer: gated MLA with sinks, and hyper-connections."""
    config, ways = text.config, text.config.count("hc_mult", default=4)
    heads, sparse = config.query_heads(), sparse_layers(config, text.depth)
    hyper = [
        Tensor("norm", "hc_fn", 2 * ways, ways * text.hidden),
        Tensor("norm", "hc_base, hc_scale", 2 * ways + 2),
    ]
    gated = [*mixers.latent(config, gate=True), Tensor("attention", "sinks", heads, parts=heads)]
    for index, caches in enumerate(text.caches):
        tensors = [*text.norms(), *hyper, *hyper, *gated]
        for spec in caches:
            tensors += mixers.indexer(config) if isinstance(spec, Indexer) else []
        yield [*tensors, *feed_forward(text, sparse=sparse[index])]


def qwen4(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Qwen4 layer; hyper-connections replace its norms."""
    for tensors in stacked(text):
        yield [*tensors, *_low_rank_mix(text), *_low_rank_mix(text), *_injection(text)]


def last_mix(text: Text) -> list[Tensor]:
    """Return the weights that mix Qwen4's residual streams after the layers."""
    return _low_rank_mix(text)


def _low_rank_mix(text: Text) -> list[Tensor]:
    wide = text.config.count("hc_count", default=4) * text.hidden
    rank = text.config.count("hc_lowrank", default=320)
    mix = Tensor("norm", "input_mix_weight_down, input_mix_weight_up", 2 * rank, wide)
    return [norm("hc_norm", wide), mix]


def _injection(text: Text) -> list[Tensor]:
    ways = text.config.count("hc_count", default=4)
    return [Tensor("norm", "block_inject_weight", 2 * ways, ways * text.hidden)]


def rwkv4(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each RWKV-4 layer: time mixing, then channel mixing."""
    config, hidden = text.config, text.hidden
    inner = config.count("attention_hidden_size", default=hidden)
    width = config.count("intermediate_size", default=4 * hidden)
    tensors = [
        Tensor("recurrent", "time_decay, time_first", inner, 2),
        Tensor("recurrent", "time_mix", hidden, 5),
        *linear("recurrent", "attention.key, value, receptance", 3 * inner, hidden, parts=inner),
        *linear("recurrent", "attention.output", hidden, inner, parts=inner),
        *linear("mlp", "feed_forward.key", width, hidden, parts=width),
        *linear("mlp", "feed_forward.receptance", hidden, hidden),
        *linear("mlp", "feed_forward.value", hidden, width, parts=width),
    ]
    for index in range(text.depth):
        # The first layer also normalises the embedding.
        yield [*text.norms(), *tensors, *([norm("pre_ln", hidden, bias=True)] if not index else [])]


def mllama(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Llama-3.2-Vision layer; some layers attend only to the image."""
    config = text.config
    chosen = config.indices("cross_attention_layers", text.depth)
    own = mixers.attention(config)
    cross = [*mixers.attention(config, name="cross_attn", qk_norm="head"), norm("gates", 2)]
    for index in range(text.depth):
        yield [*text.norms(), *(cross if index in chosen else own), *mlp(config)]


def image_rows(text: Text) -> list[Tensor]:
    """Return Llama-3.2-Vision's embeddings of eight special tokens."""
    return [Tensor("embedding", "embed_tokens, special", 8, text.hidden)]


def longcat(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each LongCat layer: two latent attentions, two MLPs, and experts.

    The router also selects experts that have no weights.
    """
    config = text.config
    routed = config.under({"moe_intermediate_size": config.count("expert_ffn_hidden_size")})
    zero = linear("router", "router.zero", config.natural("zero_expert_num"), text.hidden)
    pair = [*mixers.latent(config), *mlp(config, width=config.count("ffn_hidden_size"))]
    for _ in range(text.depth):
        yield [*text.norms(), *pair, *pair, *experts(routed), *zero]


def dbrx(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each DBRX layer; the config has a section that describes experts."""
    section = text.config.section("ffn_config") or Config({})
    sizes = {
        "num_experts": section.count("moe_num_experts", default=4),
        "moe_intermediate_size": section.count("ffn_hidden_size", default=3584),
    }
    return stacked(Text(text.config.under(sizes), text.traits, text.caches))


def codebooks(text: Text) -> list[Tensor]:
    """Return MusicGen's embeddings and output heads of all codebooks after the first."""
    rows, number = text.config.count("vocab_size"), text.config.count("num_codebooks", default=4)
    return [
        Tensor("embedding", "embed_tokens", (number - 1) * rows + number, text.hidden),
        Tensor("lm_head", "lm_heads", (number - 1) * rows, text.hidden, linear=True),
    ]


def prophetnet(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each ProphetNet layer, with a projection for relative positions."""
    config = text.config
    rows = config.count("num_buckets", default=32) * config.count("num_decoder_attention_heads")
    relative = linear("attention", "relative_pos_embeddings", rows, text.hidden, bias=True)
    for tensors in stacked(text):
        yield [*tensors, *relative]


def ngrams(text: Text) -> list[Tensor]:
    """Return the embeddings of ProphetNet's streams, each of which predicts a later token."""
    rows = text.config.count("ngram", default=2)
    return [Tensor("embedding", "ngram_embeddings", rows, text.hidden)]
