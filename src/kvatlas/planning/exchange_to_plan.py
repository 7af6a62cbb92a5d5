"""`from_exchange`: a plan that describes the memory of a document of the exchange format.

A document lists every field of every layer separately. The plan therefore has a separate placement
for each field (`Region.fields`), even if the document was made from a plan with one placement per
page. Both plans describe the same bytes, and `to_exchange` returns the same document for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from msgspec import UNSET

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement
from kvatlas.geometry.integers import ceil_div, positive
from kvatlas.models import Layer, Model
from kvatlas.planning.exchange_checks import StoredField, bad_exchange, stored_fields
from kvatlas.planning.exchange_document import CacheDocument
from kvatlas.planning.exchange_from_plan import HOLDS, keeps_of
from kvatlas.planning.exchange_parts import DocumentGroup, DocumentKeeps, DocumentShard
from kvatlas.planning.foreign_layers import SeenFields, SeenLayer
from kvatlas.planning.foreign_memory import regions_of
from kvatlas.planning.plan_parts import Group, Pool, PoolSegment, Region
from kvatlas.planning.plans import Plan
from kvatlas.planning.sized_layers import FULL_KINDS, Kind, kind_of, page_of

_ALIGNED = 256
"""Segments of a pool with one block start at multiples of this many bytes."""


def from_exchange(
    document: CacheDocument | bytes, model: Any, *, max_len: int | None = None
) -> Plan:
    """Return a plan that describes the memory of a document, for the layers of `model`.

    A route between this plan and another plan copies between the document's memory and the memory
    of the other plan. The document's layers must have the names of the layers of `model`. `max_len`
    defaults to the limit of the model.

    >>> from kvatlas.planning import plan, to_exchange
    >>> document = to_exchange(plan("gpt-oss-20b", memory="40GiB", tp=2))
    >>> seen = from_exchange(document.to_json(), "gpt-oss-20b")
    >>> seen.tp, seen.num_blocks, to_exchange(seen) == document
    (2, 218453, True)
    """
    if isinstance(document, CacheDocument):
        document.validate()
    else:
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
    """Return the entries of a document's layers; raise an error if the model lacks a layer."""
    known = {layer.name: layer for layer in model.layers}
    counts: dict[str, int] = defaultdict(int)
    for layer in document.layers:
        counts[layer.name] += 1
    if unknown := sorted(set(counts) - set(known)):
        got, some = ", ".join(map(repr, unknown[:3])), next(iter(known), "-")
        problem = f"Every layer of the document must be a layer of {model.name}"
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
        shown = " and ".join(map(str, list(holders)[:4]))
        raise AtlasError(
            Code.BAD_TOPOLOGY,
            "Each pipeline stage must consist of the same number of consecutive ranks",
            got=f"{document.ranks} ranks, with layers on ranks {shown}",
            hint="Number the ranks stage by stage, and use equally many in each stage",
        )
    return tp


def _unlike(layer: str, got: str) -> AtlasError:
    problem = f"The document and the model disagree on layer {layer}"
    hint = "Pass the model with the dtypes and the topology of the document"
    return AtlasError(Code.UNLIKE_LAYERS, problem, got=got, hint=hint)


Bases = dict[tuple[int, int], int]
"""The first byte of a region in its pool, by (stage, region)."""


def _pools(document: CacheDocument, tp: int) -> tuple[tuple[Pool, ...], Bases]:
    """Return the pools of a plan: for each stage, one pool for each pool of the document.

    Each region of the document becomes a segment of a pool.
    """
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
            got = f"fields of {' and '.join(map(str, sorted(blocks)))} blocks"
            hint = "Put fields with different numbers of blocks into different pools"
            raise AtlasError(Code.BAD_PLAN, problem, got=got, hint=hint)
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
    names: dict[str, tuple[str, ...]] = {"N": ("N",), "C": ("C",)}
    if len(one.field.axes.get("N", ())) == 2:
        names["N"] = ("k", "N")
    if len(one.field.axes.get("C", ())) == 2:
        names["C"] = ("C", "c")
    placed = one.placement()
    renamed = {
        f"{axis}{n or ''}": name for axis, own in names.items() for n, name in enumerate(own)
    }
    placed = placed.rename(**{axis: renamed.get(axis, axis) for axis in placed.axes})
    if any(len(axis) > 1 for axis in placed.axes):
        got = f"field {one.field.name} with axes {one.field.axes}; a plan divides only N and C"
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
        got = f"{states} states of {per_state} tokens in a block of {block} tokens"
        raise _unlike(part.layer.name, got)
    return seen


def _state_part(part: _StoredPart, stage: int, given: Mapping[str, Placement], tp: int) -> Region:
    """Return the region of one part of a recurrent state.

    Raises an error unless the fields of the part follow each other as in a page of the plan.
    """
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
        got = "a part of a recurrent state with fields at other offsets than in the model's page"
        raise _unlike(part.layer.name, got)
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
    if HOLDS.get(kind, "tokens") != held:
        raise _unlike(part.layer.name, f"a group that holds {held} for a cache of kind {kind}")
    for here, there in _content(part, stage, tp, number):
        if here[0] != there[0]:
            problem = (
                f"The document and the model store layer {part.layer.name} in different dtypes"
            )
            hint = "Load the model with the dtypes of the document"
            got = f"{here[0]} in the document, {there[0]} in the model"
            raise AtlasError(Code.UNLIKE_DTYPES, problem, got=got, hint=hint)
        if here != there:
            got = f"rows {here[1]} in the document, {there[1]} in the model"
            raise _unlike(part.layer.name, got)


def _groups(document: CacheDocument, parts: Iterable[_StoredPart]) -> tuple[Group, ...]:
    """Return the groups of a document; their kinds follow from the specs of their layers."""
    members: dict[int, list[Layer]] = defaultdict(list)
    for part in parts:
        members[part.fields[0].layer.group].append(part.layer)
    if set(members) != set(range(len(document.groups))):
        got = f"{len(document.groups)} groups, of which only {sorted(members)[:8]} have layers"
        raise bad_exchange("Each group must have layers", got)
    contexts = {group.context for group in document.groups if group.holds == "tokens"}
    if len(contexts) > 1:
        got = f"contexts {sorted(contexts)[:8]}"
        raise bad_exchange("All groups that hold tokens must have the same context", got)
    return tuple(_read_group(one, members[n]) for n, one in enumerate(document.groups))


def _read_group(group: DocumentGroup, members: Sequence[Layer]) -> Group:
    specs = [layer.spec for layer in members]
    kinds = {kind_of(spec) for spec in specs}
    kept = [kind for kind in FULL_KINDS if kind in kinds]
    fixed = group.holds != "tokens"
    if not fixed and group.keeps == DocumentKeeps():
        kind: Kind = kept[0] if kept else "full_attention"
        return Group.of(kind, specs[0], block=group.tokens, pool=group.pool)
    for spec in specs:
        made = Group.of(kind_of(spec), spec, block=group.tokens, pool=group.pool)
        if fixed or (kind_of(spec) not in FULL_KINDS and keeps_of(made.visibility) == group.keeps):
            return made
    raise _unlike(members[0].name, f"a group that keeps {group.keeps}")
