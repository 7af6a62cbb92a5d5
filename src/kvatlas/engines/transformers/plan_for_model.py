"""From a transformers config to pages: what the model caches, a plan, and its memory."""

from __future__ import annotations

from typing import Any, Literal

from kvatlas.cache import Cache, allocate
from kvatlas.geometry import DType, positive
from kvatlas.models import Model
from kvatlas.planning import Plan, plan

_AMPLE = 1 << 44
"""Bytes in which any cache fits: the first plan only tells how many blocks a sequence takes."""


def make_plan(
    config: Any,
    *,
    batch: int,
    max_len: int,
    layout: str | None = None,
    pack: int | Literal["auto"] = "auto",
    kv_dtype: str | None = None,
    ssm_dtype: str = "fp32",
    block_size: int | None = None,
    in_flight: int | None = None,
    states: Literal["auto", "shared", "apart"] = "auto",
    tp: int = 1,
    pp: int = 1,
) -> Plan:
    """A plan for `batch` sequences of `max_len` tokens, and nothing more.

    K, V and latents are kept in `kv_dtype`, or in the model's own dtype; recurrent states
    in `ssm_dtype`, since transformers computes them in fp32. `in_flight` are the most
    tokens that one forward call brings; windows must cover them too.
    """
    dtype = _dtype(config)
    model = Model.load(config, conv_dtype=dtype, ssm_dtype=ssm_dtype)
    if kv_dtype is None and model.cache == "auto":
        kv_dtype = dtype
    options: dict[str, Any] = {
        "layout": layout,
        "pack": pack,
        "kv_dtype": kv_dtype,
        "block_size": block_size,
        "max_len": max_len,
        "in_flight": max_len if in_flight is None else in_flight,
        "states": states,
        "prefix_caching": False,
        "tp": tp,
        "pp": pp,
    }
    probe = plan(model, memory=_AMPLE, **options)
    sequences = positive(batch, "the batch")
    needed = probe.blocks_per_request()
    # Plans keep one block of each pool for engines that want a null block.
    stages = [[p for p in probe.pools if p.stage == stage] for stage in range(pp)]
    memory = max(
        sum((needed[p.index] * sequences + 1) * p.block_bytes for p in pools) for pools in stages
    )
    return plan(model, memory=memory, **options)


def make_cache(
    config: Any, *, batch: int, max_len: int, device: Any = "cpu", **options: Any
) -> Cache:
    """Pages for a model: `make_plan`, allocated."""
    return allocate(make_plan(config, batch=batch, max_len=max_len, **options), device=device)


def _dtype(config: Any) -> str:
    """What the model computes in: fp32 where its config does not say."""
    text = config.get_text_config(decoder=True)
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    return "fp32" if dtype is None else DType.of(str(dtype).removeprefix("torch.")).name
