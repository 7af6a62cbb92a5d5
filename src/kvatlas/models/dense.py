"""Readers for decoders that cache K and V for each head.

These models are variations of Llama. The variations differ in the layers that use a sliding
window, in the layers that share a cache, and in the head sizes of each kind of layer. Each
function below reads the configs of models with one such difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypedDict

from kvatlas.models.config import Config, bad, missing
from kvatlas.models.decoder import Decoder, Kind
from kvatlas.models.layer import Layer
from kvatlas.models.layer_patterns import attention_kinds, chunked_kinds, gemma4_kinds, owns_cache
from kvatlas.specs import Indexer


class Sizes(TypedDict, total=False):
    """Sizes of one kind of layer, such as sliding layers; None selects the model's size."""

    heads: int | None
    head_dim: int | None
    v_dim: int | None
    window: int | None


def dense(
    decoder: Decoder,
    *,
    every: int | None = None,
    kinds: list[Kind] | None = None,
    sizes: Mapping[str, Sizes] | None = None,
    shared: bool = False,
) -> Iterator[Layer]:
    """Yield an attention cache for each layer that does not share another layer's cache.

    `kinds` lists the kind of each layer; by default, the kinds are read from the config. If the
    config has no pattern, one of `every` layers has full attention. `sizes` overrides the
    model's sizes, by kind of layer. If `shared` is true, the last layers may use the caches of
    earlier ones.
    """
    kinds = kinds or attention_kinds(decoder.config, every=every)
    own = sizes or {}
    specs = {kind: decoder.attention(kind, **own.get(kind, {})) for kind in set(kinds)}
    for index, kind in enumerate(kinds[: owns_cache(decoder.config) if shared else None]):
        yield decoder.layer(index, specs[kind])


def cohere(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Cohere-2, where every fourth layer is full attention.

    The window in the config does not include the current token.
    """
    window = decoder.config.size("sliding_window")
    sizes: dict[str, Sizes] = {"sliding": {"window": window + 1}} if window else {}
    return dense(decoder, every=4, sizes=sizes)


def llama4(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Llama 4, where every fourth layer is full and the others are chunked."""
    return dense(decoder, kinds=chunked_kinds(decoder.config))


def gemma4(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Gemma-4, where full attention has larger heads than sliding attention.

    If K and V share a projection, full attention also has fewer KV heads.
    """
    config = decoder.config
    shared = config.flag("attention_k_eq_v")
    full: Sizes = {
        "heads": config.maybe("num_global_key_value_heads") if shared else None,
        "head_dim": config.maybe("global_head_dim"),
    }
    if not config.has("per_layer_config", "global_head_dim"):
        full["head_dim"] = _GEMMA4_GLOBAL_HEAD
    return dense(decoder, kinds=gemma4_kinds(config), sizes={"full": full}, shared=True)


_GEMMA4_GLOBAL_HEAD = 512
"""The head size of Gemma-4's full attention if the config does not contain it."""


def mimo(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of MiMo-V2, whose V rows are shorter than its K rows.

    Sliding layers may have other head counts and sizes than full layers. The config has an unused
    `attention_chunk_size`: no layer is chunked.
    """
    config = decoder.config
    sliding: Sizes = {
        "heads": config.maybe("swa_num_key_value_heads"),
        "head_dim": config.maybe("swa_head_dim"),
        "v_dim": config.maybe("swa_v_head_dim", "v_head_dim"),
        "window": config.maybe("sliding_window_size"),
    }
    kinds: list[Kind]
    if config.has("hybrid_layer_pattern"):
        pattern = config.per_layer("hybrid_layer_pattern", config.depth())
        kinds = ["sliding" if flag else "full" for flag in pattern]
        config.settled("layer_types", "sliding_window")
    elif not config.has("layer_types"):
        raise missing("hybrid_layer_pattern")
    else:
        # In transformers' form of the config, the window includes the current token.
        sliding["window"] = sliding["window"] or config.count("sliding_window") - 1
        sliding["heads"] = sliding["heads"] or 2 * config.key_heads()
        kinds = attention_kinds(config)
    sizes: dict[str, Sizes] = {"full": {"v_dim": config.maybe("v_head_dim")}, "sliding": sliding}
    return dense(decoder, kinds=kinds, sizes=sizes)


def step(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Step-3.5.

    The config may set another head count and head size for full or for sliding layers. Without
    `layer_types`, layers 0, 2, 4, ... use the sliding window, if there is one.
    """
    config = decoder.config
    other = config.section("attention_other_setting")
    sizes: dict[str, Sizes] = {}
    if other is not None:
        kind = (other.text("attention_type") or "").removesuffix("_attention")
        heads, head_dim = other.maybe("num_attention_groups"), other.maybe("head_dim")
        sizes[kind] = {"heads": heads, "head_dim": head_dim}
    if config.has("layer_types") or not config.size("sliding_window"):
        return dense(decoder, sizes=sizes)
    alternating: list[Kind] = ["full" if i % 2 else "sliding" for i in range(config.depth())]
    return dense(decoder, kinds=alternating, sizes=sizes)


def pruned(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of DeciLM and Nemotron-NAS; some layers have fewer heads or no attention."""
    config = decoder.config
    for index, block in enumerate(config.per_layer("block_configs", config.depth())):
        if not isinstance(block, dict) or not isinstance(block.get("attention"), dict):
            raise bad(
                "Every entry of block_configs must have an attention object",
                f"entry {index}: {block!r}",
                "Add an attention object to the entry",
            )
        attention = Config(block["attention"])
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            continue
        shared = attention.count("n_heads_in_group")
        heads = config.quotient(config.query_heads(), shared, "n_heads_in_group")
        yield decoder.layer(index, decoder.attention(heads=heads))


def falcon(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Falcon.

    The first generation caches one head in each layer and ignores `num_kv_heads`.
    """
    config = decoder.config
    single = config.flag("multi_query") and not config.flag("new_decoder_architecture")
    if single:
        config.settled("num_kv_heads")
    return decoder.every_layer(decoder.attention(heads=1 if single else None))


def dbrx(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of DBRX, whose number of KV heads is in the section `attn_config`."""
    section = decoder.config.section("attn_config")
    if section is None:
        raise missing("attn_config")
    decoder.config.settled("num_key_value_heads")
    return decoder.every_layer(decoder.attention(heads=section.count("kv_n_heads", default=1)))


def chatglm(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of ChatGLM: without `multi_query_attention`, each query head has K and V."""
    config = decoder.config
    grouped = config.flag("multi_query_attention", default=True)
    if not grouped:
        config.settled("multi_query_group_num")
    return decoder.every_layer(decoder.attention(heads=None if grouped else config.query_heads()))


def block_sparse(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of MiniMax-M3: attention in every layer, indexer keys in sparse layers."""
    config, depth, spec = decoder.config, decoder.depth, decoder.attention()
    section = config.section("sparse_attention_config")
    if section is not None:
        marks = section.per_layer("sparse_attention_freq", depth)
        size = section.count("sparse_index_dim") if any(marks) else 0
    else:
        marks, size = _sparse_layers(config), config.count("index_head_dim", default=128)
    config.settled("layer_types")
    for index, mark in enumerate(marks):
        if mark:
            keys = Indexer(head_dim=size, cache="bf16")
            yield decoder.layer(index, keys, f"{decoder.attention_name}.index_cache")
        yield decoder.layer(index, spec)


def _sparse_layers(config: Config) -> list[bool]:
    """Return for each layer whether `layer_types` in the config specifies an indexer for it."""
    if not config.has("layer_types"):
        return [False] * config.depth()
    words = config.per_layer("layer_types", config.depth(), extra=config.predictors())
    for index, word in enumerate(words):
        if word not in ("full_attention", "minimax_m3_sparse"):
            hint = "Use full_attention or minimax_m3_sparse"
            raise bad(f"Layer {index} has an unknown type", repr(word), hint)
    return [word == "minimax_m3_sparse" for word in words]


def gpt_neo(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of GPT-Neo, whose layers with local attention also cache all tokens."""
    config = decoder.config
    heads = config.count("num_heads", "num_attention_heads")
    head_dim = config.quotient(config.hidden(), heads, "num_heads")
    config.settled("window_size", "attention_layers")
    return decoder.every_layer(decoder.attention(heads=heads, head_dim=head_dim))


def multi_query(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of GPT-BigCode: one head for all queries if `multi_query` is set."""
    single = decoder.config.flag("multi_query", default=True)
    decoder.config.settled("num_key_value_heads")
    return decoder.every_layer(decoder.attention(heads=1 if single else None))


def expanded_latent(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of MiniCPM3: vLLM expands its latents, and pads V to the size of K."""
    config = decoder.config
    head_dim = config.count("qk_nope_head_dim") + config.count("qk_rope_head_dim")
    config.settled("head_dim", "v_head_dim", "qk_head_dim", "num_key_value_heads", "kv_lora_rank")
    spec = decoder.attention(heads=config.query_heads(), head_dim=head_dim)
    return decoder.every_layer(spec)


def cross_attending(decoder: Decoder) -> Iterator[Layer]:
    """Yield the self-attention caches of Mllama, without its cross-attention to image rows.

    The text model's config does not contain the number of image rows.
    """
    config, spec = decoder.config, decoder.attention()
    crosses = config.indices("cross_attention_layers", decoder.depth)
    for index in range(decoder.depth):
        if index not in crosses:
            yield decoder.layer(index, spec)
