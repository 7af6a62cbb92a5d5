"""The feed-forward part of a layer: an MLP, or experts with a router.

All families use the same arithmetic, but different config keys for the number of experts,
their width, the shared experts, and the layers that have experts. This module lists all of
these keys.
"""

from __future__ import annotations

from kvatlas.models.config import Config, bad
from kvatlas.models.weights.tensor import Tensor, TensorClass, linear

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTH = (
    "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size",
    "shared_intermediate_size", "share_expert_dim",
)  # fmt: skip
_WIDTH = (
    "intermediate_size_mlp", "dense_intermediate_size", "intermediate_size", "n_inner",
    "decoder_ffn_dim", "ffn_dim", "ffn_hidden_size", "dim_ff", "dff",
)  # fmt: skip
_RATIO = ("expansion_ratio", "intermediate_multiple_size")


def mlp(
    config: Config,
    *,
    kind: TensorClass = "mlp",
    name: str = "mlp",
    width: int | None = None,
    hidden: int | None = None,
    gated: bool = True,
    bias: bool = False,
    copies: int = 1,
) -> list[Tensor]:
    """Return the matrices of an MLP: up, down, and a gate if it is `gated`."""
    hidden, width = hidden or config.hidden(), width or mlp_width(config)
    tensors = []
    for way in ("gate", "up") if gated else ("up",):
        tensors += linear(
            kind, f"{name}.{way}_proj", width, hidden, parts=width, copies=copies, bias=bias
        )
    return tensors + linear(
        kind, f"{name}.down_proj", hidden, width, parts=width, copies=copies,
        bias=bias, whole_bias=True,
    )  # fmt: skip


def mlp_width(config: Config, *, ratio: int = 0) -> int:
    """Return the width of a dense layer's MLP: `ratio` x hidden size if the config has none."""
    # LFM2 uses 2/3 of the width in its config, rounded up to a multiple of block_multiple_of.
    if config.flag("block_auto_adjust_ff_dim"):
        width = 2 * config.count("block_ff_dim", "intermediate_size") // 3
        scale, unit = config.get("block_ffn_dim_multiplier"), config.count("block_multiple_of")
        width = int((1 if scale is None else scale) * width)
        return -(-width // unit) * unit
    default = config.count(*_RATIO, default=ratio) * config.hidden() if ratio else None
    return config.count(*_WIDTH, default=default)


def experts(
    config: Config,
    *,
    name: str = "mlp",
    gated: bool = True,
    bias: bool = False,
    shared_gate: bool = False,
) -> list[Tensor]:
    """Return the weights of a router, its experts and the shared experts."""
    hidden, number = config.hidden(), _expert_count(config)
    inner = config.maybe("moe_latent_size", "routed_expert_hidden_size") or hidden
    width = config.count(*_EXPERT_WIDTH)
    tensors = linear("router", f"{name}.gate", number, hidden, bias=bias)
    tensors += mlp(
        config, kind="experts", name=f"{name}.experts.0", width=width, hidden=inner,
        gated=gated, bias=bias, copies=number,
    )  # fmt: skip
    if inner != hidden:  # latent experts are narrower than the hidden size
        tensors += linear("shared_experts", f"{name}.fc1_latent_proj", inner, hidden)
        tensors += linear("shared_experts", f"{name}.fc2_latent_proj", hidden, inner)
    if shared := shared_width(config):
        shared_name = f"{name}.shared_experts"
        tensors += mlp(config, kind="shared_experts", name=shared_name, width=shared, gated=gated)
        if shared_gate:
            tensors += linear("router", f"{name}.shared_expert_gate", 1, hidden)
    return tensors


def shared_width(config: Config) -> int:
    """Return the total width of the shared experts; 0 if there are none."""
    number = next((config.natural(name) for name in _SHARED if config.has(name)), 1)
    width = next((config.natural(name) for name in _SHARED_WIDTH if config.has(name)), None)
    if width is None and any(config.has(name) for name in _SHARED):
        width = config.count(*_EXPERT_WIDTH)
    return number * (width or 0)


def sparse_layers(config: Config, depth: int) -> list[bool]:
    """Return for each layer whether it has experts.

    >>> sizes = {"n_routed_experts": 8, "first_k_dense_replace": 1}
    >>> sparse_layers(Config(sizes), 3)
    [False, True, True]
    """
    if not _expert_count(config):
        return [False] * depth
    marks = config.get("mlp_layer_types", "moe_layer_freq")
    if isinstance(marks, list):
        if len(marks) < depth:
            raise bad(
                "mlp_layer_types or moe_layer_freq must have one entry per layer",
                f"{len(marks)} entries for {depth} layers",
            )
        return [mark in ("sparse", "moe", 1, True) for mark in marks[:depth]]
    if named := config.text("moe_layers_enum"):
        chosen = set(named.split(","))
        return [str(index) in chosen for index in range(depth)]
    if config.has("moe_layer_start_index"):
        return _between(config, depth)
    first = config.natural("first_k_dense_replace") or config.natural("num_dense_layers")
    step = config.maybe("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq") or 1
    period, offset = config.maybe("expert_layer_period"), config.natural("expert_layer_offset")
    dense = set(config.listing("mlp_only_layers") or ())
    if config.has("moe_layer_freq"):  # DeepSeek counts from 0, the others from 1
        return [i >= first and i % step == 0 for i in range(depth)]
    if period:
        return [i % period == offset for i in range(depth)]
    return [i >= first and i not in dense and (i + 1) % step == 0 for i in range(depth)]


def _between(config: Config, depth: int) -> list[bool]:
    """Return for each layer of Ernie-4.5 whether it has experts."""
    first, last = config.natural("moe_layer_start_index"), config.get("moe_layer_end_index")
    last = last if isinstance(last, int) and last >= 0 else depth - 1
    step = config.count("moe_layer_interval", default=1)
    return [first <= i <= last and (i + 1) % step == 0 for i in range(depth)]


def _expert_count(config: Config) -> int:
    if not config.flag("is_moe", default=True):
        return 0
    return next((n for name in _EXPERTS if (n := config.size(name))), 0)
