"""The weight tensors of a decoder's layers.

The specs of a layer's caches determine its mixers (attention, recurrent layers, indexers), and
`Traits` provide the rest. Most families are a stack of such layers. Other families, such as
Gemma-4, DeepSeek-V4, Zamba-2 and Whisper, each have a separate function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kvatlas.models.config import Config
from kvatlas.models.layer_patterns import block_kinds, gemma4_kinds
from kvatlas.models.weights import mixers
from kvatlas.models.weights.feed_forward import (
    experts,
    mlp,
    mlp_width,
    shared_width,
    sparse_layers,
)
from kvatlas.models.weights.mixers import QkNorm
from kvatlas.models.weights.tensor import Tensor, linear, norm
from kvatlas.specs import (
    AnySpec,
    Attention,
    CrossAttention,
    GatedDeltaNet,
    Indexer,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Rwkv7,
    ShortConv,
    SlidingAttention,
)

Predictors = Literal["none", "bare", "embeds"]
"""MTP layers in checkpoints: `none`, `bare`, or `embeds` if each has a separate embedding."""

Gate = Literal["none", "head", "element"]
"""The gate of an attention's output: none, one per head, or one per element."""


Head = Literal["plain", "bias", "bert"]
"""lm_head: without a bias, with one, or BERT's, which transforms rows before."""


class Traits(NamedTuple):
    """Properties of a family that its config lacks, and defaults for its config."""

    norms: int = 2
    """Number of norms per layer that have the hidden size."""
    norm_bias: bool = False
    qk_norm: QkNorm = "none"
    qkv_bias: bool | None = None
    """Whether the Q, K and V projections have biases; None to read it from attention_bias."""
    out_bias: bool | None = None
    """Whether the output projection has a bias; None to read it from attention_bias."""
    gated: bool = True
    """Whether the MLP has a gate."""
    mlp_bias: bool | None = None
    expert_bias: bool = False
    shared_gate: bool = False
    sinks: bool = False
    gate: Gate = "none"
    """The default gate of an attention's output."""
    tied: bool = False
    """Whether lm_head shares the embedding's weights by default."""
    mixer: str = "self_attn"
    feed_forward: str = "mlp"
    mtp: Predictors = "none"
    """The MTP layers that checkpoints contain."""
    biases: tuple[str, bool] | None = None
    """The config key that enables the biases of all projections, and its default."""
    mlp_ratio: int = 0
    """Width of the MLP divided by the hidden size, if the config has no width; 0 if it must."""
    crosses: bool = False
    """Whether layers also attend to an encoder's rows."""
    positions: tuple[str, int] | None = None
    """The config key for the number of learned positions, and the number of further rows."""
    outer_norms: int = 1
    """Number of norms before and after the layers."""
    head: Head = "plain"
    embedding_width: str = ""
    """The config key for the width of the embedding, if it may differ from the hidden size."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text model's config, traits, and the specs of each layer's caches."""

    config: Config
    traits: Traits
    caches: tuple[tuple[AnySpec, ...], ...]

    @property
    def hidden(self) -> int:
        """The hidden size."""
        return self.config.hidden()

    @property
    def depth(self) -> int:
        """The number of decoder layers."""
        return len(self.caches)

    def norms(self) -> list[Tensor]:
        """Return the norms of one layer; the width of each is the hidden size."""
        bias = self.traits.norm_bias
        return [norm("layernorm", self.hidden, bias=bias) for _ in range(self.traits.norms)]


Layers = Callable[[Text], Iterator[list[Tensor]]]


def stacked(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each layer: norms, mixers, and an MLP or experts."""
    sparse = sparse_layers(text.config, text.depth)
    for index in range(text.depth):
        mixed = [t for spec in text.caches[index] for t in mixer(text, spec, index)]
        yield [*text.norms(), *mixed, *feed_forward(text, sparse=sparse[index])]


def feed_forward(text: Text, *, sparse: bool) -> list[Tensor]:
    """Return the feed-forward tensors of a layer: experts if it is `sparse`, otherwise an MLP."""
    config, traits = text.config, text.traits
    if sparse:
        return experts(
            config, name=traits.feed_forward, gated=traits.gated,
            bias=traits.expert_bias, shared_gate=traits.shared_gate,
        )  # fmt: skip
    bias = config.flag("mlp_bias") if traits.mlp_bias is None else traits.mlp_bias
    if traits.biases:
        bias = config.flag(traits.biases[0], default=traits.biases[1])
    width = mlp_width(config, ratio=traits.mlp_ratio)
    return mlp(config, name=traits.feed_forward, width=width, gated=traits.gated, bias=bias)


def mixer(text: Text, spec: AnySpec, index: int) -> list[Tensor]:
    """Return the tensors of the mixer in layer `index` whose cache has spec `spec`."""
    config, hidden, name = text.config, text.hidden, text.traits.mixer
    match spec:
        case Attention():
            made = mixers.attention(config, **attention_options(text, spec))
            return made * 2 if text.traits.crosses else made
        case LatentAttention():
            return mixers.latent(config, gate=config.flag("mla_use_output_gate"))
        case Indexer():
            section = config.section("sparse_attention_config")
            return mixers.block_indexer(config, section) if section else _indexer(config)
        case GatedDeltaNet():
            return mixers.delta_net(hidden, spec)
        case KimiDelta():
            section = config.section("linear_attn_config") or config
            full = section.flag("use_full_rank_gate")
            return mixers.kimi_delta(hidden, spec, full_gate=full)
        case LightningAttention():
            return mixers.lightning(config)
        case Mamba2():
            normed = config.flag(
                "mamba_rms_norm", default="mamba_d_ssm" not in config.filled_keys()
            )
            return mixers.mamba2(
                hidden, spec, name="mamba" if name == "self_attn" else name,
                bias=config.flag("use_bias") or config.flag("mamba_proj_bias"),
                conv_bias=config.flag("use_conv_bias", default=True), normed=normed,
            )  # fmt: skip
        case Mamba1():
            rank = config.get("mamba_dt_rank", "time_step_rank")
            rank = rank if isinstance(rank, int) else -(-hidden // 16)
            normed = config.has("mamba_dt_rank")  # only Jamba has this key
            return mixers.mamba1(hidden, spec, name="mamba", rank=rank, normed=normed)
        case ShortConv():
            return mixers.short_conv(hidden, spec.width, spec.kernel)
        case Rwkv7():
            return mixers.rwkv7(config, first=index == 0)
    return []


def _indexer(config: Config) -> list[Tensor]:
    return mixers.latent_indexer(config)


def attention_options(text: Text, spec: Attention) -> dict[str, Any]:
    """Return the arguments of `mixers.attention` for a layer whose cache has spec `spec`."""
    config, traits = text.config, text.traits
    biased = config.flag("attention_bias")
    if traits.biases:
        biased = config.flag(traits.biases[0], default=traits.biases[1])
    sliding = isinstance(spec, SlidingAttention)
    heads = config.maybe("swa_num_attention_heads") if sliding else None
    other = config.section("attention_other_setting")
    if other is not None and other.text("attention_type") == "sliding_attention" and sliding:
        heads = other.maybe("num_attention_heads")
    qk_norm = traits.qk_norm
    if not (config.flag("use_qk_norm", default=True) and config.flag("qk_layernorm", default=True)):
        qk_norm = "none"
    gate = 0
    if config.flag("attn_output_gate", default=traits.gate == "element"):
        gate = spec.head_dim
    elif config.flag("use_head_wise_attn_gate", default=traits.gate == "head"):
        gate = 1
    sinks = "add_swa_attention_sink_bias" if sliding else "add_full_attention_sink_bias"
    return {
        "name": traits.mixer,
        "heads": heads,
        "kv_heads": spec.heads,
        "head_dim": spec.head_dim,
        "v_dim": spec.v_dim,
        "qkv_bias": biased if traits.qkv_bias is None else traits.qkv_bias,
        "out_bias": biased if traits.out_bias is None else traits.out_bias,
        "qk_norm": qk_norm,
        "norm_bias": traits.norm_bias,
        "gate": gate,
        "sinks": traits.sinks or config.flag(sinks),
    }


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
    """Yield the tensors of each Granite-4 layer: norms, mixers, a shared MLP, perhaps experts."""
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
    """Return Gemma-4's weights that apply per-layer embeddings; empty if the model has none."""
    width = config.size("hidden_size_per_layer_input")
    if not width:
        return []
    gate = linear("mlp", "per_layer_input_gate", width, hidden)
    out = linear("mlp", "per_layer_projection", hidden, width)
    return [*gate, *out, norm("layernorm", hidden)]


def deepseek_v4(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each DeepSeek-V4 layer: attention, experts and hyper-connections."""
    config = text.config
    ways = config.count("hc_mult", default=4)
    mixing = ways * (2 + ways)
    for index in range(text.depth):
        ratio = config.per_layer("compress_ratios", text.depth, extra=4)[index]
        hyper = [
            Tensor("norm", "hc_fn", mixing, ways * text.hidden),
            Tensor("norm", "hc_base, hc_scale", mixing + 3),
        ]
        yield [
            *text.norms(), *hyper, *hyper,
            *mixers.compressed_attention(config, ratio), *experts(config),
        ]  # fmt: skip


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

    Numbers of heads and MLP widths differ by layer and may be zero.
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
    """Yield the tensors of each Falcon layer, which has one norm if it is parallel and old."""
    config = text.config
    wide = 2 if config.flag("new_decoder_architecture") else 1
    parallel = config.flag("parallel_attn", default=True)
    number = config.maybe("num_ln_in_parallel_attn") or wide if parallel else 2
    return stacked(replace(text, traits=text.traits._replace(norms=number)))


def opt(text: Text) -> Iterator[list[Tensor]]:
    """Yield the tensors of each OPT layer."""
    return stacked(text)
