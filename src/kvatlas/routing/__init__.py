"""Routes: byte ranges that copy caches between any two plans of the same model."""

from kvatlas.routing.binding import Copy, RunGrid, Starts
from kvatlas.routing.block_tables import block_table, checked_rank, table_arrays
from kvatlas.routing.compatibility import Reason, fingerprint
from kvatlas.routing.conversion import (
    ROW_ERRORS,
    Conversion,
    FormatChange,
    RowError,
    Scales,
    parse_conversion,
    spell_conversion,
    tensor_scales,
)
from kvatlas.routing.converted_stream import CELLS, ConvertedPart, ConvertedStream
from kvatlas.routing.costs import Costs, Report, report
from kvatlas.routing.feasibility import Check, RankPair, check, scattered
from kvatlas.routing.prepared import PreparedRoute
from kvatlas.routing.request import check_tables
from kvatlas.routing.request_shape import Lengths, RequestShape, table_lengths
from kvatlas.routing.routes import BoundRoute, Route, route
from kvatlas.routing.run_grids import BlockIds, SpanPattern
from kvatlas.routing.streams import Stream
from kvatlas.routing.token_ranges import needed_states, shared_visibility, token_range

__all__ = [
    "CELLS",
    "ROW_ERRORS",
    "BlockIds",
    "BoundRoute",
    "Check",
    "Conversion",
    "ConvertedPart",
    "ConvertedStream",
    "Copy",
    "Costs",
    "FormatChange",
    "Lengths",
    "PreparedRoute",
    "RankPair",
    "Reason",
    "Report",
    "RequestShape",
    "Route",
    "RowError",
    "RunGrid",
    "Scales",
    "SpanPattern",
    "Starts",
    "Stream",
    "block_table",
    "check",
    "check_tables",
    "checked_rank",
    "fingerprint",
    "needed_states",
    "parse_conversion",
    "report",
    "route",
    "scattered",
    "shared_visibility",
    "spell_conversion",
    "table_arrays",
    "table_lengths",
    "tensor_scales",
    "token_range",
]
