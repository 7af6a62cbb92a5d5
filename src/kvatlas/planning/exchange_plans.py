"""`to_exchange` and `from_exchange`: plans as documents of the exchange format, and back.

A document lists every field of every layer apart, so a plan that is read from one has fields apart
too (`Region.fields`), whatever the plan was from which the document was made. Both describe the
same bytes: `to_exchange` of either returns the same document.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Page, Placement
from kvatlas.geometry.integers import ceil_div, positive
from kvatlas.models import CacheIdentity, Layer, Model
from kvatlas.planning.exchange_checks import StoredField, bad_exchange, stored_fields
from kvatlas.planning.exchange_document import CacheDocument
from kvatlas.planning.exchange_parts import (
    DocumentField,
    DocumentGroup,
    DocumentKeeps,
    DocumentLayer,
    DocumentShard,
)
from kvatlas.planning.foreign_layers import SeenFields, SeenLayer
from kvatlas.planning.foreign_memory import regions_of
from kvatlas.planning.plan_parts import Group, Pool, PoolSegment, Region
from kvatlas.planning.plans import Plan, checked_plan
from kvatlas.planning.sized_layers import FIXED_KINDS, FULL_KINDS, kind_of, page_of
from kvatlas.specs import TensorScales, Visibility
from kvatlas.specs.cell_formats import needs_scales

_HOLDS = {"recurrent": "state", "ring": "ring"}
_WHOLE = {"k": "N", "c": "C"}
"""Names of outer steps of N and inner steps of C in placements of fields."""
_SCALED = ("k", "v", "latent", "rope")
_ALIGNED = 256
"""Segments of a pool start at multiples of this many bytes."""


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
    """Return the digest of an identity in a document; empty without an identity.

    >>> identity_digest(None), identity_digest(CacheIdentity(weights="sha256:5f1a"))[:8]
    ('', '17f2c5f6')
    """
    if identity is None:
        return ""
    parts = (identity.weights, identity.config, identity.adapter, identity.salt)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


class _Part(NamedTuple):
    """A layer of a region, or a part of its state."""

    region: Region
    index: int

    @property
    def layer(self) -> Layer:
        return self.region.layers[self.index]

    def order(self) -> tuple[int, str, int]:
        return self.layer.index, self.layer.name, self.region.part(self.index)


def _parts(plan: Plan) -> Iterator[_Part]:
    for region in plan.regions:
        for index in range(len(region.layers)):
            yield _Part(region, index)


Bounds = dict[tuple[int, int], list[tuple[int, int, int]]]
"""For each (stage, pool), (first byte, byte after the last, number of the region)."""


def _regions(plan: Plan) -> tuple[list[int], Bounds]:
    """Return the bytes of each region, and the regions of each pool."""
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
        scaled = scales is not None and needs_scales(stored.layer.spec) and field.name in _SCALED
        fields.append(
            DocumentField(
                name=field.name,
                dtype=field.dtype.name,
                region=number,
                offset=placed.offset - first,
                axes=_axes(placed, field.sharding.axis),
                shard=shards.setdefault(shard, len(shards)),
                scale=_bits(scales.v if field.name == "v" else scales.k)
                if scaled and scales is not None
                else UNSET,
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
        held = sharding.ranges(plan.tp * region.splits, tp_rank * region.splits + region.part(index))
        rows = tuple((one.start, one.length) for one in held) or ((0, 1),)
        ranks.append(rows if stage == region.stage else None)
    axis = sharding.axis if sharding.sections else None
    return DocumentShard(axis=axis or "", size=sharding.rows or 1, ranks=tuple(ranks))


def _axes(placed: Placement, sharded: str | None) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return (size, stride) of the steps of each axis, outermost first, as few as possible."""
    steps: dict[str, list[str]] = defaultdict(list)
    for name in sorted(placed.axes, key=lambda name: {"k": 0, "c": 2}.get(name, 1)):
        steps[name if name == sharded else _WHOLE.get(name, name)].append(name)
    return {
        axis: _folded([(placed.size(name), placed.stride(name)) for name in names])
        for axis, names in sorted(steps.items())
    }


def _folded(steps: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join steps of an axis that follow each other without gaps; leave out those of size 1."""
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
        holds=_HOLDS.get(group.kind, "tokens"),  # type: ignore[arg-type]
        tokens=group.block,
        context=1 if group.kind in FIXED_KINDS else dcp,
        keeps=_keeps(group.visibility),
    )


def _keeps(seen: Visibility) -> DocumentKeeps:
    return DocumentKeeps(
        window=seen.window or UNSET, chunk=seen.chunk or UNSET, source=seen.source or UNSET
    )


def _bits(scale: float) -> str:
    """Return the bits of a scale, which must be a positive IEEE 754 single."""
    try:
        bits = struct.pack(">f", scale)
    except (OverflowError, struct.error):
        bits = b""
    if not bits or struct.unpack(">f", bits)[0] != scale:
        problem, hint = "A tensor scale must be an fp32 number", "Round it with numpy.float32"
        raise AtlasError(Code.NOT_REPRESENTABLE, problem, got=repr(scale)[:100], hint=hint)
    return bits.hex()


# -- reading ----------------------------------------------------------------------------


def from_exchange(
    document: CacheDocument | bytes, model: Any, *, max_len: int | None = None
) -> Plan:
    """Return a plan that describes the memory of a document, for the layers of `model`.

    Routes between this plan and others copy between the document's memory and theirs. The names of
    the document's layers must be those of `model`. `max_len` defaults to the model's.

    >>> from kvatlas.planning import plan
    >>> document = to_exchange(plan("gpt-oss-20b", memory="40GiB", tp=2))
    >>> seen = from_exchange(document.to_json(), "gpt-oss-20b")
    >>> seen.tp, seen.num_blocks, to_exchange(seen) == document
    (2, 109226, True)
    """
    if not isinstance(document, CacheDocument):
        document = CacheDocument.from_json(document)
    loaded = Model.load(model)
    length = positive(loaded.max_len or 32768 if max_len is None else max_len, "max_len")
    parts = _stored_parts(document, loaded)
    holders = list(dict.fromkeys(part.ranks for part in parts))
    tp = _tensor_parallel(document, holders)
    pools, bases = _pools(document, tp)
    seen: list[SeenLayer] = []
    regions: list[Region] = []
    for part in parts:
        at = part.ranks[0] // tp
        given = {one.field.name: _shifted(one, bases[at, one.field.region]) for one in part.fields}
        if part.of == 1:
            own = _seen(part, at, given, tp, length)
            own.group = part.fields[0].layer.group
            seen.append(own)
        else:
            regions.append(_state_part(part, at, given, tp))
    regions = [*regions_of(seen), *regions]
    groups = _groups(document, parts)
    return Plan(
        model=loaded.name,
        policy="foreign",
        layout=regions[0].layout,
        tp=tp,
        pp=len(holders),
        dcp=max(group.context for group in document.groups),
        memory=max(
            sum(pool.nbytes for pool in pools if pool.stage == at) for at in range(len(holders))
        ),
        block_size=groups[0].block,
        max_len=length,
        in_flight=0,
        groups=groups,
        pools=pools,
        regions=tuple(regions),
        reasons=("This plan describes the memory of a document; kvatlas did not choose it.",),
    )


class _StoredPart(NamedTuple):
    """One entry of a document's layers, with the spec of its layer."""

    layer: Layer
    fields: tuple[StoredField, ...]
    ranks: tuple[int, ...]
    """The ranks that hold it."""
    of: int
    """The number of parts of its layer."""


def _stored_parts(document: CacheDocument, model: Model) -> list[_StoredPart]:
    """Return the entries of a document's layers; raise an error if the model lacks one."""
    known = {layer.name: layer for layer in model.layers}
    counts: dict[str, int] = defaultdict(int)
    for layer in document.layers:
        counts[layer.name] += 1
    if unknown := sorted(set(counts) - set(known)):
        got, some = ", ".join(map(repr, unknown[:3])), next(iter(known), "-")
        problem = f"The layers of the document must be those of {model.name}"
        hint = f"Use names such as {some!r}"
        raise AtlasError(Code.UNKNOWN_LAYER, problem, got=got, hint=hint)
    fields = stored_fields(document)
    parts = []
    for layer, own in groupby(fields, key=lambda one: one.layer):
        found = tuple(own)
        ranks = {_holders(one.shard) for one in found}
        if len(ranks) > 1:
            raise _unlike(layer.name, "fields that are on different ranks")
        parts.append(_StoredPart(known[layer.name], found, ranks.pop(), counts[layer.name]))
    return parts


def _holders(shard: DocumentShard) -> tuple[int, ...]:
    return tuple(rank for rank, ranges in enumerate(shard.ranks) if ranges is not None)


def _tensor_parallel(document: CacheDocument, holders: Sequence[tuple[int, ...]]) -> int:
    """Return the number of ranks of a pipeline stage; raise an error if stages are unequal."""
    tp, rest = divmod(document.ranks, len(holders))
    stages = [tuple(range(n * tp, n * tp + tp)) for n in range(len(holders))]
    if rest or sorted(holders) != stages:
        raise AtlasError(
            Code.BAD_TOPOLOGY,
            "Each pipeline stage must consist of the same number of successive ranks",
            got=f"layers on ranks {list(holders)[:4]} of {document.ranks}",
            hint="Number the ranks stage by stage",
        )
    return tp


def _unlike(layer: str, got: str) -> AtlasError:
    problem = f"The document and the model disagree on layer {layer}"
    hint = "Pass the model with the dtypes and the topology of the document"
    return AtlasError(Code.UNLIKE_LAYERS, problem, got=got, hint=hint)


Bases = dict[tuple[int, int], int]
"""The first byte of a region in its pool, by (stage, region)."""


def _pools(document: CacheDocument, tp: int) -> tuple[tuple[Pool, ...], Bases]:
    """Return a pool for each stage and pool of a document, with its regions as segments."""
    counts: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    used: dict[tuple[int, int], set[int]] = defaultdict(set)
    for one in stored_fields(document):
        home = _holders(one.shard)[0] // tp, one.group.pool
        used[home].add(one.field.region)
        counts[home] |= set(one.field.axes["B"])
    pools, bases = [], {}
    for (stage, index), regions in sorted(used.items()):
        blocks = {count for count, _ in counts[stage, index]}
        if len(blocks) > 1:
            problem = f"All fields of pool {index} must have the same number of blocks"
            raise AtlasError(Code.BAD_PLAN, problem, got=sorted(blocks), hint="Use several pools")
        (count,) = blocks
        unit = max(stride for _, stride in counts[stage, index]) * count or _ALIGNED
        segments, end = [], 0
        for region in sorted(regions):
            nbytes = document.regions[region]
            bases[stage, region] = end
            segments.append(PoolSegment(offset=end, nbytes=nbytes))
            last, end = end + nbytes, ceil_div(end + nbytes + 1, unit) * unit
        whole = len(segments) == 1 and last % count == 0
        pools.append(
            Pool(
                stage=stage,
                index=index,
                blocks=count,
                block_bytes=ceil_div(last, count),
                segments=UNSET if whole else tuple(segments),
            )
        )
    return tuple(pools), bases


def _shifted(one: StoredField, base: int) -> Placement:
    """Return a field's placement in its pool, with the axis names of a plan."""
    names = {"N": ("N",), "C": ("C",)}
    if len(one.field.axes.get("N", ())) == 2:
        names["N"] = ("k", "N")
    if len(one.field.axes.get("C", ())) == 2:
        names["C"] = ("C", "c")
    placed = one.placement()
    renamed = {f"{axis}{n or ''}": name for axis, own in names.items() for n, name in enumerate(own)}
    placed = placed.rename(**{axis: renamed.get(axis, axis) for axis in placed.axes})
    if any(len(axis) > 1 for axis in placed.axes):
        got = f"field {one.field.name} with axes {one.field.axes}, which have more steps than a plan's"
        raise _unlike(one.layer.name, got)
    return placed.shift(base)


def _seen(
    part: _StoredPart, stage: int, given: Mapping[str, Placement], tp: int, length: int
) -> SeenLayer:
    """Return a whole layer with the placements of its fields."""
    group = part.fields[0].group
    block = group.tokens
    seen = SeenFields(stage, part.layer, given, block, tp, length)
    _check_content(part, stage, tp, 0)
    per_state = part.layer.spec.tokens_per_state
    states = seen.page.states
    if group.holds == "tokens" and per_state is not None and states * per_state != block:
        raise _unlike(part.layer.name, f"{states} states in a block of {block} tokens")
    return seen


def _state_part(
    part: _StoredPart, stage: int, given: Mapping[str, Placement], tp: int
) -> Region:
    """Return a region of one part of a recurrent state, whose page is contiguous."""
    spec, group = part.layer.spec, part.fields[0].group
    if group.holds != "state":
        raise _unlike(part.layer.name, "several parts of a layer that is not recurrent")
    number = next((n for n in range(part.of) if _same_rows(part, stage, tp, n)), 0)
    _check_content(part, stage, tp, number)
    page, placed = page_of(spec, 1, tp * part.of), next(iter(given.values()))
    first = min(given[field.name].offset - field.offset for field in page.fields)
    region = Region(
        stage=stage,
        group=part.fields[0].layer.group,
        layers=(part.layer,),
        block=group.tokens,
        kernel_block=group.tokens,
        page_bytes=page.nbytes,
        layout="BLHNC",
        offset=max(first, 0),
        page_stride=page.nbytes,
        block_stride=placed.stride("B") or page.nbytes,
        splits=part.of,
        parts=(number,),
    )
    views = region.views(tp, placed.size("B"))
    if any(views[name].select("L", 0).reorder(*own.axes) != own for name, own in given.items()):
        raise _unlike(part.layer.name, "a part of a state whose fields do not follow each other")
    return region


def _content(part: _StoredPart, stage: int, tp: int, number: int) -> Iterator[tuple[Any, Any]]:
    """Yield the content of each field in the document and in the model: dtype and rows."""
    spec, block = part.layer.spec, part.fields[0].group.tokens
    for rank in part.ranks:
        page = page_of(spec, block, tp * part.of, (rank - stage * tp) * part.of + number)
        fields = {field.name: field for field in page.fields if not field.padding}
        for one in part.fields:
            field = fields.get(one.field.name)
            held = one.shard.ranks[rank]
            rows = tuple((r.start, r.length) for r in field.ranges) if field else ()
            yield (one.field.dtype, held), (field and field.dtype.name, rows or ((0, 1),))


def _same_rows(part: _StoredPart, stage: int, tp: int, number: int) -> bool:
    """Return whether the document's part has the rows of part `number` of the layer's state."""
    return all(here == there for here, there in _content(part, stage, tp, number))


def _check_content(part: _StoredPart, stage: int, tp: int, number: int) -> None:
    """Raise an error if dtypes, rows or the kind of the cache differ from the layer's spec."""
    kind, held = kind_of(part.layer.spec), part.fields[0].group.holds
    if _HOLDS.get(kind, "tokens") != held:
        raise _unlike(part.layer.name, f"a group that holds {held} for a cache of kind {kind}")
    for here, there in _content(part, stage, tp, number):
        if here[0] != there[0]:
            problem = f"Layer {part.layer.name} is stored in another dtype"
            hint = "Load the model with the dtypes of the document"
            got = f"{here[0]} in the document, {there[0]} in the model"
            raise AtlasError(Code.UNLIKE_DTYPES, problem, got=got, hint=hint)
        if here != there:
            raise _unlike(part.layer.name, f"rows {here[1]}, not {there[1]}")


def _groups(document: CacheDocument, parts: Iterable[_StoredPart]) -> tuple[Group, ...]:
    """Return the groups of a document; their kinds follow from the specs of their layers."""
    members: dict[int, list[Layer]] = defaultdict(list)
    for part in parts:
        members[part.fields[0].layer.group].append(part.layer)
    if set(members) != set(range(len(document.groups))):
        raise bad_exchange("Each group must have layers", f"groups {sorted(members)[:8]}")
    if len({group.context for group in document.groups if group.holds == "tokens"}) > 1:
        raise bad_exchange("A plan has one number of context-parallel ranks", "several")
    return tuple(_read_group(one, members[n]) for n, one in enumerate(document.groups))


def _read_group(group: DocumentGroup, members: Sequence[Layer]) -> Group:
    specs = [layer.spec for layer in members]
    kept = [kind for kind in FULL_KINDS if kind in map(kind_of, specs)]
    fixed = group.holds != "tokens"
    if not fixed and group.keeps == DocumentKeeps():
        kind = kept[0] if kept else "full_attention"
        return Group.of(kind, specs[0], block=group.tokens, pool=group.pool)
    for spec in specs:
        made = Group.of(kind_of(spec), spec, block=group.tokens, pool=group.pool)
        if fixed or (kind_of(spec) not in FULL_KINDS and _keeps(made.visibility) == group.keeps):
            return made
    raise _unlike(members[0].name, f"a group that keeps {group.keeps}")
