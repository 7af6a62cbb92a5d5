"""The weight tensors of a decoder's layers.

The specs of a layer's caches determine its mixers (attention, recurrent layers, indexers), and
`Traits` provide the rest. Most families are a stack of such layers; `family_layers` has the
layers of other families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvatlas.models.config import Config
from kvatlas.models.weights import mixers
from kvatlas.models.weights.feed_forward import experts, mlp, mlp_width, sparse_layers
from kvatlas.models.weights.mixers import QkNorm
from kvatlas.models.weights.tensor import Tensor, norm
from kvatlas.specs import (
    AnySpec,
    Attention,
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
"""MTP layers in checkpoints: none, `bare` layers, or layers that have an embedding each
(`embeds`)."""

Gate = Literal["none", "head", "element"]
"""The gate of an attention's output: none, one per head, or one per element."""


Head = Literal["plain", "bias", "bert"]
"""The kind of lm_head: without a bias, with a bias, or BERT's, which also transforms its input."""


class Traits(NamedTuple):
    """Properties of a model family that configs do not contain, and defaults for missing keys."""

    norms: int = 2
    """Number of norms per layer whose width is the hidden size."""
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
    """Width of the MLP divided by the hidden size, for configs without a width.

    0 if the config must contain the width.
    """
    crosses: bool = False
    """Whether layers also attend to an encoder's rows."""
    decodes: bool = False
    """Whether the model has other parts, such as an encoder, that are not counted."""
    positions: tuple[str, int] | None = None
    """The config key for the number of learned positions, and the number of extra embeddings."""
    outer_norms: int = 1
    """Number of norms outside the layers."""
    head: Head = "plain"
    embedding_width: str = ""
    """The config key for the width of the embedding, if it may differ from the hidden size."""
    ties: bool = True
    """Whether lm_head can share the embedding's weights."""
    more: Callable[[Text], list[Tensor]] | None = None
    """A function that returns additional weights outside the layers."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text model's config, its family's traits, and the specs of each layer's caches."""

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
            if config.has("kv_lora_rank") and config.has("qk_nope_head_dim"):
                return mixers.latent(config)  # latent attention that is cached as K and V
            made = mixers.attention(config, **attention_options(text, spec))
            return made * 2 if text.traits.crosses else made
        case LatentAttention():
            return mixers.latent(config, gate=config.flag("mla_use_output_gate"))
        case Indexer():
            return mixers.indexer(config)
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
