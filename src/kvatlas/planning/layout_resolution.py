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
from kvatlas.geometry import ENGINE_LAYOUTS, Layout
from kvatlas.planning.backends import ANY_ORDER, Backend
from kvatlas.planning.sized_layers import SizedLayer, page_of
from kvatlas.specs import Spec
from kvatlas.specs.scale_location import in_layout


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
    >>> plan("Llama-3.1-8B", memory="60GiB", backend="ROCM_ATTN").accepted_layouts
    ('LHBNC', 'LBHNC')
    """
    kinds = {(layer.spec, layer.block, layer.tp) for layer in layers}
    flat = [kind for kind in kinds if not page_of(*kind).in_cells]
    return tuple(order for order in orders if all(_can_view(*kind, order) for kind in flat))


def layers_in_layout(layers: list[SizedLayer], layout: Layout) -> list[SizedLayer]:
    """Return the layers with scales at the position that the layout supports; see `in_layout`."""
    return [layer.with_spec(in_layout(layer.spec, layout)) for layer in layers]


@lru_cache(maxsize=4096)
def _can_view(spec: Spec, block: int, tp: int, order: str) -> bool:
    """Return whether every field of a page, such as K or V, can be a strided view in `order`."""
    page = page_of(in_layout(spec, Layout(order)), block, tp)
    page = page.padded(page.unpadded)  # Padding depends on the other pages in the pool.
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
            problem = "Some layers or backends do not support this layout"
            hint = f"Use one of {', '.join(candidates)}"
        raise AtlasError(Code.LAYOUT_REFUSED, problem, got=got, hint=hint)
    return layout
