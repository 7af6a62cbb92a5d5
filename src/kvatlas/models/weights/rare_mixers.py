"""Layers of rare families whose mixers no other family has: recurrent ones and cross-attention."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvatlas.models.config import Config
from kvatlas.models.weights import mixers
from kvatlas.models.weights.decoders import Text, stacked
from kvatlas.models.weights.feed_forward import experts, mlp
from kvatlas.models.weights.tensor import Tensor, linear, norm


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


def xlstm(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each xLSTM layer: an mLSTM and a gated MLP."""
    config, hidden, heads = text.config, text.hidden, text.config.count("num_heads")
    queries, values = (
        int(hidden * _factor(config, name, default))
        for name, default in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0))
    )
    unit = config.count("ffn_round_up_to_multiple_of", default=64)
    width = math.ceil(hidden * _factor(config, "ffn_proj_factor", 2.667) / unit) * unit
    bias = config.flag("use_bias")
    mixed = [
        *linear("recurrent", "q, k", 2 * queries, hidden, parts=heads, bias=bias),
        *linear("recurrent", "v, ogate_preact", 2 * values, hidden, parts=heads, bias=bias),
        *linear("recurrent", "igate_preact, fgate_preact", 2 * heads, hidden, bias=True),
        norm("multihead_norm", values, parts=heads),
        *linear("recurrent", "out_proj", hidden, values, parts=heads, bias=bias),
    ]
    for _ in range(text.depth):
        yield [*text.norms(), *mixed, *mlp(config, width=width, bias=bias)]


def _factor(config: Config, name: str, default: float) -> float:
    value = config.get(name)
    return float(value) if isinstance(value, int | float) else default


def mllama(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Llama-3.2-Vision layer; some attend to the image instead."""
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
    """Yield the tensors of each LongCat layer: two of latent attention and MLPs, and experts.

    The router also selects experts that have no weights.
    """
    config = text.config
    routed = config.under({"moe_intermediate_size": config.count("expert_ffn_hidden_size")})
    zero = linear("router", "router.zero", config.natural("zero_expert_num"), text.hidden)
    pair = [*mixers.latent(config), *mlp(config, width=config.count("ffn_hidden_size"))]
    for _ in range(text.depth):
        yield [*text.norms(), *pair, *pair, *experts(routed), *zero]


def dbrx(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each DBRX layer, whose experts a section of the config describes."""
    section = text.config.section("ffn_config") or Config({})
    sizes = {
        "num_experts": section.count("moe_num_experts", default=4),
        "moe_intermediate_size": section.count("ffn_hidden_size", default=3584),
    }
    return stacked(Text(text.config.under(sizes), text.traits, text.caches))


def codebooks(text: Text) -> list[Tensor]:
    """Return MusicGen's further embeddings and heads: one of each for every codebook."""
    rows, number = text.config.count("vocab_size"), text.config.count("num_codebooks", default=4)
    return [
        Tensor("embedding", "embed_tokens", (number - 1) * rows + number, text.hidden),
        Tensor("lm_head", "lm_heads", (number - 1) * rows, text.hidden, linear=True),
    ]


def prophetnet(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each ProphetNet layer, which projects rows to relative positions."""
    config = text.config
    rows = config.count("num_buckets", default=32) * config.count("num_decoder_attention_heads")
    relative = linear("attention", "relative_pos_embeddings", rows, text.hidden, bias=True)
    for tensors in stacked(text):
        yield [*tensors, *relative]


def ngrams(text: Text) -> list[Tensor]:
    """Return ProphetNet's embeddings of the streams that predict further tokens."""
    rows = text.config.count("ngram", default=2)
    return [Tensor("embedding", "ngram_embeddings", rows, text.hidden)]
