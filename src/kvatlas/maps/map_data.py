"""The content of a map, as data."""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.maps.plan_drawing import PlanDrawing
from kvatlas.maps.route_drawing import RouteDrawing


class MapData(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a map. The HTML page contains it as JSON."""

    title: str
    names: tuple[str, ...]
    """Names of the layers of all plans. Plans refer to them by index."""
    plans: tuple[PlanDrawing, ...]
    """The plan that is shown first, then the destination of the route if there is one, then all
    other plans."""
    machine: dict[str, Any] | None
    route: RouteDrawing | None
