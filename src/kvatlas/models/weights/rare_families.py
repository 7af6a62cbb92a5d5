"""Layers and outer weights of families that few checkpoints use."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.models.weights import mixers
from kvatlas.models.weights.decoders import Text, attention_options, mixer, stacked
from kvatlas.models.weights.feed_forward import mlp
from kvatlas.models.weights.tensor import Tensor, linear, norm
from kvatlas.specs import Attention


def jetmoe(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each JetMoE layer, which also has experts for queries and outputs."""
    config, hidden = text.config, text.hidden
    number = config.count("num_local_experts")
    width = config.key_heads() * config.head_dim()
    keys = config.key_heads()
    attention = [
        *linear("attention", "self_attention.kv_proj", 2 * width, hidden, parts=keys),
        *linear("experts", "self_attention.experts.in", width, hidden, parts=keys, copies=number),
        *linear("experts", "self_attention.experts.out", hidden, width, parts=keys, copies=number),
    ]
    parts = [*linear("router", "router", 2 * number, hidden), norm("biases", 2 * hidden)]
    wide = mlp(config, kind="experts", name="mlp.experts.0", copies=number)
    for _ in text.caches:
        yield [*text.norms(), *attention, *parts, *wide]


def hunyuan_moe(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each HunYuan MoE layer; a plain MLP has the width of one expert."""
    config, hidden = text.config, text.hidden
    given = config.get("num_experts")
    numbers = given if isinstance(given, list) else [config.count("num_experts")] * text.depth
    shared = mlp(config, kind="shared_experts", name="mlp.shared_experts")
    for index, (caches, number) in enumerate(zip(text.caches, numbers, strict=True)):
        mixed = [t for spec in caches for t in mixer(text, spec, index)]
        wide = mlp(config, kind="experts", name="mlp.experts.0", copies=number)
        gate = linear("router", "mlp.gate.wg", number, hidden)
        yield [*text.norms(), *mixed, *gate, *wide, *shared]


def moshi(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Moshi layer; `ffn_dim` is the width of gate and up together."""
    width = text.config.count("ffn_dim") // 2
    for index, caches in enumerate(text.caches):
        mixed = [t for spec in caches for t in mixer(text, spec, index)]
        yield [*text.norms(), *mixed, *mlp(text.config, width=width)]


def padding_row(text: Text) -> list[Tensor]:
    """Return Moshi's embedding of the padding token."""
    return [Tensor("embedding", "embed_tokens, padding", 1, text.hidden)]


def doge(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Doge layer: a plain layer, residual weights, a dynamic mask."""
    keys = text.config.key_heads()
    extra = [
        Tensor("norm", "input_residual, post_attention_residual", 2 * text.hidden),
        Tensor("attention", "self_attn.A", keys, parts=keys),
        *linear("attention", "self_attn.dt_proj", keys, keys * text.config.head_dim()),
    ]
    for tensors in stacked(text):
        yield [*tensors, *extra]


def bitnet(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each BitNet layer, with two norms before the output projections."""
    width = text.config.count("intermediate_size")
    for tensors in stacked(text):
        yield [*tensors, norm("attn_sub_norm", text.hidden), norm("ffn_sub_norm", width)]


def gemma3n(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Gemma-3n layer: AltUp, LAuReL and per-layer embeddings.

    Layers that share another layer's cache project only queries.
    """
    config, hidden = text.config, text.hidden
    inputs = config.count("altup_num_inputs", default=4)
    rank = config.count("laurel_rank", default=64)
    each = config.count("hidden_size_per_layer_input", default=256)
    widths = config.get("intermediate_size")
    own = next(spec for caches in text.caches for spec in caches if isinstance(spec, Attention))
    added = [
        norm("altup, laurel, per-layer norms", 4 * hidden),
        Tensor("router", "altup.coefs", inputs * (inputs + 1), inputs),
        *linear("router", "altup.modality_router", inputs, hidden),
        *linear("mlp", "laurel.linear_left", rank, hidden),
        *linear("mlp", "laurel.linear_right", hidden, rank),
        *linear("mlp", "per_layer_input_gate", each, hidden),
        *linear("mlp", "per_layer_projection", hidden, each),
    ]
    for index, caches in enumerate(text.caches):
        attention = mixers.attention(config, **attention_options(text, own))
        if not caches:
            theirs = ("k_proj", "v_proj", "k_norm")
            attention = [tensor for tensor in attention if not tensor.name.endswith(theirs)]
        width = (
            config.per_layer("intermediate_size", text.depth)[index]
            if isinstance(widths, list)
            else config.count("intermediate_size")
        )
        yield [*text.norms(), *attention, *mlp(config, width=width), *added]


def altup(text: Text) -> list[Tensor]:
    """Return Gemma-3n's projections of the hidden rows before and after the layers."""
    number = 2 * (text.config.count("altup_num_inputs", default=4) - 1)
    return linear("mlp", "altup_projections", text.hidden, text.hidden, copies=number)


def hrm(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each HRM layer; layers after the first two stacks reuse weights."""
    owners = 2 * text.config.count("num_layers_per_stack")
    for index, tensors in enumerate(stacked(text)):
        yield tensors if index < owners else []


def xmod(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each X-MOD layer, which has an adapter for each language."""
    config, hidden = text.config, text.hidden
    factor = config.get("adapter_reduction_factor")
    width = hidden // (factor if isinstance(factor, int) and factor > 0 else 2)
    number = len(config.listing("languages") or ())
    adapters = [
        *linear("mlp", "adapter.dense1", width, hidden, copies=number, bias=True),
        *linear("mlp", "adapter.dense2", hidden, width, copies=number, bias=True),
    ]
    for tensors in stacked(text):
        yield [*tensors, *adapters]


def pooler(text: Text) -> list[Tensor]:
    """Return BigBird's pooler, which its causal language model keeps."""
    return linear("mlp", "pooler", text.hidden, text.hidden, bias=True)


def pronunciation(text: Text) -> list[Tensor]:
    """Return RoCBert's embeddings of pronunciations and shapes, and their projection."""
    config, width, tensors = text.config, text.hidden, list[Tensor]()
    for word in ("pronunciation", "shape"):
        if config.flag(f"enable_{word}", default=True):
            rows, wide = config.count(f"{word}_vocab_size"), config.count(f"{word}_embed_dim")
            tensors.append(Tensor("embedding", f"{word}_embed", rows, wide))
            width += wide
    if config.flag("concat_input", default=True):
        tensors += linear("mlp", "map_inputs_layer", text.hidden, width, bias=True)
    return tensors


def rotations(text: Text) -> list[Tensor]:
    """Return RoFormer's table of sines and cosines, which checkpoints contain."""
    rows = text.config.count("max_position_embeddings")
    return [Tensor("embedding", "embed_positions", rows, text.config.head_dim())]


def prompts(text: Text) -> list[Tensor]:
    """Return CPM-Ant's embeddings of segments and prompts, and its position bias."""
    config, heads = text.config, text.config.query_heads()
    segments = config.count("segment_types")
    prompted = config.count("prompt_types") * config.count("prompt_length")
    buckets = segments**2 + config.count("position_bias_num_buckets")
    return [
        Tensor("embedding", "segment_embedding, prompts", segments + prompted, text.hidden),
        Tensor("attention", "relative_attention_bias", buckets, heads, parts=heads),
    ]


def dense_head(text: Text) -> list[Tensor]:
    """Return the matrix before ModernBERT's lm_head."""
    return linear("mlp", "lm_head.dense", text.hidden, text.hidden)
