"""Everything that a map shows, as data."""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.maps.plan_drawing import PlanDrawing
from kvatlas.maps.route_drawing import RouteDrawing


class MapData(msgspec.Struct, frozen=True, kw_only=True):
    """What the page is given, as JSON."""

    title: str
    names: tuple[str, ...]
    """Layers of all plans, which refer to them by number."""
    plans: tuple[PlanDrawing, ...]
    """The one that is shown first, the other end of the route, then those of the knobs."""
    machine: dict[str, Any] | None
    route: RouteDrawing | None
