"""Readers for models that compress groups of tokens and keep an incomplete group in a ring.

vLLM 0.33 stores the raw rows of the group that is still being compressed in one block per request.
The ring has room for one group, and for more tokens if the engine decodes several at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from kvatlas.models.config import Config, bad
from kvatlas.models.decoder import Decoder
from kvatlas.models.hybrids import gated_delta_net
from kvatlas.models.latent import latent_attention
from kvatlas.models.layer import Layer
from kvatlas.models.layer_patterns import attention_kinds, block_kinds, hybrid_layers
from kvatlas.specs import Indexer, KimiDelta, LatentAttention, Ring, SlidingLatentAttention

_INDEXED = ("indexed_attention", "qwen_sparse_attention")
"""transformers' layer types of attention with an indexer; the second until release 5.17."""

_ROTARY_AXES = 3
"""Coordinates of a token in models of images and video: time, height and width."""


def qwen4(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Qwen4-Exp: gated delta net, and attention with an indexer.

    The indexer stores one row for `indexer_compress_ratio` tokens.
    """
    config = decoder.config
    if config.get("ple_layer_ids"):
        raise bad(
            "Per-layer embeddings with a convolution have caches that cannot be planned",
            f"ple_layer_ids={config.get('ple_layer_ids')!r}",
            "Plan the config without ple_layer_ids, and add the bytes of these caches yourself",
        )
    config.settled("ple_conv_kernel_size", "heads_per_ngram", "number_of_conv_states")
    config.settled("indexer_n_heads", "indexer_kv_heads", "indexer_budget")
    attention, recurrent = decoder.attention(), gated_delta_net(decoder)
    kinds = _without_index(config.completed({"full_attention_interval": 4}))
    for layer in hybrid_layers(decoder, kinds, recurrent, "linear_attn"):
        if layer.spec == attention and config.has("indexer_head_dim"):
            size, ratio = config.count("indexer_head_dim"), config.count("indexer_compress_ratio")
            axes = _ROTARY_AXES if _has_image_positions(decoder) else 0
            ring = Ring(group=ratio, rows=ratio, width=size, positions=axes)
            keys = Indexer(head_dim=size, cache="bf16", compress=ratio)
            yield decoder.layer(layer.index, ring, "self_attn.indexer.raw_key_cache")
            yield decoder.layer(layer.index, keys, "self_attn.indexer.compressed_key_cache")
        yield layer


def _has_image_positions(decoder: Decoder) -> bool:
    """Return whether vLLM stores each token's image coordinates next to its row.

    vLLM stores coordinates for multimodal models whose rotary embedding has a section for each
    axis.
    """
    wrapped = not decoder.layers.startswith("model.")
    names = ("rope_parameters", "rope_scaling")
    return wrapped and any("mrope_section" in (decoder.config.get(n) or {}) for n in names)


def _without_index(config: Config) -> list[str]:
    config.settled("layer_types")
    return ["full_attention" if kind in _INDEXED else kind for kind in block_kinds(config)]


def glm5_next(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of GLM-5.3: KDA, and in every fourth layer sparse MLA with an indexer.

    The indexer stores one row for `index_kpool` tokens. The ring stores a key and a score for each
    token.
    """
    config = decoder.config
    config.settled("head_dim", "index_kpool_always_select_tail", "indexer_types")
    sizes, prefix = config, "linear_"
    section = config.section("linear_attn_config")
    if section is not None:
        section.settled("kda_layers", "full_attn_layers")
        sizes, prefix = section, ""
    recurrent = KimiDelta(
        heads=sizes.count(f"{prefix}num_heads"),
        head_dim=sizes.count(f"{prefix}head_dim"),
        kernel=sizes.count("short_conv_kernel_size", "linear_conv_kernel_dim", default=4),
        conv_dtype=decoder.conv_dtype,
        ssm_dtype=decoder.ssm_dtype(default="fp32"),
    )
    pool, size = config.count("index_kpool", default=16), config.count("index_head_dim")
    keys = Indexer(head_dim=size, compress=pool)
    ring = Ring(group=pool, rows=pool, width=size, parts=2)
    latent = partial(latent_attention, decoder, sparse=True)
    attention, kinds = latent(), _without_index(config.completed({"full_attention_interval": 4}))
    for layer in hybrid_layers(decoder, kinds, recurrent, "self_attn", attention=latent):
        if layer.spec == attention:
            yield decoder.layer(layer.index, keys, "self_attn.indexer.k_cache")
            yield decoder.layer(layer.index, ring, "self_attn.indexer.tail_cache")
        yield layer


_V41_RING = 8
"""Rows of DeepSeek-V4.1's ring, if the engine decodes at most six speculative tokens."""
_V4_PAGE = 576
"""Pages of DeepSeek-V4's records are multiples of this many bytes."""


def shared_compression(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of DeepSeek-V4.1: a window in every layer, compressed rows in a few.

    The layers in `kv_source_layer_ids` store one row for one or two tokens; the layers that follow
    read these rows. If a layer stores one row for two tokens, a ring holds the token whose row is
    incomplete. The rows have vLLM's format on Hopper; for other chips, planning replaces the
    format.
    """
    config, depth = decoder.config, decoder.depth
    config.settled("num_key_value_heads", "engram_head_dim", "engram_n_heads", "index_topk")
    rope = config.count("qk_rope_head_dim")
    cache = "fp8_ds_mla" if decoder.cache in ("auto", "fp8", "fp8_e4m3") else decoder.cache
    rows: dict[str, Any] = {"latent": config.head_dim() - rope, "rope": rope, "version": "v4"}
    rows |= {"cache": cache, "align": _V4_PAGE if cache == "fp8_ds_mla" else 512}
    window = SlidingLatentAttention(**rows, window=config.count("sliding_window"))
    ratios = config.per_layer("compress_ratios", depth, extra=config.predictors())
    sources = config.indices("kv_source_layer_ids", depth)
    indexed = config.indices("index_source_layer_ids", depth)
    for index, ratio in enumerate(ratios):
        if type(ratio) is not int or ratio not in (0, 1, 2):
            hint = "Correct the entry in the config"
            problem = "Every entry of compress_ratios must be 0, 1 or 2"
            raise bad(problem, f"{ratio!r} for layer {index}", hint)
        if ratio and not any(source <= index for source in sources):
            problem = "A layer that reads compressed rows, or an earlier layer, must store them"
            got = f"layer {index} with kv_source_layer_ids={sorted(sources)}"
            raise bad(problem, got, f"Add {index} or a smaller number to kv_source_layer_ids")
        if index in sources and ratio:
            yield decoder.layer(index, LatentAttention(**rows, compress=ratio), "attn")
            if index in indexed:
                size = config.count("index_head_dim")
                keys = Indexer(head_dim=size, compress=ratio, align=rows["align"])
                yield decoder.layer(index, keys, "attn.indexer.k_cache")
        yield decoder.layer(index, window, "attn.swa_cache")
        if index in sources and ratio > 1:
            width = 2 * config.head_dim()  # a row and the scores that weigh it
            ring = Ring(group=ratio, rows=_V41_RING, width=width, dtype="fp32")
            yield decoder.layer(index, ring, "attn.compressor.state_cache")


def step5(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Step5: sliding windows, and full attention with an indexer.

    The indexer stores one row for eight tokens. The indexer's ring is enlarged to the size of an
    attention page.
    """
    config = decoder.config
    heads = config.count("num_attention_groups", default=8)
    full = decoder.attention(heads=heads)
    config.settled("attention_other_setting", "layer_types_with_mtp")
    section = config.section("sparse_config")
    indexed = section is not None and section.flag("enabled", default=True)
    for index, kind in enumerate(_step5_kinds(config)):
        if kind == "sliding" and config.has("sliding_window"):
            yield decoder.layer(index, decoder.attention("sliding", heads=heads))
            continue
        yield decoder.layer(index, full)
        if indexed and section is not None:
            size = section.count("proxy_dim", default=256)
            group = section.count("region_block_size", default=8)
            keys = Indexer(head_dim=size, cache="e4m3", compress=group)
            ring = Ring(group=group, rows=group, width=2 * size, fills_page=True)
            yield decoder.layer(index, keys, "self_attn.attn.sparse_summary_cache")
            yield decoder.layer(index, ring, "self_attn.attn.csa_tail_ring")


def _step5_kinds(config: Config) -> list[str]:
    """Return the kind of each layer; by default, every second one has a sliding window."""
    if config.has("layer_types"):
        return list(attention_kinds(config))
    return ["full" if index % 2 else "sliding" for index in range(config.depth())]
