"""Geometry as a value: axes, layouts, fields, pages and placements, with numpy alone.

Read `affine.py` and `placement.py` first; everything else is made of them.
"""

from kvatlas.geometry.combine import append, fold_beside, in_lanes, stack, widest
from kvatlas.geometry.dtype import ALL_DTYPES, DType
from kvatlas.geometry.field import Cut, Field, FieldAxis, Piece, Section
from kvatlas.geometry.layout import AXES, AXIS_NAMES, ENGINE_LAYOUTS, Layout
from kvatlas.geometry.packing import Part, Share, flat, in_cells, in_planes, row_bytes
from kvatlas.geometry.page import Page
from kvatlas.geometry.placement import Placement, fold_together
from kvatlas.geometry.validate import validate

__all__ = [
    "ALL_DTYPES",
    "AXES",
    "AXIS_NAMES",
    "ENGINE_LAYOUTS",
    "Cut",
    "DType",
    "Field",
    "FieldAxis",
    "Layout",
    "Page",
    "Part",
    "Piece",
    "Placement",
    "Section",
    "Share",
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
