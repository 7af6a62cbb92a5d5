"""Determine whether an engine can run a plan of policy atlas, and list the obstacles.

vLLM takes the offsets and strides of a plan as they are, but has one allocation, one block table
per group of layers, and kernels that do not support split recurrent states. vLLM splits blocks into
kernel blocks only if the blocks of a layer are adjacent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvatlas.geometry import ENGINE_LAYOUTS, Layout
from kvatlas.planning.plan_data import PlanData


def obstacles(plan: PlanData) -> tuple[str, ...]:
    """Return the reasons why vLLM cannot run a plan, as phrases; empty if vLLM can run it.

    Plans of other policies describe what an engine does, so they have no obstacles.

    >>> from kvatlas.planning import plan
    >>> obstacles(plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2))
    ('recurrent states are split into 4 parts',)
    >>> obstacles(plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2, runs_on="vllm"))
    ()
    """
    return tuple(dict.fromkeys(_obstacles(plan))) if plan.policy == "atlas" else ()


def _obstacles(plan: PlanData) -> Iterator[str]:
    pools = max(Counter(pool.stage for pool in plan.pools).values(), default=1)
    if pools > 1:
        yield f"a rank has {pools} pools"
    for region in plan.regions:
        layout = Layout(region.layout)
        if region.splits > 1:
            yield f"recurrent states are split into {region.splits} parts"
        if layout not in ENGINE_LAYOUTS:
            yield f"no engine has the layout {layout}"
        if region.kernel_block < region.block and layout.block_outermost:
            yield (
                f"blocks of {region.block} tokens are interleaved with other layers, but kernels "
                f"read {region.kernel_block}"
            )
