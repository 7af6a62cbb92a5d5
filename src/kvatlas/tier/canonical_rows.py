"""`canonical_rows`: the plan of a tier's rows, which no planning policy influences.

Each kind of cache is one group with its own pool, and one block is one row. In a row, heads are
outermost, then the layers of the model in ascending order, then the states of the span, so that
the bytes of a tensor-parallel rank are contiguous. `row_kinds` describes the content, and
`docs/reference/tier_format.md` specifies every byte.
"""

from __future__ import annotations

from math import gcd

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout
from kvatlas.geometry.integers import positive
from kvatlas.models import Layer, Model
from kvatlas.planning import Group, Plan, Pool, Region
from kvatlas.planning.sized_layers import kind_of
from kvatlas.specs import Recurrent
from kvatlas.tier.row_kinds import RowKind, layers_by_kind, refuse_rings, row_kinds, span_of

_DEFAULT_LENGTH = 32_768
"""Tokens of the longest request, for models whose config does not limit them."""
_WITH_HEADS, _WITHOUT_HEADS = "BHLNC", "BLHNC"


def canonical_rows(
    model: Model | Plan | str, *, span: int | None = None, max_len: int | None = None
) -> Plan:
    """Return the plan that describes a model's rows. If `model` is a plan, its model is used.

    A row has `span` tokens, rounded up to a multiple of `span` that is a whole number of states.
    The default is the greatest common divisor of the plan's block sizes, except those of recurrent
    states.

    >>> rows = canonical_rows("gpt-oss-20b", span=64)
    >>> [(group.kind, group.block) for group in rows.groups]
    [('sliding_window', 64), ('full_attention', 64)]
    >>> from kvatlas.planning import plan
    >>> other = plan("gpt-oss-20b", memory="40GiB", tp=2, layout="LBNHC", max_len=1024)
    >>> canonical_rows(other, span=64).regions == rows.regions
    True
    """
    if isinstance(model, str):
        model = Model.load(model)
    refuse_rings(layers_of(model))
    kinds = layers_by_kind(layers_of(model))
    if span is None:
        span = _span_of_plan(model)
    span = span_of([kind for kind, _ in kinds], positive(span, "the span of a row"))
    length = max_len or model.max_len or _DEFAULT_LENGTH
    regions = [_region(number, *own, span) for number, own in enumerate(kinds)]
    pools = tuple(
        Pool(stage=0, index=region.group, blocks=1, block_bytes=region.block_stride)
        for region in regions
    )
    groups = tuple(
        Group.of(kind_of(own[0].spec), own[0].spec, block=span, pool=number)
        for number, (_, own) in enumerate(kinds)
    )
    return Plan(
        model=model.model if isinstance(model, Plan) else model.name,
        policy="rows",
        layout=regions[0].layout,
        tp=1,
        pp=1,
        dcp=1,
        memory=sum(pool.nbytes for pool in pools),
        block_size=span,
        max_len=positive(length, "max_len"),
        in_flight=0,
        groups=groups,
        pools=pools,
        regions=tuple(regions),
        prefix_caching=False,
    )


def layers_of(model: Model | Plan) -> list[Layer]:
    """Return every layer of a model or a plan once, in no particular order."""
    if isinstance(model, Model):
        return list(model.layers)
    found = {layer.name: layer for region in model.regions for layer in region.layers}
    return list(found.values())


def kinds_of_rows(rows: Plan) -> tuple[RowKind, ...]:
    """Return the `RowKind` of each group of a plan that `canonical_rows` made."""
    return row_kinds(layers_of(rows))


def _region(number: int, kind: RowKind, layers: tuple[Layer, ...], span: int) -> Region:
    """Return the region of the layers of one kind. `number` is the index of their group."""
    heads = kind.heads * len(kind.groups)
    layout = _WITH_HEADS if heads > 1 else _WITHOUT_HEADS
    page = layers[0].spec.page(span)
    strides = page.pool_strides(Layout(layout), pages=len(layers), blocks=1)
    return Region(
        stage=0,
        group=number,
        layers=layers,
        block=span,
        kernel_block=span,
        page_bytes=page.nbytes,
        layout=layout,
        offset=0,
        page_stride=strides[0],
        block_stride=strides[1],
    )


def _span_of_plan(model: Model | Plan) -> int:
    if isinstance(model, Model):
        problem = "The number of tokens per row is required, unless a plan is passed"
        hint = "Pass span=, such as span=64"
        raise AtlasError(Code.CONTRADICTORY, problem, got=f"span=None for {model.name}", hint=hint)
    states = {
        region.group for region in model.regions if isinstance(region.layers[0].spec, Recurrent)
    }
    blocks = [group.block for number, group in enumerate(model.groups) if number not in states]
    return gcd(*(blocks or [group.block for group in model.groups]))
