"""Which memory order a plan uses: resolved once, here, for all layers.

Backends declare orders, or none. What all of them take is a candidate, unless a field
could not be viewed in it, or the model's pages differ in shape: then only orders in which
a page is one stretch can hold them side by side. The first candidate is used, or the one
that the caller chose.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import ENGINE_LAYOUTS, Layout, Page
from kvatlas.planning.backends import ANY_ORDER, Backend
from kvatlas.planning.sized_layers import SizedLayer, page_of


def supported_orders(
    backends: list[Backend], undeclared: tuple[str, ...] = ANY_ORDER
) -> tuple[str, ...]:
    """Orders that every backend takes, the most preferred first; `undeclared` where none says.

    >>> from kvatlas.planning.backends import BACKENDS
    >>> supported_orders([BACKENDS["FLASHINFER_SM100"], BACKENDS["FLASH_ATTN"]])
    ('LBHNC', 'BLHNC')
    """
    declared = list(
        {backend.name: backend.layouts for backend in backends if backend.layouts}.values()
    )
    if not declared:
        return undeclared
    if len(set(declared)) == 1:
        return declared[0]
    common = set.intersection(*map(set, declared))
    first = Counter(orders[0] for orders in declared)
    ranked = [layout.order for layout in ENGINE_LAYOUTS if layout.order in common]
    return tuple(sorted(ranked, key=lambda order: -first[order]))


def viewable_orders(orders: tuple[str, ...], layers: list[SizedLayer]) -> tuple[str, ...]:
    """Those orders in which every field of every layer is a view.

    >>> from kvatlas.planning import plan
    >>> plan("Qwen3-8B", memory="60GiB", kv_dtype="nvfp4").accepted_layouts  # whole pages
    ('LBNHC', 'LBHNC', 'BLNHC', 'BLHNC')
    """
    kinds = {(layer.spec, layer.block, layer.tp) for layer in layers}
    pages = {page_of(*kind) for kind in kinds}
    # Padding is the pool's business: another page's size may bring it or spare it.
    flat = {page.padded(page.unpadded) for page in pages if not page.in_cells}
    return tuple(order for order in orders if all(_can_view(page, order) for page in flat))


@lru_cache(maxsize=4096)
def _can_view(page: Page, order: str) -> bool:
    """Whether every field of a page is a view where pages lie in that order."""
    try:
        placed = page.place(order, pages=2, blocks=2)
        for field in page.fields:
            page.view(placed, field.name)
    except AtlasError:
        return False
    return True


def candidate_orders(layers: list[SizedLayer]) -> tuple[str, ...]:
    """Orders that can hold the pages of all layers."""
    declared = supported_orders([layer.backend for layer in layers if layer.backend])
    orders = viewable_orders(declared, layers)
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
