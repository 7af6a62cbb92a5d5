"""Make a plan from a transformers config, for a given batch size and sequence length."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec.structs import replace

from kvatlas.geometry import DType
from kvatlas.geometry.integers import positive
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.specs import Indexer

_AMPLE = 1 << 44
"""More bytes than any cache needs. The first plan only computes the blocks per sequence."""


def make_plan(
    config: Any,
    *,
    batch: int,
    max_len: int,
    kv_dtype: str | None = None,
    ssm_dtype: str = "fp32",
    in_flight: int | None = None,
    prefix_caching: bool = False,
    **options: Any,
) -> Plan:
    """Make a plan that has exactly enough blocks for `batch` sequences of `max_len` tokens.

    K, V and latents are stored in `kv_dtype`, by default the model's dtype. Keys of indexers are
    stored in the model's dtype, so that they select the same tokens as in transformers' own cache.
    Recurrent states are stored in `ssm_dtype`; transformers computes them in fp32. `in_flight` is
    the maximum number of tokens in one forward call, by default `max_len`. Layers with a sliding
    window need blocks for these tokens in addition to the window. If `prefix_caching` is true, the
    plan has more blocks, for the states that `PrefixReuse` stores. Further `options` are passed to
    `kvatlas.plan`: layout, pack, block_size, states, tp, pp.
    """
    dtype = _dtype(config)
    model = _with_index_keys(Model.load(config, conv_dtype=dtype, ssm_dtype=ssm_dtype), dtype)
    if kv_dtype is None and model.cache == "auto":
        kv_dtype = dtype
    in_flight = max_len if in_flight is None else in_flight
    options |= {"kv_dtype": kv_dtype, "max_len": max_len, "in_flight": in_flight}
    options["prefix_caching"] = prefix_caching
    probe = plan(model, memory=_AMPLE, **options)
    sequences = positive(batch, "the batch size")
    needed = probe.blocks_per_request()
    # Plans reserve one block of each pool for engines that need a null block.
    stages: Counter[int] = Counter()
    for pool in probe.pools:
        stages[pool.stage] += (needed[pool.index] * sequences + 1) * pool.block_bytes
    return plan(model, memory=max(stages.values()), **options)


def _with_index_keys(model: Model, dtype: str) -> Model:
    """Return the model with its indexers' keys stored in `dtype`."""
    layers = tuple(
        replace(layer, spec=replace(layer.spec, cache=dtype))
        if isinstance(layer.spec, Indexer)
        else layer
        for layer in model.layers
    )
    return replace(model, layers=layers)


def _dtype(config: Any) -> str:
    """Return the dtype that the model computes in; fp32 if its config specifies none."""
    text = config.get_text_config(decoder=True)
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    return "fp32" if dtype is None else DType.of(str(dtype).removeprefix("torch.")).name
