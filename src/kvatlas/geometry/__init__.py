"""Geometry as a value: axes, layouts, fields, pages and placements, with numpy alone.

Read `affine.py` and `placement.py` first; everything else is made of them.
"""

from kvatlas.geometry.combine import append, fold_beside, in_lanes, stack, widest
from kvatlas.geometry.dtype import ALL_DTYPES, DType
from kvatlas.geometry.field import Field, FieldAxis, Section, Sharding, ShardRange
from kvatlas.geometry.layout import AXES, AXIS_NAMES, ENGINE_LAYOUTS, Layout
from kvatlas.geometry.packing import ElementRow, Shard, flat, in_cells, in_planes, row_bytes
from kvatlas.geometry.page import Page
from kvatlas.geometry.placement import Placement, fold_together
from kvatlas.geometry.validation import validate

__all__ = [
    "ALL_DTYPES",
    "AXES",
    "AXIS_NAMES",
    "ENGINE_LAYOUTS",
    "DType",
    "ElementRow",
    "Field",
    "FieldAxis",
    "Layout",
    "Page",
    "Placement",
    "Section",
    "Shard",
    "ShardRange",
    "Sharding",
    "append",
    "flat",
    "fold_beside",
    "fold_together",
    "in_cells",
    "in_lanes",
    "in_planes",
    "row_bytes",
    "stack",
    "validate",
    "widest",
]
