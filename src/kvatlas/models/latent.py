"""Readers for latent attention: MLA, sparse MLA, and DeepSeek-V4's compressed caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from msgspec.structs import replace

from kvatlas.models.cache_dtypes import cached
from kvatlas.models.config import Config, bad, missing
from kvatlas.models.decoder import Decoder
from kvatlas.models.dense import dense
from kvatlas.models.layer import Layer
from kvatlas.specs import (
    AnySpec,
    Indexer,
    LatentAttention,
    SlidingLatentAttention,
    compressed_latent,
)

V4_RATIOS = (0, 4, 128)
_V4_KINDS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
"""transformers' layer types of DeepSeek-V4, and the compression ratio of each."""

# MLA stores one latent row for all heads, so the sizes of heads do not change its cache.
_EXPANDED = (
    "head_dim", "num_key_value_heads", "qk_head_dim", "qk_nope_head_dim", "v_head_dim",
    "layer_types", "index_topk",
)  # fmt: skip


def latent(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of an MLA model; K and V per head if the config has no `kv_lora_rank`."""
    if not decoder.config.has("kv_lora_rank"):
        return dense(decoder)
    return decoder.every_layer(latent_attention(decoder))


def latent_attention(decoder: Decoder, *, sparse: bool = False) -> LatentAttention:
    """Return the spec of an MLA layer; `sparse` is true if an indexer selects its states.

    The rotary elements are cached even if the model does not rotate them.
    """
    config = decoder.config
    config.settled(*_EXPANDED)
    spec = LatentAttention(
        latent=config.count("kv_lora_rank"),
        rope=0 if config.get("qk_rope_head_dim") == 0 else config.count("qk_rope_head_dim"),
        dtype=decoder.dtype,
    )
    return cached(spec, decoder.cache, sparse=sparse)


def doubled_latent(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of LongCat-Flash, whose layers have two MLA attentions each.

    In checkpoints, `num_layers` is the number of layers and `num_hidden_layers` the number of
    attentions.
    """
    config, spec = decoder.config, latent_attention(decoder)
    depth = config.maybe("num_layers") or config.depth() // 2
    for index in range(depth):
        for part in (0, 1):
            yield decoder.layer(index, spec, f"self_attn.{part}.attn")


def mixed_latent(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Dots3: sparse MLA in some layers, a sliding window of latents in others.

    The latent rank of sliding layers is in `swa_kv_lora_rank` if a checkpoint has its original
    config, and in `per_layer_config` if transformers has saved the config.
    """
    config = decoder.config
    full = latent_attention(decoder, sparse=True)
    saved = config.has("per_layer_config")
    rank = config.count("swa_kv_lora_rank", default=full.latent if saved else _DOTS3_RANK)
    width = config.count("swa_head_dim", default=_DOTS3_HEAD)
    rest = config.count("swa_qk_nope_head_dim", default=_DOTS3_HEAD - full.rope)
    rope = config.count("swa_qk_rope_head_dim", default=full.rope if saved else width - rest)
    window = config.count("sliding_window", "sliding_window_size", default=512)
    sliding = SlidingLatentAttention(latent=rank, rope=rope, dtype=full.dtype, window=window)
    keys = Indexer(head_dim=config.count("index_head_dim"))
    for index, kind in enumerate(_mixed_kinds(decoder)):
        if kind == "sliding_attention":
            yield decoder.layer(index, cached(sliding, decoder.cache))
            continue
        if kind == "indexed_attention":
            yield decoder.layer(index, keys, "self_attn.indexer.k_cache")
        yield decoder.layer(index, full)


_DOTS3_RANK, _DOTS3_HEAD = 1024, 256
"""The latent rank and the head size of Dots3's sliding layers, by default."""


def _mixed_kinds(decoder: Decoder) -> list[str]:
    config, depth = decoder.config, decoder.depth
    full = "indexed_attention" if config.flag("use_dsa", default=True) else "full_attention"
    if config.has("layer_types"):
        words = config.per_layer("layer_types", depth, extra=config.predictors())
    elif not config.flag("use_sliding_window", default=True):
        words = [full] * depth
    else:
        words = [full if i < 2 or i % 4 == 1 else "sliding_attention" for i in range(depth)]
    known = ("sliding_attention", "indexed_attention", "full_attention")
    for index, word in enumerate(words):
        if word not in known:
            hint = f"Use one of {', '.join(known)}"
            raise bad(f"Layer {index} has an unknown type", repr(word), hint)
    return words


def hy_v4(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of HY-V4, where the layers 0, 1, 5, 9, ... have an indexer by default."""
    chooses = ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(decoder.depth)]
    config = decoder.config.completed({"indexer_types": chooses})
    return sparse_latent(replace(decoder, config=config))


def sparse_latent(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of DeepSeek-V3.2 and GLM-5: in each layer, indexer keys, then latent rows.

    Since GLM-5.2, only some layers have an indexer. The others reuse the selection of the
    nearest earlier layer that has an indexer, and cache no keys.
    """
    spec = latent_attention(decoder, sparse=True)
    keys = Indexer(head_dim=decoder.config.count("index_head_dim"))
    for index, chooses in enumerate(_layers_that_choose(decoder)):
        if chooses:
            yield decoder.layer(index, keys, "self_attn.indexer.k_cache")
        yield decoder.layer(index, spec)


def _layers_that_choose(decoder: Decoder) -> list[bool]:
    config, depth = decoder.config, decoder.depth
    pattern = config.text("index_topk_pattern")
    if pattern is not None:
        return [pattern[i : i + 1] != "S" for i in range(depth)]
    if config.has("index_topk_freq"):
        every = config.count("index_topk_freq")
        offset = config.natural("index_skip_topk_offset", default=2)
        return [max(i - offset + 1, 0) % every == 0 for i in range(depth)]
    if config.has("indexer_types"):
        words = config.per_layer("indexer_types", depth, extra=config.predictors())
        return [word == "full" for word in words]
    return [True] * depth


def compressed(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of DeepSeek-V4: window, compressed states, indexer keys, compressor sums."""
    config = decoder.config
    config.settled("num_key_value_heads", "index_topk", "layer_types")
    rows = _compress_ratios(decoder)
    cache = "fp8_ds_mla" if decoder.cache in ("auto", "fp8", "fp8_e4m3") else decoder.cache
    names = {
        "indexer": "attn.indexer.k_cache",
        "indexer_compressor": "attn.indexer.compressor.state_cache",
        "swa": "attn.swa_cache",
        "attn": "attn",
        "compressor": "attn.compressor.state_cache",
    }
    caches = {}
    for index, ratio in enumerate(rows):
        if type(ratio) is not int or ratio not in V4_RATIOS:
            raise bad(
                "Every entry of compress_ratios must be 0, 4 or 128",
                f"{ratio!r} for layer {index}",
                "Correct the entry in the config",
            )
        if ratio not in caches:
            caches[ratio] = compressed_latent(
                ratio,
                cache=cache,
                window=config.count("sliding_window"),
                head_dim=config.count("head_dim"),
                rope=config.maybe("qk_rope_head_dim") or _rotary_size(config),
                index_dim=config.count("index_head_dim"),
            )
        for role, name in names.items():
            if role in caches[ratio]:
                yield decoder.layer(index, cast(AnySpec, caches[ratio][role]), name)


def _compress_ratios(decoder: Decoder) -> list[Any]:
    """Return the compression ratio of each layer.

    Configs contain either a list of ratios, or layer types and a ratio for each type.
    """
    config, depth = decoder.config, decoder.depth
    if config.has("compress_ratios") or not config.has("layer_types"):
        return config.per_layer("compress_ratios", depth, extra=max(1, config.predictors()))
    rates = {**_V4_KINDS, **(config.get("compress_rates") or {})}
    words = config.per_layer("layer_types", depth, extra=max(1, config.predictors()))
    for index, word in enumerate(words):
        if word not in rates:
            hint = f"Use one of {', '.join(_V4_KINDS)}"
            raise bad(f"Layer {index} has an unknown type", repr(word), hint)
    return [rates[word] for word in words]


def _rotary_size(config: Config) -> int:
    factor = config.get("partial_rotary_factor")
    if not isinstance(factor, float) or not 0 < factor <= 1:
        raise missing("qk_rope_head_dim")
    return int(config.count("head_dim") * factor)
