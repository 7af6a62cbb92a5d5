"""Routes: from any plan to any plan of the same model, as byte ranges."""

from kvatlas.routing.binding import Copy
from kvatlas.routing.block_tables import block_table, checked_rank
from kvatlas.routing.compatibility import Reason, fingerprint
from kvatlas.routing.costs import Costs, Report, report
from kvatlas.routing.feasibility import Check, Pair, check, scattered
from kvatlas.routing.plan_ends import Side
from kvatlas.routing.prepared import Prepared
from kvatlas.routing.routes import Bound, Route, route
from kvatlas.routing.token_ranges import Reach, Span, reach_of, token_range

__all__ = [
    "Bound",
    "Check",
    "Copy",
    "Costs",
    "Pair",
    "Prepared",
    "Reach",
    "Reason",
    "Report",
    "Route",
    "Side",
    "Span",
    "block_table",
    "check",
    "checked_rank",
    "fingerprint",
    "reach_of",
    "report",
    "route",
    "scattered",
    "token_range",
]
