"""Cache geometry as immutable values: axes, layouts, fields, pages and placements.

The package depends only on numpy. Start with `affine.py` and `placement.py`; all other
modules build on them.
"""

from kvatlas.geometry.address_arrays import (
    Int64s,
    fill_descriptors,
    join_copies,
    join_ranges,
    refuse_too_many,
    whole_numbers,
)
from kvatlas.geometry.byte_sizes import size
from kvatlas.geometry.combine import append, fold_beside, in_words, stack, tile_alike, widest_word
from kvatlas.geometry.dtype import DType
from kvatlas.geometry.field import Field, FieldAxis, Section, Sharding, ShardRange
from kvatlas.geometry.integers import (
    INT64_MAX,
    MOST_SECONDS,
    Whole,
    at_most,
    ceil_div,
    duration,
    integer,
    natural,
    positive,
    round_up,
)
from kvatlas.geometry.layout import ENGINE_LAYOUTS, Layout
from kvatlas.geometry.nested_steps import NestedSteps, Steps
from kvatlas.geometry.packing import ElementRow, Shard, flat_field, in_cells, in_planes, row_bytes
from kvatlas.geometry.page import Page
from kvatlas.geometry.page_arrangement import (
    PageSet,
    PoolPosition,
    pack_positions,
    shared_pages,
    side_by_side,
)
from kvatlas.geometry.placement import Placement, fold_together
from kvatlas.geometry.state_spans import CommonStates, SpanStarts, StateBlocks, StateSpans
from kvatlas.geometry.strided_runs import Ends, StridedRuns, fold_states, merge_runs
from kvatlas.geometry.validation import keeps_to_its_blocks, validate

__all__ = [
    "ENGINE_LAYOUTS",
    "INT64_MAX",
    "MOST_SECONDS",
    "CommonStates",
    "DType",
    "ElementRow",
    "Ends",
    "Field",
    "FieldAxis",
    "Int64s",
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
    "SpanStarts",
    "StateBlocks",
    "StateSpans",
    "Steps",
    "StridedRuns",
    "Whole",
    "append",
    "at_most",
    "ceil_div",
    "duration",
    "fill_descriptors",
    "flat_field",
    "fold_beside",
    "fold_states",
    "fold_together",
    "in_cells",
    "in_planes",
    "in_words",
    "integer",
    "join_copies",
    "join_ranges",
    "keeps_to_its_blocks",
    "merge_runs",
    "natural",
    "pack_positions",
    "positive",
    "refuse_too_many",
    "round_up",
    "row_bytes",
    "shared_pages",
    "side_by_side",
    "size",
    "stack",
    "tile_alike",
    "validate",
    "whole_numbers",
    "widest_word",
]
