"""Readers for hybrids whose recurrent layers are not Mamba, for RWKV-7 and for Whisper.

The hybrids use gated delta net (Qwen3-Next, Qwen3.5), Kimi delta attention, lightning
attention or short convolutions. Whisper's decoder also caches the encoder's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace

from kvatlas.models.cache_dtypes import cached
from kvatlas.models.config import bad, missing
from kvatlas.models.decoder import Decoder
from kvatlas.models.latent import latent_attention
from kvatlas.models.layer import Layer
from kvatlas.models.layer_patterns import CONVOLVES, block_kinds, hybrid_layers
from kvatlas.specs import (
    CrossAttention,
    GatedDeltaNet,
    KimiDelta,
    LightningAttention,
    Mamba1,
    Rwkv7,
    ShortConv,
)


def delta_net(decoder: Decoder, *, dtype_key: str | None = None) -> Iterator[Layer]:
    """Yield the caches of Qwen3-Next: three layers of gated delta net, then one of attention.

    For Qwen3.5, vLLM reads the dtype of recurrent states from the config key `dtype_key`.
    """
    config = decoder.config
    recurrent = gated_delta_net(decoder, config.text(dtype_key) if dtype_key else None)
    kinds = block_kinds(config.completed({"full_attention_interval": 4}))
    return hybrid_layers(decoder, kinds, recurrent, "linear_attn")


def gated_delta_net(decoder: Decoder, ssm_dtype: str | None = None) -> GatedDeltaNet:
    """Return the spec of a gated delta net; `ssm_dtype` is vLLM's default for its states."""
    config = decoder.config
    return GatedDeltaNet(
        key_heads=config.count("linear_num_key_heads"),
        value_heads=config.count("linear_num_value_heads"),
        key_dim=config.count("linear_key_head_dim"),
        value_dim=config.count("linear_value_head_dim"),
        kernel=config.count("linear_conv_kernel_dim", default=4),
        conv_dtype=decoder.conv_dtype,
        ssm_dtype=decoder.ssm_dtype(config=ssm_dtype),
    )


def olmo_delta_net(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of OLMo-Hybrid; its sizes default to fractions of the hidden size."""
    config = decoder.config
    heads = config.count("linear_num_key_heads", default=config.query_heads())
    key_dim = config.count("linear_key_head_dim", default=int(0.75 * config.hidden() / heads))
    sizes = {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": config.query_heads(),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
        "full_attention_interval": 4,
    }
    config = config.under(sizes)
    recurrent = gated_delta_net(replace(decoder, config=config))
    return hybrid_layers(decoder, block_kinds(config), recurrent, "linear_attn")


def bailing_delta(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Bailing hybrids: KDA, and MLA in every `layer_group_size`-th layer."""
    config, depth = decoder.config, decoder.depth
    if config.has("layer_types"):
        kinds = config.per_layer("layer_types", depth, extra=config.predictors())
    else:
        every = config.count("layer_group_size")
        kinds = ["linear_attention" if (i + 1) % every else "attention" for i in range(depth)]
    recurrent = KimiDelta(
        heads=config.count("linear_num_heads", "num_attention_heads"),
        head_dim=config.count("linear_head_dim", "head_dim"),
        kernel=config.count("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
        conv_dtype=decoder.conv_dtype,
        ssm_dtype=decoder.ssm_dtype(default="fp32"),
    )
    config.settled("short_conv_kernel_size", "head_dim", "layer_group_size")
    latent = partial(latent_attention, decoder)
    return hybrid_layers(decoder, kinds, recurrent, "self_attn", attention=latent)


def gated_linear_recurrence(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of RecurrentGemma: a gated linear recurrence, and sliding attention.

    The recurrence stores one value per channel and the last inputs of a convolution. A Mamba-1
    layer with a state size of 1 stores the same.
    """
    config = decoder.config
    recurrent = Mamba1(
        inner=config.count("lru_width", default=config.hidden()),
        state_size=1,
        kernel=config.count("conv1d_width", default=4),
        conv_dtype=decoder.conv_dtype,
        ssm_dtype=decoder.ssm_dtype(default="fp32"),
    )
    window = config.count("attention_window_size", "sliding_window", default=2048)
    pattern = config.listing("block_types") or ["recurrent", "recurrent", "attention"]
    kinds = [pattern[i % len(pattern)] for i in range(decoder.depth)]
    attention = partial(decoder.attention, "sliding", window=window)
    return hybrid_layers(
        decoder, kinds, recurrent, "temporal_block", attention=attention, recurs=("recurrent",)
    )


def kimi_delta(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Kimi-Linear and Kimi-K3: KDA in the layers that the config lists.

    A checkpoint's config lists these layers, counted from 1, in the section `linear_attn_config`.
    transformers flattens that section into keys with the prefix `linear_` and a
    `layer_types` list.
    """
    config, depth = decoder.config, decoder.depth
    section = config.section("linear_attn_config")
    if section is not None:
        sizes, prefix = section, ""
        config.settled("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        chosen = section.indices("kda_layers", depth, first=1)
        kinds = ["linear_attention" if i in chosen else "attention" for i in range(depth)]
    elif config.has("linear_num_heads"):
        sizes, prefix = config, "linear_"
        kinds = config.per_layer("layer_types", depth)
    else:
        raise missing("linear_attn_config")
    recurrent = KimiDelta(
        heads=sizes.count(f"{prefix}num_heads"),
        head_dim=sizes.count(f"{prefix}head_dim"),
        kernel=sizes.count("short_conv_kernel_size", "linear_conv_kernel_dim", default=4),
        conv_dtype=decoder.conv_dtype,
        ssm_dtype=decoder.ssm_dtype(default="fp32"),
    )
    latent = partial(latent_attention, decoder)
    return hybrid_layers(decoder, kinds, recurrent, "self_attn", attention=latent)


def lightning(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of MiniMax-Text-01: seven layers of lightning attention, one of softmax."""
    config = decoder.config
    recurrent = LightningAttention(
        heads=config.query_heads(), head_dim=config.head_dim(), ssm_dtype=decoder.ssm_dtype()
    )
    if config.has("attn_type_list"):
        marks = config.per_layer("attn_type_list", decoder.depth)
        kinds = ["attention" if mark else "linear_attention" for mark in marks]
    else:
        kinds = block_kinds(config)
    return hybrid_layers(decoder, kinds, recurrent, "self_attn")


def short_conv(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of LFM2: short convolutions, and attention where the config lists it."""
    config = decoder.config
    recurrent = ShortConv(
        width=config.count("conv_dim", default=config.hidden()),
        kernel=config.count("conv_L_cache", default=3),
        conv_dtype=decoder.conv_dtype,
    )
    recurs = (*CONVOLVES, "linear_attention", "mamba")
    return hybrid_layers(decoder, block_kinds(config), recurrent, "short_conv", recurs=recurs)


def rwkv(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of RWKV-7: one matrix per head and two token-shift rows in each layer.

    These caches do not grow with the number of tokens.
    """
    config = decoder.config
    hidden, head_dim = config.hidden(), config.count("head_dim", "head_size", default=64)
    spec = Rwkv7(
        heads=config.quotient(hidden, head_dim, "head_dim"),
        head_dim=head_dim,
        hidden=hidden,
        ssm_dtype=decoder.ssm_dtype(default="fp32"),
        shift_dtype=decoder.states.conv or "fp32",
    )
    return decoder.every_layer(spec, "attn")


def rwkv4(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of RWKV-4: the last input of two token shifts, and three sums per channel.

    A Mamba-1 layer of suitable size has the same content: two rows, and three values per channel.
    """
    config = decoder.config
    width = config.count("attention_hidden_size", default=config.hidden())
    if width != config.hidden():
        raise bad(
            "attention_hidden_size must equal hidden_size", f"{width} and {config.hidden()}",
            "Correct the config; RWKV-4 models with two different sizes cannot be planned",
        )  # fmt: skip
    spec = Mamba1(
        inner=width,
        state_size=3,
        kernel=3,
        conv_dtype=decoder.conv_dtype,
        ssm_dtype=decoder.ssm_dtype(default="fp32"),
    )
    return decoder.every_layer(spec, "attention")


def whisper(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Whisper's decoder: self-attention, and cross-attention to the encoder."""
    config = decoder.config
    heads = config.count("decoder_attention_heads")
    head_dim = config.quotient(config.hidden(), heads, "decoder_attention_heads")
    own = decoder.attention(heads=heads, head_dim=head_dim)
    source = config.count("max_source_positions", default=1500)
    cross = CrossAttention(heads=heads, head_dim=head_dim, dtype=decoder.dtype, source=source)
    cross = cached(cross, decoder.cache)
    for index in range(decoder.depth):
        yield decoder.layer(index, own)
        yield decoder.layer(index, cross, "layers.encoder_attn.attn")
