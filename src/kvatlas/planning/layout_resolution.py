"""Which memory order a plan uses: resolved once, here, for all layers.

Backends declare orders, or none. What all of them take is a candidate, unless the
model's pages differ in shape: then only orders in which a page is one stretch can
hold them side by side. The first candidate is used, or the one that the caller chose.
"""

from __future__ import annotations

from collections import Counter

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import ENGINE_LAYOUTS, Layout
from kvatlas.planning.backends import ANY_ORDER, Backend
from kvatlas.planning.sized_layers import SizedLayer


def supported_orders(backends: list[Backend]) -> tuple[str, ...]:
    """Orders that every backend takes, the most preferred first.

    >>> from kvatlas.planning.backends import BACKENDS
    >>> supported_orders([BACKENDS["FLASHINFER_SM100"], BACKENDS["FLASH_ATTN"]])
    ('LBHNC', 'BLHNC')
    """
    declared = list(
        {backend.name: backend.layouts for backend in backends if backend.layouts}.values()
    )
    if not declared:
        return ANY_ORDER
    if len(set(declared)) == 1:
        return declared[0]
    common = set.intersection(*map(set, declared))
    first = Counter(orders[0] for orders in declared)
    ranked = [layout.order for layout in ENGINE_LAYOUTS if layout.order in common]
    return tuple(sorted(ranked, key=lambda order: -first[order]))


def candidate_orders(layers: list[SizedLayer]) -> tuple[str, ...]:
    """Orders that can hold the pages of all layers."""
    orders = supported_orders([layer.backend for layer in layers if layer.backend])
    shapes = {(layer.page.heads, layer.page.states, layer.nbytes) for layer in layers}
    if len(shapes) > 1:
        orders = tuple(order for order in orders if Layout(order).page_contiguous)
    return orders


def resolve_order(candidates: tuple[str, ...], chosen: str | None) -> Layout:
    """The order that was chosen, if it is a candidate; else the first."""
    layout = Layout(next(iter(candidates), "LBNHC") if chosen is None else chosen)
    if layout.order not in candidates:
        got, hint = "backends that share no order", "Choose another backend"
        if candidates:
            got, hint = str(layout), f"Use one of {', '.join(candidates)}"
        raise AtlasError(Code.LAYOUT_REFUSED, got=got, hint=hint)
    return layout
