"""The layers of families that are not a plain stack of mixers and feed-forward parts.

Each function yields the tensors of each layer of one family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvatlas.models.config import Config
from kvatlas.models.layer_patterns import block_kinds, gemma4_kinds
from kvatlas.models.weights import mixers
from kvatlas.models.weights.decoders import (
    Text,
    attention_options,
    feed_forward,
    mixer,
    stacked,
)
from kvatlas.models.weights.feed_forward import experts, mlp, shared_width, sparse_layers
from kvatlas.models.weights.tensor import Tensor, linear, norm
from kvatlas.specs import Attention, CrossAttention, LatentAttention


def one_or_the_other(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Nemotron-H layer: one norm, then a mixer, an MLP or experts."""
    for index, kind in enumerate(block_kinds(text.config)):
        mixed = [t for spec in text.caches[index] for t in mixer(text, spec, index)]
        rest = feed_forward(text, sparse=kind == "moe") if kind in ("mlp", "moe") else []
        yield [*text.norms(), *mixed, *rest]


def mixers_alone(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Mamba layer: one norm, then a mixer."""
    for index in range(text.depth):
        yield [*text.norms(), *(t for s in text.caches[index] for t in mixer(text, s, index))]


def with_shared_mlp(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Granite-4 layer: norms, mixers, a shared MLP, and any experts."""
    width = shared_width(text.config)
    sparse = sparse_layers(text.config, text.depth)
    for index in range(text.depth):
        mixed = [t for spec in text.caches[index] for t in mixer(text, spec, index)]
        rest = experts(text.config) if sparse[index] else mlp(text.config, width=width)
        yield [*text.norms(), *mixed, *rest]


def llama4(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Llama 4 layer; its shared expert is as wide as a routed expert."""
    width = text.config.count("intermediate_size")
    shared = text.config.under({"shared_expert_intermediate_size": width})
    return stacked(Text(shared, text.traits, text.caches))


def gemma4(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Gemma-4 layer, which may have experts in addition to the MLP.

    In some layers K also serves as V, and layers that share a cache project only queries.
    """
    config, hidden = text.config, text.hidden
    owners: dict[bool, Attention] = {}
    for kind, caches in zip(gemma4_kinds(config), text.caches, strict=True):
        sliding = kind == "sliding"
        for spec in caches:
            if isinstance(spec, Attention):
                owners[sliding] = spec
        options = attention_options(text, owners[sliding])
        values = sliding or not config.flag("attention_k_eq_v")
        attention = mixers.attention(config, **options, values=values)
        if not caches:  # a layer that shares another layer's cache projects only queries
            theirs = ("k_proj", "v_proj", "k_norm")
            attention = [tensor for tensor in attention if not tensor.name.endswith(theirs)]
        wide = 2 if config.flag("use_double_wide_mlp") and not caches else 1
        yield [
            *text.norms(), *attention,
            *mlp(config, width=wide * config.count("intermediate_size")),
            *_gemma4_experts(config), *_gemma4_inputs(config, hidden),
        ]  # fmt: skip


def _gemma4_experts(config: Config) -> list[Tensor]:
    if not config.flag("enable_moe_block"):
        return []
    hidden, number = config.hidden(), config.count("num_experts")
    norms = [norm("layernorm", hidden) for _ in range(3)]
    scales = Tensor("router", "router.scale, per_expert_scale", hidden + number)
    return [*experts(config, name="moe"), *norms, scales]


def _gemma4_inputs(config: Config, hidden: int) -> list[Tensor]:
    """Return the weights that apply Gemma-4's per-layer embeddings; empty for a model without."""
    width = config.size("hidden_size_per_layer_input")
    if not width:
        return []
    gate = linear("mlp", "per_layer_input_gate", width, hidden)
    out = linear("mlp", "per_layer_projection", hidden, width)
    return [*gate, *out, norm("layernorm", hidden)]


def deepseek_v4(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each DeepSeek-V4 layer: attention, experts and hyper-connections."""
    config = text.config
    for index in range(text.depth):
        ratio = max(
            spec.compress for spec in text.caches[index] if isinstance(spec, LatentAttention)
        )
        attention = mixers.compressed_attention(config, ratio if ratio > 1 else 0)
        yield [*text.norms(), *_hyper_connections(text), *attention, *experts(config)]


def deepseek_v41(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each DeepSeek-V4.1 layer, without the tables of n-grams.

    A few layers compress rows or select some rows; all other layers use the results.
    """
    config = text.config
    chooses = config.indices("index_source_layer_ids", text.depth)
    for index in range(text.depth):
        rows = [s.compress for s in text.caches[index] if type(s) is LatentAttention]
        attention = [
            *mixers.compressed_attention(config, 0),
            *mixers.shared_rows(config, max(rows, default=0), chooses=index in chooses),
        ]
        yield [*text.norms(), *_hyper_connections(text), *attention, *experts(config)]


def _hyper_connections(text: Text) -> list[Tensor]:
    """Return the weights that mix the residual streams, for attention and for the experts."""
    ways = text.config.count("hc_mult", default=4)
    mixing = ways * (2 + ways)
    one = [
        Tensor("norm", "hc_fn", mixing, ways * text.hidden),
        Tensor("norm", "hc_base, hc_scale", mixing + 3),
    ]
    return [*one, *one]


def zamba(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Zamba-2 layer: Mamba-2 and, in some layers, adapters.

    Adapters connect a layer to a shared attention block. The first layer that uses a block
    also includes the weights of the block.
    """
    config, hidden = text.config, text.hidden
    blocks, used = config.count("num_mem_blocks", default=1), 0
    rank = config.count("adapter_rank", default=128)
    width = config.count("intermediate_size")
    for index, caches in enumerate(text.caches):
        tensors = text.norms()
        for spec in caches:
            if not isinstance(spec, Attention):
                tensors += mixer(text, spec, index)
                continue
            tensors += linear("attention", "linear", hidden, hidden)
            if config.flag("use_shared_mlp_adapter", default=True):
                tensors += linear("mlp", "adapter.0", rank, hidden)
                tensors += linear("mlp", "adapter.1", 2 * width, rank, parts=width)
            if used < blocks:
                options = attention_options(text, spec)
                tensors += mixers.attention(config, width=2 * hidden, **options)
                tensors += [norm("layernorm", 3 * hidden), *mlp(config, width=width)]
            used += 1
        yield tensors


def whisper(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each layer of Whisper's decoder: self-attention and cross-attention."""
    for caches in text.caches:
        tensors = [*text.norms(), *mlp(text.config, gated=False, bias=True)]
        for spec in caches:
            if isinstance(spec, Attention | CrossAttention):
                tensors += listener(text.config, heads=spec.heads, head_dim=spec.head_dim)
        yield tensors


def listener(config: Config, *, heads: int, head_dim: int) -> list[Tensor]:
    """Return the weights of Whisper's attention; all projections except K have a bias."""
    made = mixers.attention(
        config, heads=heads, kv_heads=heads, head_dim=head_dim, qkv_bias=True, out_bias=True
    )
    return [tensor for tensor in made if not tensor.name.endswith("k_proj.bias")]


def pruned(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each DeciLM or Nemotron-NAS layer.

    The number of heads and the width of the MLP differ by layer and may be zero.
    """
    config, hidden = text.config, text.hidden
    blocks = config.per_layer("block_configs", text.depth)
    for index, caches in enumerate(text.caches):
        tensors = [t for spec in caches for t in mixer(text, spec, index)]
        tensors += [norm("layernorm", hidden)] if tensors else []
        section = Config(blocks[index]).section("ffn") or Config({})
        if section.flag("replace_with_linear"):
            tensors += linear("mlp", "mlp.linear", hidden, hidden)
        elif not section.flag("no_op"):
            # 2/3 of ffn_mult x hidden size, rounded up to a multiple of 256.
            width = int(2 * float(section.get("ffn_mult") or 0) * hidden / 3)
            tensors += mlp(config, width=max(256, -(-width // 256) * 256))
            tensors += [norm("layernorm", hidden)]
        yield tensors


def rwkv(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each RWKV-7 layer: time mixing, then channel mixing."""
    for index, caches in enumerate(text.caches):
        mixed = [t for spec in caches for t in mixer(text, spec, index)]
        # The first layer also normalises the embedding.
        extra = [norm("pre_norm", text.hidden, bias=True)] if index == 0 else []
        shift = Tensor("mlp", "ffn.x_k", text.hidden)
        yield [*text.norms(), *extra, *mixed, shift, *mlp(text.config, gated=False)]


def falcon(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each Falcon layer.

    Older models that compute attention and MLP in parallel have one norm per layer.
    """
    config = text.config
    wide = 2 if config.flag("new_decoder_architecture") else 1
    parallel = config.flag("parallel_attn", default=True)
    number = config.maybe("num_ln_in_parallel_attn") or wide if parallel else 2
    return stacked(replace(text, traits=text.traits._replace(norms=number)))
