"""Draw plans, and routes between plans, as HTML pages, SVG pictures and text.

`map(plan)` returns a `Map`. Its method `html` returns an HTML page that works offline, `svg` a
picture for documents, and `text` a drawing for a terminal. `curves_page` draws hit rates over
memory sizes.
"""

from kvatlas.maps.curves import Curve, CurveText, curves_page
from kvatlas.maps.drawn_map import Map, map  # noqa: A004

__all__ = ["Curve", "CurveText", "Map", "curves_page", "map"]
