"""The weights of token mixers: all kinds of attention and of recurrent layers.

Each function returns a list of tensors. The spec of the layer's cache provides sizes, and the
config provides the rest: ranks of projections, gates, biases.
"""

from __future__ import annotations

from typing import Literal

from kvatlas.models.config import Config
from kvatlas.models.weights.tensor import Tensor, TensorClass, linear, norm
from kvatlas.specs import GatedDeltaNet, KimiDelta, Mamba1, Mamba2

QkNorm = Literal["none", "head", "row"]
"""How queries and keys are normalised: not at all, per head, or over all heads."""


def attention(
    config: Config,
    *,
    name: str = "self_attn",
    width: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    v_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: QkNorm = "none",
    norm_bias: bool = False,
    gate: int = 0,
    sinks: bool = False,
    values: bool = True,
) -> list[Tensor]:
    """Return the weights of multi-head attention; sizes default to the model's.

    `width` is the size of the input rows. `gate` is the number of output gates per head (0, 1 or
    the head size), which the query projection also computes. If `values` is false, the keys
    serve as values, and there is no V projection.
    """
    hidden = config.hidden()
    width = width or hidden
    heads, kv_heads = heads or config.query_heads(), kv_heads or config.key_heads()
    head_dim = head_dim or config.head_dim()
    v_dim = v_dim or head_dim
    kind: TensorClass = "attention"
    tensors = [
        *linear(
            kind, f"{name}.q_proj", heads * (head_dim + gate), width, parts=heads, bias=qkv_bias
        ),
        *linear(kind, f"{name}.k_proj", kv_heads * head_dim, width, parts=kv_heads, bias=qkv_bias),
        *linear(
            kind, f"{name}.o_proj", hidden, heads * v_dim, parts=heads,
            bias=out_bias, whole_bias=True,
        ),
    ]  # fmt: skip
    if values:
        rows = kv_heads * v_dim
        tensors += linear(kind, f"{name}.v_proj", rows, width, parts=kv_heads, bias=qkv_bias)
    if sinks:
        tensors.append(Tensor(kind, f"{name}.sinks", heads, parts=heads))
    if qk_norm == "head":
        tensors += [norm(f"{name}.{side}_norm", head_dim, bias=norm_bias) for side in "qk"]
    elif qk_norm == "row":
        tensors.append(norm(f"{name}.q_norm", heads * head_dim, parts=heads))
        tensors.append(norm(f"{name}.k_norm", kv_heads * head_dim, parts=kv_heads))
    return tensors


def latent(config: Config, *, gate: bool = False) -> list[Tensor]:
    """Return the weights of MLA.

    Tensor-parallel ranks replicate the down-projections and divide the other projections by heads.
    """
    hidden, heads, name = config.hidden(), config.query_heads(), "self_attn"
    rope, rank = config.count("qk_rope_head_dim"), config.count("kv_lora_rank")
    nope, v_dim = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    bias = config.flag("attention_bias")
    query = heads * (nope + rope)
    kind: TensorClass = "attention"
    tensors = [
        *linear(kind, f"{name}.kv_a_proj_with_mqa", rank + rope, hidden, bias=bias),
        norm(f"{name}.kv_a_layernorm", rank),
        *linear(kind, f"{name}.kv_b_proj", heads * (nope + v_dim), rank, parts=heads),
        *linear(
            kind, f"{name}.o_proj", hidden, heads * v_dim, parts=heads, bias=bias, whole_bias=True
        ),
    ]
    if low := config.size("q_lora_rank"):
        tensors += linear(kind, f"{name}.q_a_proj", low, hidden, bias=bias)
        tensors.append(norm(f"{name}.q_a_layernorm", low))
        tensors += linear(kind, f"{name}.q_b_proj", query, low, parts=heads)
    else:
        tensors += linear(kind, f"{name}.q_proj", query, hidden, parts=heads)
    if gate:
        tensors += linear(kind, f"{name}.g_proj", heads * v_dim, hidden, parts=heads)
    return tensors


def latent_indexer(config: Config) -> list[Tensor]:
    """Return the weights of DeepSeek-V3.2's and GLM-5's indexer, replicated on every rank."""
    hidden, name = config.hidden(), "self_attn.indexer"
    heads, head_dim = config.count("index_n_heads"), config.count("index_head_dim")
    return [
        *linear("indexer", f"{name}.wq_b", heads * head_dim, config.count("q_lora_rank")),
        *linear("indexer", f"{name}.wk", head_dim, hidden),
        norm(f"{name}.k_norm", head_dim, bias=True),
        *linear("indexer", f"{name}.weights_proj", heads, hidden),
    ]


def indexer(config: Config) -> list[Tensor]:
    """Return the weights of the indexer, which is `latent_indexer` or `block_indexer`."""
    section = config.section("sparse_attention_config") or config
    latent_rows = section is config and config.has("q_lora_rank")
    return latent_indexer(config) if latent_rows else block_indexer(config, section)


def block_indexer(config: Config, section: Config) -> list[Tensor]:
    """Return the weights of an indexer of plain attention, as in MiniMax-M3.

    The weights are two projections and two norms. `section` is the part of `config` that describes
    the indexer.
    """
    heads = section.count("sparse_num_index_heads", "index_n_heads", "indexer_n_heads")
    head_dim = section.count("sparse_index_dim", "index_head_dim", "indexer_head_dim")
    keys = section.count("indexer_kv_heads", default=1)
    name = "self_attn.indexer"
    return [
        *linear("indexer", f"{name}.q_proj", heads * head_dim, config.hidden()),
        *linear("indexer", f"{name}.k_proj", keys * head_dim, config.hidden()),
        norm(f"{name}.q_norm", head_dim),
        norm(f"{name}.k_norm", head_dim),
    ]


def compressed_attention(config: Config, ratio: int) -> list[Tensor]:
    """Return the weights of DeepSeek-V4's attention in a layer with this compression ratio.

    K and V are one latent row, and the output projection is grouped.
    """
    hidden, heads, head_dim = config.hidden(), config.query_heads(), config.head_dim()
    low, groups = config.count("q_lora_rank"), config.count("o_groups")
    out = groups * config.count("o_lora_rank")
    name = "self_attn"
    tensors = [
        Tensor("attention", f"{name}.sinks", heads, parts=heads),
        *linear("attention", f"{name}.q_a_proj", low, hidden),
        norm(f"{name}.q_a_norm", low),
        *linear("attention", f"{name}.q_b_proj", heads * head_dim, low, parts=heads),
        *linear("attention", f"{name}.kv_proj", head_dim, hidden),
        norm(f"{name}.kv_norm", head_dim),
        *linear("attention", f"{name}.o_a_proj", out, heads * head_dim // groups, parts=groups),
        *linear("attention", f"{name}.o_b_proj", hidden, out, parts=groups),
    ]
    if ratio:
        tensors += _compressor("attention", f"{name}.compressor", hidden, head_dim, ratio)
    if ratio == 4:  # at this ratio there are many compressed states, so an indexer selects some
        name = f"{name}.indexer"
        index_heads, index_dim = config.count("index_n_heads"), config.count("index_head_dim")
        tensors += _compressor("indexer", f"{name}.compressor", hidden, index_dim, ratio)
        tensors += linear("indexer", f"{name}.wq_b", index_heads * index_dim, low)
        tensors += linear("indexer", f"{name}.weights_proj", index_heads, hidden)
    return tensors


def shared_rows(config: Config, ratio: int, *, chooses: bool) -> list[Tensor]:
    """Return the weights of DeepSeek-V4.1's compressor and indexer in one layer.

    The layer stores one row for every `ratio` tokens, or no rows if `ratio` is 0.
    `chooses` is whether the layer selects rows.
    """
    hidden, head_dim, name = config.hidden(), config.head_dim(), "self_attn"
    tensors: list[Tensor] = []
    for part in ("wkv", "wgate")[: min(ratio, 2)]:
        tensors += linear("attention", f"{name}.compressor.{part}", head_dim, hidden)
    if ratio:
        tensors.append(norm(f"{name}.compressor.norm", head_dim))
    if not chooses:
        return tensors
    heads, width = config.count("index_n_heads"), config.count("index_head_dim")
    tensors += linear("indexer", f"{name}.indexer.wq_b", heads * width, config.count("q_lora_rank"))
    tensors += linear("indexer", f"{name}.indexer.weights_proj", heads, hidden)
    if ratio:
        tensors += linear("indexer", f"{name}.indexer.wk", width, head_dim)
        tensors.append(norm(f"{name}.indexer.k_norm", width))
    return tensors


def _compressor(
    kind: TensorClass, name: str, hidden: int, head_dim: int, ratio: int
) -> list[Tensor]:
    # At ratio 4 windows overlap: each state is a sum over two windows.
    width = head_dim * (2 if ratio == 4 else 1)
    return [
        Tensor(kind, f"{name}.ape", ratio, width),
        *linear(kind, f"{name}.wkv", width, hidden),
        *linear(kind, f"{name}.wgate", width, hidden),
        norm(f"{name}.norm", head_dim),
    ]


def delta_net(hidden: int, spec: GatedDeltaNet) -> list[Tensor]:
    """Return the weights of gated delta net: q, k, v, output gate, two scalars per value head."""
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    name, parts, heads = "linear_attn", spec.key_heads, spec.value_heads
    return [
        *linear("recurrent", f"{name}.in_proj_qkv", 2 * keys + values, hidden, parts=parts),
        *linear("recurrent", f"{name}.in_proj_z", values, hidden, parts=parts),
        *linear("recurrent", f"{name}.in_proj_b", heads, hidden, parts=parts),
        *linear("recurrent", f"{name}.in_proj_a", heads, hidden, parts=parts),
        Tensor("recurrent", f"{name}.conv1d", 2 * keys + values, spec.kernel, parts=parts),
        Tensor("recurrent", f"{name}.dt_bias", heads, parts=parts),
        Tensor("recurrent", f"{name}.A_log", heads, parts=parts),
        norm(f"{name}.norm", spec.value_dim),
        *linear("recurrent", f"{name}.out_proj", hidden, values, parts=parts),
    ]


def kimi_delta(hidden: int, spec: KimiDelta, *, full_gate: bool) -> list[Tensor]:
    """Return the weights of Kimi delta attention; its gate is low-rank unless `full_gate`."""
    heads, head_dim = spec.heads, spec.head_dim
    width, name = heads * head_dim, "self_attn"
    tensors = [
        Tensor("recurrent", f"{name}.conv1d", 3 * width, spec.kernel, parts=heads),
        Tensor("recurrent", f"{name}.dt_bias", width, parts=heads),
        Tensor("recurrent", f"{name}.A_log", heads, parts=heads),
        *linear("recurrent", f"{name}.f_a_proj", head_dim, hidden),
        *linear("recurrent", f"{name}.f_b_proj", width, head_dim, parts=heads),
        *linear("recurrent", f"{name}.b_proj", heads, hidden, parts=heads),
        norm(f"{name}.o_norm", head_dim),
        *linear("recurrent", f"{name}.o_proj", hidden, width, parts=heads),
    ]
    for side in "qkv":
        tensors += linear("recurrent", f"{name}.{side}_proj", width, hidden, parts=heads)
    if full_gate:
        return tensors + linear("recurrent", f"{name}.g_proj", width, hidden, parts=heads)
    tensors += linear("recurrent", f"{name}.g_a_proj", head_dim, hidden)
    return tensors + linear("recurrent", f"{name}.g_b_proj", width, head_dim, parts=heads)


def lightning(config: Config) -> list[Tensor]:
    """Return the weights of lightning attention: q, k, v, output gate, norm over all heads."""
    hidden, heads, name = config.hidden(), config.query_heads(), "self_attn"
    width = heads * config.head_dim()
    return [
        *linear("recurrent", f"{name}.qkv_proj", 3 * width, hidden, parts=heads),
        *linear("recurrent", f"{name}.output_gate", width, hidden, parts=heads),
        *linear("recurrent", f"{name}.out_proj", hidden, width, parts=heads),
        norm(f"{name}.norm", width, parts=heads),
    ]


def mamba2(
    hidden: int,
    spec: Mamba2,
    *,
    name: str,
    bias: bool = False,
    conv_bias: bool = True,
    normed: bool = True,
) -> list[Tensor]:
    """Return the weights of a Mamba-2 mixer.

    Tensor-parallel ranks divide z, x and dt by heads, and B and C by groups.
    """
    heads, groups = spec.heads, spec.groups
    inner, shared = heads * spec.head_dim, 2 * groups * spec.state_size
    conv = spec.kernel + conv_bias
    tensors = [
        *linear("recurrent", f"{name}.in_proj", 2 * inner + heads, hidden, parts=heads, bias=bias),
        *linear("recurrent", f"{name}.in_proj", shared, hidden, parts=groups, bias=bias),
        Tensor("recurrent", f"{name}.conv1d", inner, conv, parts=heads),
        Tensor("recurrent", f"{name}.conv1d", shared, conv, parts=groups),
        Tensor("recurrent", f"{name}.A_log, D, dt_bias", heads, 3, parts=heads),
        *linear(
            "recurrent", f"{name}.out_proj", hidden, inner, parts=heads, bias=bias, whole_bias=True
        ),
    ]
    return [*tensors, norm(f"{name}.norm", inner, parts=heads)] if normed else tensors


def mamba1(hidden: int, spec: Mamba1, *, name: str, rank: int, normed: bool) -> list[Tensor]:
    """Return the weights of a Mamba-1 mixer, whose time-step projection has rank `rank`."""
    inner, states = spec.inner, spec.state_size
    tensors = [
        *linear("recurrent", f"{name}.in_proj", 2 * inner, hidden, parts=inner),
        Tensor("recurrent", f"{name}.conv1d", inner, spec.kernel + 1, parts=inner),
        *linear("recurrent", f"{name}.x_proj", rank + 2 * states, inner, parts=inner),
        *linear("recurrent", f"{name}.dt_proj", inner, rank, parts=inner, bias=True),
        Tensor("recurrent", f"{name}.A_log, D", inner, states + 1, parts=inner),
        *linear("recurrent", f"{name}.out_proj", hidden, inner, parts=inner),
    ]
    return [*tensors, norm(f"{name}.dt_b_c_layernorm", rank + 2 * states)] if normed else tensors


def short_conv(hidden: int, width: int, kernel: int) -> list[Tensor]:
    """Return the weights of LFM2's gated short convolution."""
    return [
        *linear("recurrent", "conv.in_proj", 3 * width, hidden, parts=width),
        Tensor("recurrent", "conv.conv", width, kernel, parts=width),
        *linear("recurrent", "conv.out_proj", hidden, width, parts=width),
    ]


def rwkv7(config: Config, *, first: bool) -> list[Tensor]:
    """Return the weights of RWKV-7's time mixing: four full and four low-rank projections.

    The `first` layer has only three low-rank projections: it lacks the one for values.
    """
    hidden, name = config.hidden(), "attn"
    heads = hidden // config.count("head_dim", "head_size", default=64)
    tensors = [
        # Six token-shift weights, three key weights, and the group norm.
        Tensor("recurrent", f"{name}.x_r, x_w, x_k, x_v, x_a, x_g", hidden, 6),
        Tensor("recurrent", f"{name}.k_k, k_a, r_k", hidden, 3, parts=heads),
        norm(f"{name}.g_norm", hidden, bias=True, parts=heads),
    ]
    for letter in "rkvo":
        tensors += linear("recurrent", f"{name}.{letter}_proj", hidden, hidden, parts=heads)
    ranks = {"w": "decay", "a": "a", "g": "gate"} | ({} if first else {"v": "v"})
    for letter, word in ranks.items():
        rank = config.count(f"{word}_low_rank_dim")
        tensors += linear("recurrent", f"{name}.{letter}_lora.0", rank, hidden)
        bias = letter != "g"
        tensors += linear(
            "recurrent", f"{name}.{letter}_lora.2", hidden, rank, parts=heads, bias=bias
        )
    return tensors
