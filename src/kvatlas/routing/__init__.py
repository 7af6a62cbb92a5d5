"""Routes: from any plan to any plan of the same model, as byte ranges."""

from kvatlas.routing.binding import Copy
from kvatlas.routing.compatibility import Reason, fingerprint
from kvatlas.routing.costs import Costs, Report, report
from kvatlas.routing.feasibility import Check, Pair, check, scattered
from kvatlas.routing.prepared import Prepared
from kvatlas.routing.routes import Bound, Route, route

__all__ = [
    "Bound",
    "Check",
    "Copy",
    "Costs",
    "Pair",
    "Prepared",
    "Reason",
    "Report",
    "Route",
    "check",
    "fingerprint",
    "report",
    "route",
    "scattered",
]
