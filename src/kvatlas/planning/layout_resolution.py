"""Choose the layout of a plan, one for all layers.

A layout is a candidate if all backends support it and every field of a page, such as K or V, can
be a strided view in it. If the model's pages differ in shape, a page must also be contiguous. The
plan uses the layout that the caller requested, which must be a candidate. By default, it uses the
first candidate.
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
    """Return the layouts that all backends support, the most preferred first.

    If no backend declares layouts, return `undeclared`.

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
    """Return the layouts among `orders` in which K, V and all other fields can be strided views.

    >>> from kvatlas.planning import plan
    >>> plan("Qwen3-8B", memory="60GiB", kv_dtype="nvfp4").accepted_layouts  # whole pages
    ('LBNHC', 'LBHNC', 'BLNHC', 'BLHNC')
    """
    kinds = {(layer.spec, layer.block, layer.tp) for layer in layers}
    pages = {page_of(*kind) for kind in kinds}
    # Ignore padding: it depends on the other pages in the pool.
    flat = {page.padded(page.unpadded) for page in pages if not page.in_cells}
    return tuple(order for order in orders if all(_can_view(page, order) for page in flat))


@lru_cache(maxsize=4096)
def _can_view(page: Page, order: str) -> bool:
    """Return whether every field of a page, such as K or V, can be a strided view in `order`."""
    try:
        placed = page.place(order, pages=2, blocks=2)
        for field in page.fields:
            page.view(placed, field.name)
    except AtlasError:
        return False
    return True


def candidate_orders(layers: list[SizedLayer]) -> tuple[str, ...]:
    """Return the layouts that the backends and pages of all layers allow, the preferred first."""
    declared = supported_orders([layer.backend for layer in layers if layer.backend])
    orders = viewable_orders(declared, layers)
    shapes = {(layer.page.heads, layer.page.states, layer.nbytes) for layer in layers}
    if len(shapes) > 1:
        orders = tuple(order for order in orders if Layout(order).page_contiguous)
    return orders


def resolve_order(candidates: tuple[str, ...], chosen: str | None) -> Layout:
    """Return the layout named `chosen`, or the first candidate if `chosen` is None.

    Raises an error if `chosen` is not a candidate.
    """
    layout = Layout(next(iter(candidates), "LBNHC") if chosen is None else chosen)
    if layout.order not in candidates:
        problem = "The backends of the model's layers support no common layout"
        got, hint = f"layout {layout}", "Pass another backend="
        if candidates:
            problem, hint = "", f"Use one of {', '.join(candidates)}"
        raise AtlasError(Code.LAYOUT_REFUSED, problem, got=got, hint=hint)
    return layout
