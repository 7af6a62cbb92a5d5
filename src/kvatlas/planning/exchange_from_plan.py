"""`to_exchange`: the document of the exchange format that describes a plan's memory."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement
from kvatlas.models import CacheIdentity, Layer
from kvatlas.planning.exchange_document import CacheDocument
from kvatlas.planning.exchange_parts import (
    DocumentField,
    DocumentGroup,
    DocumentKeeps,
    DocumentLayer,
    DocumentShard,
)
from kvatlas.planning.plan_parts import Group, Region
from kvatlas.planning.plans import Plan, checked_plan
from kvatlas.planning.sized_layers import FIXED_KINDS
from kvatlas.specs import TensorScales, Visibility
from kvatlas.specs.cell_formats import needs_scales

Holds = Literal["tokens", "state", "ring"]
HOLDS: dict[str, Holds] = {"recurrent": "state", "ring": "ring"}
"""What the blocks of a group of each kind hold; `tokens` for all other kinds."""
_WHOLE = {"k": "N", "c": "C"}
"""Names of outer steps of N and inner steps of C in placements of fields."""
_SCALED = ("k", "v", "latent", "rope")


def to_exchange(
    plan: Plan,
    *,
    identity: CacheIdentity | None = None,
    scales: Mapping[str, TensorScales] | None = None,
) -> CacheDocument:
    """Return the document that describes a plan's memory in the exchange format.

    `identity` names the weights and settings of the model. `scales` contains the tensor scales of
    layers in fp8 and nvfp4, by layer name.

    >>> from kvatlas.planning import plan
    >>> document = to_exchange(plan("gpt-oss-20b", memory="40GiB", tp=2))
    >>> document.groups[0].keeps, document.shards[0].ranks
    (DocumentKeeps(window=128, chunk=UNSET, source=UNSET), (((0, 4),), ((4, 4),)))
    """
    plan = checked_plan(plan)
    for name in scales or ():
        plan.region_of(name)  # raises an error if there is no such layer
    shards: dict[DocumentShard, int] = {}
    regions, bounds = _regions(plan)
    layers = [
        _layer(plan, stored, shards, bounds, (scales or {}).get(stored.layer.name))
        for stored in sorted(_parts(plan), key=_Part.order)
    ]
    document = CacheDocument(
        model=plan.model,
        identity=identity_digest(identity),
        ranks=plan.ranks,
        regions=tuple(regions),
        groups=tuple(_group(group, plan.dcp) for group in plan.groups),
        shards=tuple(shards),
        layers=tuple(layers),
    )
    # Names come from callers, and only the decoder checks them.
    return CacheDocument.from_json(document.to_json())


def identity_digest(identity: CacheIdentity | None) -> str:
    """Return the digest by which a document records an identity; empty if there is none.

    >>> identity_digest(None), identity_digest(CacheIdentity(weights="sha256:5f1a"))[:8]
    ('', '38de6bcc')
    """
    if identity is None:
        return ""
    parts = (identity.weights, identity.config, identity.adapter, identity.salt)
    import hashlib  # slow to import, and only needed here

    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


class _Part(NamedTuple):
    """A layer of a region, or one part of a layer's state."""

    region: Region
    number: int

    @property
    def layer(self) -> Layer:
        return self.region.layers[self.number]

    def order(self) -> tuple[int, str, int]:
        return self.layer.index, self.layer.name, self.region.part(self.number)


def _parts(plan: Plan) -> Iterator[_Part]:
    for region in plan.regions:
        for index in range(len(region.layers)):
            yield _Part(region, index)


Bounds = dict[tuple[int, int], list[tuple[int, int, int]]]
"""For each (stage, pool), (first byte, byte after the last, number of the region)."""


def _regions(plan: Plan) -> tuple[list[int], Bounds]:
    """Return the size of each region in bytes, and the regions of each pool."""
    regions: list[int] = []
    bounds: Bounds = {}
    for pool in sorted(plan.pools, key=lambda pool: (pool.stage, pool.index)):
        segments = pool.segments
        parts = [(0, pool.nbytes)]
        if segments is not UNSET:
            parts = [(one.offset, one.nbytes) for one in segments]
        numbered = enumerate(parts, len(regions))
        own = [(first, first + nbytes, number) for number, (first, nbytes) in numbered]
        bounds[pool.stage, pool.index] = own
        regions += [nbytes for _, nbytes in parts]
    return regions, bounds


def _layer(
    plan: Plan,
    stored: _Part,
    shards: dict[DocumentShard, int],
    bounds: Bounds,
    scales: TensorScales | None,
) -> DocumentLayer:
    region, index = stored
    pool = plan.pool(region.stage * plan.tp, region.group)
    page, views = region.first_page(plan.tp, index), region.views(plan.tp, pool.blocks, index)
    fields = []
    for field in sorted(page.fields, key=lambda field: field.name):
        if field.padding:
            continue
        placed = views[field.name].select("L", index)
        shard = _shard(plan, stored, field.name)
        first, _, number = next(
            own for own in bounds[region.stage, pool.index] if own[0] <= placed.offset < own[1]
        )
        scale = None
        if scales is not None and needs_scales(stored.layer.spec) and field.name in _SCALED:
            scale = scales.v if field.name == "v" else scales.k
        fields.append(
            DocumentField(
                name=field.name,
                dtype=field.dtype.name,
                region=number,
                offset=placed.offset - first,
                axes=_axes(placed, field.sharding.axis),
                shard=shards.setdefault(shard, len(shards)),
                scale=UNSET if scale is None else _bits(scale),
            )
        )
    return DocumentLayer(
        name=stored.layer.name,
        index=stored.layer.index,
        group=region.group,
        fields=tuple(fields),
    )


def _shard(plan: Plan, stored: _Part, name: str) -> DocumentShard:
    """Return the rows of a field that each rank holds."""
    region, index = stored
    sharding = region.first_page(plan.tp, index).field(name).sharding
    ranks: list[tuple[tuple[int, int], ...] | None] = []
    for rank in range(plan.ranks):
        stage, tp_rank = plan.split_rank(rank)
        held = sharding.ranges(
            plan.tp * region.splits, tp_rank * region.splits + region.part(index)
        )
        rows = tuple((one.start, one.length) for one in held) or ((0, 1),)
        ranks.append(rows if stage == region.stage else None)
    axis = sharding.axis if sharding.sections else None
    return DocumentShard(axis=axis or "", size=sharding.rows or 1, ranks=tuple(ranks))


def _axes(placed: Placement, sharded: str | None) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return each axis as the fewest possible (size, stride) steps, outermost first."""
    steps: dict[str, list[str]] = defaultdict(list)
    for name in sorted(placed.axes, key=lambda name: {"k": 0, "c": 2}.get(name, 1)):
        steps[name if name == sharded else _WHOLE.get(name, name)].append(name)
    return {
        axis: _folded([(placed.size(name), placed.stride(name)) for name in names])
        for axis, names in sorted(steps.items())
    }


def _folded(steps: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join steps of an axis that follow each other without gaps; omit steps of size 1."""
    found: list[tuple[int, int]] = []
    for size, stride in steps:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(found) or ((1, 0),)


def _group(group: Group, dcp: int) -> DocumentGroup:
    return DocumentGroup(
        pool=group.pool,
        holds=HOLDS.get(group.kind, "tokens"),
        tokens=group.block,
        context=1 if group.kind in FIXED_KINDS else dcp,
        keeps=keeps_of(group.visibility),
    )


def keeps_of(seen: Visibility) -> DocumentKeeps:
    """Return the tokens that a group keeps, in the form of a document."""
    return DocumentKeeps(
        window=seen.window or UNSET, chunk=seen.chunk or UNSET, source=seen.source or UNSET
    )


def _bits(scale: float) -> str:
    """Return the bits of a scale, which must be a positive IEEE 754 single."""
    try:
        bits = struct.pack(">f", scale)
    except (OverflowError, struct.error):
        bits = bytes(4)
    if not 0 < struct.unpack(">f", bits)[0] == scale < math.inf:
        problem = "A tensor scale must be a positive fp32 number"
        hint = "Pass a positive number, rounded with numpy.float32"
        raise AtlasError(Code.NOT_REPRESENTABLE, problem, got=repr(scale)[:100], hint=hint)
    return bits.hex()
