"""Maps: a plan, or a route between two, drawn as a page, a picture and text.

`map(plan)` gives a `Map`: `.html()` is one page that needs no network, `.svg()` a picture for
documents, `.text()` letters for a terminal. `curves_page` draws hit rates over memory.
"""

from kvatlas.maps.curves import Curve, CurveText, curves_page
from kvatlas.maps.drawn_map import Map, map  # noqa: A004

__all__ = ["Curve", "CurveText", "Map", "curves_page", "map"]
