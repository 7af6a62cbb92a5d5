"""Host pools of SGLang (HiCache). A pool has one buffer, whose axes depend on the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvatlas.engines.engine_memory import EngineMemory, check_known_version, model_for
from kvatlas.engines.paged_buffer import attention_layers, describe_buffer
from kvatlas.engines.sglang.device_pools import KNOWN, extends
from kvatlas.errors import AtlasError, Code

HEADS = {
    "layer_first": "SLNHC",
    "page_first": "SNLHC",
    "page_first_direct": "SBLNHC",
    "page_head": "SBHNLC",
    "page_unified": "BLSNHC",
}
"""The axes of `MHATokenToKVPoolHost.kv_buffer`, without the axis of head groups."""
ROWS = {
    "layer_first": "LNHC",
    "page_first": "NLHC",
    "page_first_direct": "BLNHC",
    "page_unified": "BLNC",
}
"""The axes of `MLATokenToKVPoolHost.kv_buffer`."""


def describe_host_pool(
    model: Any,
    pool: Any,
    *,
    layers: Sequence[int] | None = None,
    head_group: int = 0,
    tp: int = 1,
    max_len: int | None = None,
    version: str | None = None,
) -> EngineMemory:
    """Return the plan of a host pool of SGLang, `MHATokenToKVPoolHost` or `MLATokenToKVPoolHost`.

    `layers` lists the decoder layers of the pool, by default the consecutive layers that the pool
    itself specifies. A page of layout page_unified may have several head groups. The plan then has
    a rank for each group, and the result describes the memory of `head_group`.

    Pass `model.with_cache(...)` if the pool stores fp8, which SGLang keeps as bytes.
    """
    check_known_version("sglang", KNOWN, version)
    loaded = model_for("sglang", model)
    latent = extends(pool, "MLATokenToKVPoolHost")
    known = ROWS if latent else HEADS
    if not (latent or extends(pool, "MHATokenToKVPoolHost")) or pool.layout not in known:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "kvatlas cannot describe this host pool of SGLang",
            got=f"{type(pool).__name__} with layout {getattr(pool, 'layout', None)!r}",
            hint=f"Pass a pool of attention with one of the layouts {', '.join(known)}",
        )
    if layers is None:
        first = pool.start_layer or 0
        layers = range(first, first + pool.target_layer_num)
    buffer, groups = pool.kv_buffer, 1
    if pool.layout == "page_unified" and not latent:
        groups = pool.head_group_num
        buffer = buffer[:, head_group]
    stored = str(pool.dtype)
    return describe_buffer(
        loaded,
        attention_layers(loaded, layers),
        buffer,
        known[pool.layout],
        page=pool.page_size,
        tp=tp * groups,
        max_len=max_len,
        dtype=None if stored == "torch.uint8" else stored,
        own_start=groups > 1,
    )
