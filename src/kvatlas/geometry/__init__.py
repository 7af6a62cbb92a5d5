"""Geometry as a value: axes, layouts, fields, pages and placements, with numpy alone.

Read `affine.py` and `placement.py` first; everything else is made of them.
"""

from kvatlas.geometry.address_arrays import (
    Int64s,
    fill_descriptors,
    join,
    join_pairs,
    refuse_too_many,
)
from kvatlas.geometry.combine import append, fold_beside, in_lanes, stack, widest
from kvatlas.geometry.dtype import ALL_DTYPES, DType
from kvatlas.geometry.field import Field, FieldAxis, Section, Sharding, ShardRange
from kvatlas.geometry.integers import INT64_MAX, ceil_div, integer, natural, positive, round_up
from kvatlas.geometry.layout import AXES, AXIS_NAMES, ENGINE_LAYOUTS, Layout
from kvatlas.geometry.packing import ElementRow, Shard, flat, in_cells, in_planes, row_bytes
from kvatlas.geometry.page import Page
from kvatlas.geometry.page_arrangement import (
    PageSet,
    PoolPosition,
    packs,
    shared_pages,
    side_by_side,
)
from kvatlas.geometry.placement import Placement, fold_together
from kvatlas.geometry.state_spans import Cells, Spots, Stretches, meet, stretches
from kvatlas.geometry.strided_runs import Ends, Strip, along, between, closed, merged
from kvatlas.geometry.validation import keeps_to_its_blocks, validate

__all__ = [
    "ALL_DTYPES",
    "AXES",
    "AXIS_NAMES",
    "ENGINE_LAYOUTS",
    "INT64_MAX",
    "Cells",
    "DType",
    "ElementRow",
    "Ends",
    "Field",
    "FieldAxis",
    "Int64s",
    "Layout",
    "Page",
    "PageSet",
    "Placement",
    "PoolPosition",
    "Section",
    "Shard",
    "ShardRange",
    "Sharding",
    "Spots",
    "Stretches",
    "Strip",
    "along",
    "append",
    "between",
    "ceil_div",
    "closed",
    "fill_descriptors",
    "flat",
    "fold_beside",
    "fold_together",
    "in_cells",
    "in_lanes",
    "in_planes",
    "integer",
    "join",
    "join_pairs",
    "keeps_to_its_blocks",
    "meet",
    "merged",
    "natural",
    "packs",
    "positive",
    "refuse_too_many",
    "round_up",
    "row_bytes",
    "shared_pages",
    "side_by_side",
    "stack",
    "stretches",
    "validate",
    "widest",
]
