"""Policies `vllm` and `uniform`: the plans of a release of vLLM, byte for byte.

The differences between releases and chips are tables in `engine_rules`.

`uniform` is the plan of vLLM without its hybrid manager: layers with windows and chunks keep
all tokens, so that all layers share one block table.
"""

from __future__ import annotations

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout
from kvatlas.planning.block_size import block_size
from kvatlas.planning.grouping import GroupDraft, group_layers, promote
from kvatlas.planning.layout_resolution import (
    candidate_orders,
    layers_in_layout,
    resolve_order,
)
from kvatlas.planning.placing import PlanDraft, PoolDraft, make_plan
from kvatlas.planning.plans import Plan
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.sized_layers import SizedLayer, size_layers


def plan_vllm(request: PlanRequest) -> Plan:
    """Return the plan that the release of vLLM in the request makes."""
    return make_plan(request, draft_vllm(request), policy=request.policy)


def plan_uniform(request: PlanRequest) -> Plan:
    """Return the plan that vLLM makes if its hybrid manager is disabled."""
    return make_plan(request, draft_vllm(request, uniform=True), policy=request.policy)


def draft_vllm(
    request: PlanRequest, *, uniform: bool = False, layers: list[SizedLayer] | None = None
) -> PlanDraft:
    """Return vLLM's plan as a draft: its pools and block size, before memory is divided.

    If `uniform` is true, layers with windows or chunks keep all tokens. `layers` are the model's
    layers at vLLM's block size, if the caller has them already.
    """
    size = block_size(request)
    if layers is None:
        layers = size_layers(request, block=size.tokens, state_padding=size.state_padding)
    orders = candidate_orders(layers)
    layout = resolve_order(orders, request.layout)
    layers = layers_in_layout(layers, layout)
    if uniform:
        layers = promote(layers)
    groups = group_layers(layers, layout)
    _refuse_unlike_pages(groups, layout)
    rounds_sum = not request.rules.rounds_each_layer
    pool = PoolDraft(tuple(groups), layout, interleaved=False, rounds_sum=rounds_sum)
    return PlanDraft((pool,), size, orders)


def _refuse_unlike_pages(groups: list[GroupDraft], layout: Layout) -> None:
    """Raise an error if pages differ in size, unless the layout supports it."""
    pages = {layer.nbytes for group in groups for layer in group.layers}
    if len(pages) > 1 and (
        not layout.page_contiguous or (len(groups) > 1 and layout.layer_compact)
    ):
        raise AtlasError(
            Code.LAYOUT_REFUSED,
            "Groups with different page sizes cannot overlay each other in this layout",
            got=f"layout {layout} and pages of {', '.join(map(str, sorted(pages)))} bytes",
            hint="Pass layout='BLHNC' or layout='BLNHC', or policy='atlas'",
        )
