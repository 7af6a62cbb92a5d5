"""Readers for latent attention: MLA, sparse MLA, and DeepSeek-V4's compressed caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from kvatlas.models.cache_dtypes import cached
from kvatlas.models.config import bad
from kvatlas.models.decoder import Decoder
from kvatlas.models.dense import dense
from kvatlas.models.layer import Layer
from kvatlas.specs import AnySpec, Indexer, LatentAttention, compressed_latent

V4_RATIOS = (0, 4, 128)


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
    spec = LatentAttention(
        latent=config.count("kv_lora_rank"),
        rope=config.count("qk_rope_head_dim"),
        dtype=decoder.dtype,
    )
    return cached(spec, decoder.cache, sparse=sparse)


def sparse_latent(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of DeepSeek-V3.2 and GLM-5: in each layer, indexer keys, then latent rows.

    Since GLM-5.2, only some layers have an indexer. The others reuse the selection of the
    last layer that has one, and cache no keys.
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
    config, depth = decoder.config, decoder.depth
    rows = config.per_layer("compress_ratios", depth, extra=max(1, config.predictors()))
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
                rope=config.count("qk_rope_head_dim"),
                index_dim=config.count("index_head_dim"),
            )
        for role, name in names.items():
            if role in caches[ratio]:
                yield decoder.layer(index, cast(AnySpec, caches[ratio][role]), name)
