"""Routes: the byte ranges to copy between the caches of any two plans of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvatlas import imported_on_first_use
from kvatlas.routing.binding import Copy
from kvatlas.routing.bound_route import BoundRoute
from kvatlas.routing.compatibility import Reason, fingerprint
from kvatlas.routing.conversion import Conversion, FormatChange, RowError, Scales
from kvatlas.routing.request import check_tables
from kvatlas.routing.routes import Route, route
from kvatlas.routing.token_ranges import needed_states, shared_visibility

if TYPE_CHECKING:
    from kvatlas.routing.converted_stream import ConvertedStream
    from kvatlas.routing.costs import Costs, Report, report
    from kvatlas.routing.feasibility import Check, RankPair, check, scattered
    from kvatlas.routing.prepared import PreparedRoute
    from kvatlas.routing.request_shape import RequestShape
    from kvatlas.routing.streams import Stream
else:
    __getattr__ = imported_on_first_use(
        __name__,
        {
            "converted_stream": ("ConvertedStream",),
            "costs": ("Costs", "Report", "report"),
            "feasibility": ("Check", "RankPair", "check", "scattered"),
            "prepared": ("PreparedRoute",),
            "request_shape": ("RequestShape",),
            "streams": ("Stream",),
        },
    )

__all__ = [
    "BoundRoute",
    "Check",
    "Conversion",
    "ConvertedStream",
    "Copy",
    "Costs",
    "FormatChange",
    "PreparedRoute",
    "RankPair",
    "Reason",
    "Report",
    "RequestShape",
    "Route",
    "RowError",
    "Scales",
    "Stream",
    "check",
    "check_tables",
    "fingerprint",
    "needed_states",
    "report",
    "route",
    "scattered",
    "shared_visibility",
]
