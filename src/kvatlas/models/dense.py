"""Decoders whose layers keep K and V for each head.

One family in the end: Llama and everything that differs from it in which layers
slide, which share a cache, and how large a row is in which kind of layer. The
readers below differ in one of these each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypedDict

from kvatlas.models.config import Config, bad, missing
from kvatlas.models.decoder import Decoder, Kind
from kvatlas.models.layer_patterns import attention_kinds, chunked_kinds, owns_cache
from kvatlas.models.model import Layer
from kvatlas.specs import Indexer


class Sizes(TypedDict, total=False):
    """What one kind of layer has instead of the model's own sizes."""

    heads: int
    head_dim: int
    v_dim: int | None
    window: int


def no_change(config: Config, kind: Kind) -> Sizes:  # noqa: ARG001
    """The model's own sizes."""
    return {}


def dense(
    decoder: Decoder,
    *,
    every: int | None = None,
    kinds: Callable[[Config], list[Kind]] | None = None,
    sizes: Callable[[Config, Kind], Sizes] = no_change,
) -> Iterator[Layer]:
    """Attention in every layer that does not share another's cache."""
    config = decoder.config
    found = kinds(config) if kinds else attention_kinds(config, every=every)
    specs = {kind: decoder.attention(kind, **sizes(config, kind)) for kind in set(found)}
    for index, kind in enumerate(found[: owns_cache(config)]):
        yield decoder.layer(index, decoder.attention_name, specs[kind])


def two_by_two(decoder: Decoder) -> Iterator[Layer]:
    """Gemma-2 and gpt-oss: every second layer slides, the first one included.

    gpt-oss's sinks are learned logits, not rows: they take no cache.
    """
    yield from dense(decoder, every=2)


def one_in_six(decoder: Decoder) -> Iterator[Layer]:
    """Gemma-3: each sixth layer is full; 62 layers end with two that slide."""
    yield from dense(decoder, every=6)


def one_in_four(decoder: Decoder) -> Iterator[Layer]:
    """Olmo-3 and Exaone-4: each fourth layer is full where there is a window at all."""
    yield from dense(decoder, every=4)


def cohere(decoder: Decoder) -> Iterator[Layer]:
    """Cohere-2: each fourth layer is full, and a window counts the tokens before the current."""

    def sizes(config: Config, kind: Kind) -> Sizes:
        return {"window": config.count("sliding_window") + 1} if kind == "sliding" else {}

    yield from dense(decoder, every=4, sizes=sizes)


def llama4(decoder: Decoder) -> Iterator[Layer]:
    """Llama 4: three layers in chunks, then one that sees everything."""
    yield from dense(decoder, kinds=chunked_kinds)


def gemma4(decoder: Decoder) -> Iterator[Layer]:
    """Gemma-4: full layers have longer rows, and fewer heads where K and V are one projection."""

    def sizes(config: Config, kind: Kind) -> Sizes:
        if kind != "full":
            return {}
        heads = config.key_heads()
        if config.flag("attention_k_eq_v"):
            heads = config.count("num_global_key_value_heads", default=heads)
        return {
            "heads": heads,
            "head_dim": config.count("global_head_dim", default=config.head_dim()),
        }

    def kinds(config: Config) -> list[Kind]:
        # The last layer is full whatever the pattern says.
        return [*attention_kinds(config, every=6)[:-1], "full"]

    yield from dense(decoder, kinds=kinds, sizes=sizes)


def mimo(decoder: Decoder) -> Iterator[Layer]:
    """MiMo-V2: sliding layers have sizes of their own, and V rows are shorter than K's.

    Its `attention_chunk_size` is a leftover: no layer is chunked.
    """

    def kinds(config: Config) -> list[Kind]:
        pattern = config.per_layer("hybrid_layer_pattern", config.depth())
        return ["sliding" if flag else "full" for flag in pattern]

    def sizes(config: Config, kind: Kind) -> Sizes:
        if kind == "full":
            return {"v_dim": config.maybe("v_head_dim")}
        return {
            "heads": config.count("swa_num_key_value_heads", "num_key_value_heads"),
            "head_dim": config.count("swa_head_dim", "head_dim"),
            "v_dim": config.maybe("swa_v_head_dim", "v_head_dim"),
            "window": config.count("sliding_window_size", "sliding_window"),
        }

    yield from dense(decoder, kinds=kinds, sizes=sizes)


def step(decoder: Decoder) -> Iterator[Layer]:
    """Step-3.5: one kind of layer may have heads of its own; without a list even layers slide."""
    other = decoder.config.section("attention_other_setting")
    named = other.text("attention_type") if other else None

    def kinds(config: Config) -> list[Kind]:
        if config.has("layer_types") or not config.size("sliding_window"):
            return attention_kinds(config)
        return ["full" if i % 2 else "sliding" for i in range(config.depth())]

    def sizes(config: Config, kind: Kind) -> Sizes:  # noqa: ARG001
        if other is None or named != f"{kind}_attention":
            return {}
        return {
            "heads": other.count("num_attention_groups"),
            "head_dim": other.count("head_dim"),
        }

    yield from dense(decoder, kinds=kinds, sizes=sizes)


def pruned(decoder: Decoder) -> Iterator[Layer]:
    """DeciLM and Nemotron-NAS: some layers lost their attention to a search, others some heads."""
    config = decoder.config
    for index, block in enumerate(config.per_layer("block_configs", config.depth())):
        if not isinstance(block, dict) or not isinstance(block.get("attention"), dict):
            raise bad(
                "Each of block_configs says what its attention is", block, "Add its attention"
            )
        attention = Config(block["attention"])
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            continue
        heads, shared = config.query_heads(), attention.count("n_heads_in_group")
        if heads % shared:
            raise bad(
                "n_heads_in_group divides the query heads",
                f"{shared} of {heads} heads",
                "Check block_configs",
            )
        spec = decoder.attention(heads=heads // shared)
        yield decoder.layer(index, decoder.attention_name, spec)


def falcon(decoder: Decoder) -> Iterator[Layer]:
    """Falcon: one cached head in the first generation, whatever num_kv_heads says."""
    config = decoder.config
    single = config.flag("multi_query") and not config.flag("new_decoder_architecture")
    spec = decoder.attention(heads=1 if single else None)
    for index in range(config.depth()):
        yield decoder.layer(index, decoder.attention_name, spec)


def dbrx(decoder: Decoder) -> Iterator[Layer]:
    """DBRX keeps its heads in a section of their own."""
    section = decoder.config.section("attn_config")
    if section is None:
        raise missing("attn_config")
    spec = decoder.attention(heads=section.count("kv_n_heads", default=1))
    for index in range(decoder.depth):
        yield decoder.layer(index, decoder.attention_name, spec)


def block_sparse(decoder: Decoder) -> Iterator[Layer]:
    """MiniMax-M3: attention in every layer; the sparse ones keep an indexer's keys before it."""
    config, depth = decoder.config, decoder.depth
    section = config.section("sparse_attention_config")
    marks = section.per_layer("sparse_attention_freq", depth) if section else [0] * depth
    spec = decoder.attention()
    for index, mark in enumerate(marks):
        if section is not None and mark:
            keys = Indexer(head_dim=section.count("sparse_index_dim"), cache="bf16")
            yield decoder.layer(index, f"{decoder.attention_name}.index_cache", keys)
        yield decoder.layer(index, decoder.attention_name, spec)
