"""Hybrids whose recurrent layers are not Mamba, and models that only recur or listen.

Gated delta net (Qwen3-Next, Qwen3.5), Kimi delta attention, lightning attention,
short convolutions, RWKV-7; and Whisper, whose decoder keeps the encoder's rows too.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.models.cache_dtypes import cached
from kvatlas.models.config import bad, missing
from kvatlas.models.decoder import Decoder
from kvatlas.models.latent import latent_attention
from kvatlas.models.layer_patterns import block_kinds
from kvatlas.models.model import Layer
from kvatlas.specs import (
    AnySpec,
    CrossAttention,
    GatedDeltaNet,
    KimiDelta,
    LightningAttention,
    Rwkv7,
    ShortConv,
)


def delta_net(decoder: Decoder) -> Iterator[Layer]:
    """Qwen3-Next: three layers of gated delta net, then one of attention."""
    yield from _delta_net(decoder, None)


def delta_net_by_config(decoder: Decoder) -> Iterator[Layer]:
    """Qwen3.5: the same, and vLLM keeps states in what the config says."""
    yield from _delta_net(decoder, decoder.config.text("mamba_ssm_dtype"))


def _delta_net(decoder: Decoder, asked: str | None) -> Iterator[Layer]:
    config = decoder.config
    recurrent = GatedDeltaNet(
        key_heads=config.count("linear_num_key_heads"),
        value_heads=config.count("linear_num_value_heads"),
        key_dim=config.count("linear_key_head_dim"),
        value_dim=config.count("linear_value_head_dim"),
        kernel=config.count("linear_conv_kernel_dim", default=4),
        conv_dtype=decoder.conv_dtype,
        ssm_dtype=decoder.ssm_dtype(asked=asked),
    )
    yield from _alternate(decoder, "linear_attn", recurrent)


def _alternate(decoder: Decoder, tail: str, recurrent: AnySpec) -> Iterator[Layer]:
    """`recurrent`, called `tail`, in the layers that are not attention."""
    attention = decoder.attention()
    for index, kind in enumerate(block_kinds(decoder.config)):
        if kind in ("full_attention", "attention"):
            yield decoder.layer(index, decoder.attention_name, attention)
        elif kind in ("linear_attention", "mamba", "conv", "short_conv"):
            yield decoder.layer(index, tail, recurrent)
        else:
            raise bad("A hybrid's layer is attention or recurrent", kind, "Check layer_types")


def kimi_delta(decoder: Decoder) -> Iterator[Layer]:
    """Kimi-Linear and Kimi-K3: KDA in the layers that the config lists, counted from 1.

    A checkpoint has a section for it. transformers spreads the section out when it reads
    one, and then says of each layer what it is.
    """
    config = decoder.config
    section = config.section("linear_attn_config")
    if section is None and not config.has("linear_num_heads"):
        raise missing("linear_attn_config")
    sizes = section or config
    recurrent = KimiDelta(
        heads=sizes.count("num_heads" if section else "linear_num_heads"),
        head_dim=sizes.count("head_dim" if section else "linear_head_dim"),
        kernel=sizes.count(
            "short_conv_kernel_size" if section else "linear_conv_kernel_dim", default=4
        ),
        conv_dtype=decoder.conv_dtype,
        ssm_dtype=decoder.ssm_dtype(vllm="fp32"),
    )
    if section is not None:
        chosen = section.indices("kda_layers", decoder.depth, first=1)
    else:
        words = config.per_layer("layer_types", decoder.depth)
        chosen = {index for index, word in enumerate(words) if word == "linear_attention"}
    attention = latent_attention(decoder)
    for index in range(decoder.depth):
        if index in chosen:
            yield decoder.layer(index, "self_attn", recurrent)
        else:
            yield decoder.layer(index, decoder.attention_name, attention)


def lightning(decoder: Decoder) -> Iterator[Layer]:
    """MiniMax-Text-01: seven layers of lightning attention, then one of softmax."""
    config = decoder.config
    recurrent = LightningAttention(
        heads=config.query_heads(), head_dim=config.head_dim(), ssm_dtype=decoder.ssm_dtype()
    )
    if config.has("attn_type_list"):
        softmax = [bool(mark) for mark in config.per_layer("attn_type_list", decoder.depth)]
    else:
        softmax = [kind == "full_attention" for kind in block_kinds(config)]
    attention = decoder.attention()
    for index, full in enumerate(softmax):
        if full:
            yield decoder.layer(index, decoder.attention_name, attention)
        else:
            yield decoder.layer(index, "self_attn", recurrent)


def short_conv(decoder: Decoder) -> Iterator[Layer]:
    """LFM2: short convolutions, and attention in the layers that the config lists."""
    config = decoder.config
    recurrent = ShortConv(
        width=config.count("conv_dim", default=config.hidden()),
        kernel=config.count("conv_L_cache", default=3),
        conv_dtype=decoder.conv_dtype,
    )
    yield from _alternate(decoder, "short_conv", recurrent)


def rwkv(decoder: Decoder) -> Iterator[Layer]:
    """RWKV-7: a matrix for each head, and two shifts; nothing grows."""
    config = decoder.config
    hidden, head_dim = config.hidden(), config.count("head_dim", "head_size", default=64)
    if hidden % head_dim:
        raise bad(
            "RWKV's heads divide the hidden size", f"{head_dim} of {hidden}", "Check head_dim"
        )
    spec = Rwkv7(
        heads=hidden // head_dim,
        head_dim=head_dim,
        hidden=hidden,
        ssm_dtype=decoder.ssm_dtype(vllm="fp32"),
        shift_dtype=decoder.conv or "fp32",
    )
    for index in range(decoder.depth):
        yield decoder.layer(index, "attn", spec)


def whisper(decoder: Decoder) -> Iterator[Layer]:
    """Whisper's decoder: its own tokens, and the encoder's rows, written once."""
    config = decoder.config
    heads = config.count("decoder_attention_heads")
    if config.hidden() % heads:
        raise bad("Whisper's heads divide d_model", f"{heads} of {config.hidden()}", "Check both")
    head_dim = config.hidden() // heads
    own = decoder.attention(heads=heads, head_dim=head_dim)
    source = config.count("max_source_positions", default=1500)
    cross = CrossAttention(heads=heads, head_dim=head_dim, dtype=decoder.dtype, source=source)
    cross = cached(cross, decoder.cache)
    for index in range(decoder.depth):
        yield decoder.layer(index, decoder.attention_name, own)
        yield decoder.layer(index, "layers.encoder_attn.attn", cross)
