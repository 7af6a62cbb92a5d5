"""The location of nvfp4's scales in a page, which depends on the layout."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from kvatlas.geometry import Layout
from kvatlas.specs.attention import Attention, Scales
from kvatlas.specs.base import Spec


def in_layout(spec: Spec, layout: Layout) -> Spec:
    """Return the spec with its scales at a location that the layout allows.

    A location that the spec already sets does not change. In a layout with contiguous pages, the
    scales follow all data of K and V in a page. In other layouts, the scales of a head follow its
    data if the states of a head are contiguous; if they are not, scales are in the cells.

    >>> from kvatlas.specs import FullAttention
    >>> nvfp4 = FullAttention(heads=8, head_dim=128, cache="nvfp4")
    >>> orders = map(Layout, ("LBHNC", "LBNHC", "BHLNC", "BNLHC"))
    >>> [in_layout(nvfp4, order).scales_as for order in orders]
    ['planes', 'state_planes', 'head_planes', 'inline']
    """
    if not isinstance(spec, Attention) or spec.scales is not None or spec.scales_as == "inline":
        return spec
    return _in_layout(spec, layout)


@lru_cache(maxsize=4096)
def _in_layout(spec: Attention, layout: Layout) -> Spec:
    """Return `spec` with `scales` set, cached so that equal specs share one object."""
    scales: Scales
    if layout.page_contiguous:
        scales = "planes" if layout.outside("H", "N") else "state_planes"
    else:
        scales = "head_planes" if layout.order.endswith("NC") else "inline"
    return spec if scales == spec.scales_as else msgspec.structs.replace(spec, scales=scales)
