"""Cache geometry as immutable values: axes, layouts, fields, pages and placements.

The package depends only on numpy. Start with `affine.py` and `placement.py`; all other
modules build on them.
"""

from kvatlas.geometry.combine import append, stack
from kvatlas.geometry.dtype import DType
from kvatlas.geometry.field import Field, FieldAxis, Section, Sharding, ShardRange
from kvatlas.geometry.layout import ENGINE_LAYOUTS, Layout
from kvatlas.geometry.nested_steps import NestedSteps
from kvatlas.geometry.packing import ElementRow, Shard
from kvatlas.geometry.page import Page
from kvatlas.geometry.page_arrangement import (
    PageSet,
    PoolPosition,
    pack_positions,
    shared_pages,
    side_by_side,
)
from kvatlas.geometry.placement import Placement, fold_together
from kvatlas.geometry.state_spans import StateBlocks, StateSpans
from kvatlas.geometry.strided_runs import StridedRuns, merge_runs
from kvatlas.geometry.validation import validate

__all__ = [
    "ENGINE_LAYOUTS",
    "DType",
    "ElementRow",
    "Field",
    "FieldAxis",
    "Layout",
    "NestedSteps",
    "Page",
    "PageSet",
    "Placement",
    "PoolPosition",
    "Section",
    "Shard",
    "ShardRange",
    "Sharding",
    "StateBlocks",
    "StateSpans",
    "StridedRuns",
    "append",
    "fold_together",
    "merge_runs",
    "pack_positions",
    "shared_pages",
    "side_by_side",
    "stack",
    "validate",
]
