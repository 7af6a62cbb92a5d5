"""A plan of a million blocks and ten thousand layers: drawn as a sample."""

from __future__ import annotations

import msgspec

from kvatlas.planning import Plan, plan

BLOCKS, LAYERS = 10**6, 10**4


def large_plan(order: str) -> Plan:
    """Qwen3-8B's plan with very many layers and blocks."""
    made = plan("Qwen3-8B", memory="1GiB", max_len=512, layout=order)
    (region,), (pool,) = made.regions, made.pools
    layer = region.layers[0]
    layers = tuple(
        msgspec.structs.replace(layer, name=f"model.layers.{n}.self_attn.attn", index=n)
        for n in range(LAYERS)
    )
    page = region.page_bytes
    outside = order.startswith("L")
    strides = {
        "page_stride": page * BLOCKS if outside else region.page_stride,
        "block_stride": page if outside else page * LAYERS,
    }
    return msgspec.structs.replace(
        made,
        memory=page * LAYERS * BLOCKS,
        pools=(msgspec.structs.replace(pool, blocks=BLOCKS, block_bytes=page * LAYERS),),
        regions=(msgspec.structs.replace(region, layers=layers, **strides),),
    )
