"""Routes: from any plan to any plan of the same model, as byte ranges."""

from kvatlas.route.bind import Copy
from kvatlas.route.check import Check, Pair, check, scattered
from kvatlas.route.match import Reason, fingerprint
from kvatlas.route.prepared import Prepared
from kvatlas.route.report import Costs, Report, report
from kvatlas.route.route import Bound, Route, route

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
