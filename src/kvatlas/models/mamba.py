"""Readers for Mamba models and for hybrids of Mamba and attention.

The width of a mixer is heads x head size. `expand` x hidden size often differs from this
width, and is used only if the config has no head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvatlas.models.config import Config
from kvatlas.models.decoder import Decoder, Kind
from kvatlas.models.layer import Layer
from kvatlas.models.layer_patterns import block_kinds, hybrid_layers
from kvatlas.specs import AnySpec, Mamba1, Mamba2


def mamba2(decoder: Decoder, *, ssm_dtype: str | None = None) -> Mamba2:
    """Return the spec of a Mamba-2 mixer."""
    config = decoder.config
    heads = config.count("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    return Mamba2(
        heads=heads,
        head_dim=_head_dim(config, heads),
        groups=config.count("mamba_n_groups", "mamba_ngroups", "n_groups", default=1),
        state_size=config.count("ssm_state_size", "mamba_d_state", "state_size"),
        kernel=config.count("conv_kernel", "mamba_d_conv", default=4),
        conv_dtype=decoder.conv_dtype,
        ssm_dtype=ssm_dtype or decoder.ssm_dtype(),
    )


def _head_dim(config: Config, heads: int) -> int:
    names = ["mamba_head_dim", "mamba_d_head", "mamba_headdim"]
    names += ["head_dim"] if config.has("num_heads") else []
    if config.has("num_heads") or config.get(*names) not in (None, "auto"):
        return config.count(*names)
    inner = config.maybe("mamba_d_ssm") or _expanded(config)
    return config.quotient(inner, heads, "mamba_head_dim")


def _expanded(config: Config) -> int:
    return config.count("mamba_expand", "expand", default=2) * config.hidden()


def mamba1(decoder: Decoder) -> Mamba1:
    """Return the spec of a Mamba-1 mixer.

    In a pure Mamba model, the key `intermediate_size` is the width of the mixer. In a hybrid, the
    key is the width of the MLP and is not read.
    """
    config = decoder.config
    inner = None if config.has("mamba_expand") else config.maybe("intermediate_size", "d_inner")
    return Mamba1(
        inner=inner or _expanded(config),
        state_size=config.count("mamba_d_state", "state_size"),
        kernel=config.count("mamba_d_conv", "conv_kernel", default=4),
        conv_dtype=decoder.conv_dtype,
        ssm_dtype=decoder.ssm_dtype(),
    )


def mamba_alone(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of a model with Mamba-1 in every layer."""
    return decoder.every_layer(mamba1(decoder), "mixer")


def mamba2_alone(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of a model with Mamba-2 in every layer."""
    return decoder.every_layer(mamba2(decoder), "mixer")


def nemotron(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Nemotron-H: each layer is Mamba-2, attention, or an MLP without a cache.

    vLLM stores the recurrent states in fp32 unless the config sets another dtype.
    """
    configured = decoder.config.text("mamba_ssm_cache_dtype")
    states = decoder.ssm_dtype(config=configured, default="fp32")
    return _mixed(decoder, mamba2(decoder, ssm_dtype=states))


def mamba2_hybrid(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Bamba and Granite-4: Mamba-2 in most layers, attention in a few."""
    return _mixed(decoder, mamba2(decoder))


def jamba(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Jamba: Mamba-1 in most layers, attention in one of eight."""
    return _mixed(decoder, mamba1(decoder))


def _mixed(decoder: Decoder, mixer: AnySpec) -> Iterator[Layer]:
    kind: Kind = "sliding" if decoder.config.size("sliding_window") else "full"
    return hybrid_layers(
        decoder,
        block_kinds(decoder.config),
        mixer,
        "mixer",
        attention=partial(decoder.attention, kind),
        without_cache=("mlp", "moe"),
    )


def side_by_side(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Falcon-H1, whose layers have both attention and a Mamba-2 mixer.

    vLLM numbers the mixers after all attention layers, and omits `layers` from their names.
    """
    depth, top = decoder.depth, decoder.layers.removesuffix(".layers")
    attention, mixer = decoder.attention(), mamba2(decoder)
    for index in range(depth):
        yield decoder.layer(index, attention)
        yield Layer(name=f"{top}.{depth + index}.mixer", index=index, spec=mixer)


def zamba1(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Zamba: Mamba-1 in every layer, and attention in some layers as well."""
    config, mixer = decoder.config, mamba1(decoder)
    config.settled("n_mamba_heads", "attn_layer_offset", "attn_layer_period")
    words = config.per_layer("layers_block_type", decoder.depth)
    own = config.maybe("attention_head_dim")
    attention = decoder.attention(head_dim=own or 2 * config.hidden() // config.query_heads())
    for index, word in enumerate(words):
        if word == "hybrid":
            yield decoder.layer(index, attention)
        yield decoder.layer(index, mixer, "mamba")


def zamba(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Zamba-2: Mamba-2 in every layer, and attention in some layers.

    The layers that use the same attention block share its weights, but each has a separate
    cache. vLLM registers all attention caches first, block by block.
    """
    config, depth = decoder.config, decoder.depth
    top = decoder.layers.removesuffix(".layers")
    if config.has("hybrid_layer_ids"):
        places = sorted(config.indices("hybrid_layer_ids", depth))
    else:
        words = config.per_layer("layers_block_type", depth)
        places = [index for index, word in enumerate(words) if word == "hybrid"]
    blocks = config.count("num_mem_blocks", default=1)
    # Attention reads the hidden row concatenated with the embedding, hence the factor of 2.
    own = config.maybe("attention_head_dim")
    config.settled("kv_channels", "num_query_groups")
    head_dim = own or 2 * config.hidden() // config.query_heads()
    attention = decoder.attention(head_dim=head_dim)
    for block in range(min(blocks, len(places))):
        first = block * (len(places) + blocks - 1) // blocks
        for turn, index in enumerate(places[block::blocks]):
            yield Layer(name=f"{top}.attn.{first + turn}", index=index, spec=attention)
    mixer = mamba2(decoder)
    for index in range(depth):
        yield Layer(name=f"{len(places) + index}.mixer", index=index, spec=mixer)
