"""Validation of documents and block tables of the exchange format.

Every reader of the format makes the same checks in the same order, so that all readers refuse a
document with the same code. For this reason, overlap is not searched for exactly. The rules about
overlap are simple conditions on strides and offsets, which every layout in use meets.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Placement
from kvatlas.geometry.runs import is_nested
from kvatlas.geometry.validation import refuse_unlike_steps, stays_in_its_cell
from kvatlas.planning.exchange_parts import (
    MOST,
    DocumentData,
    DocumentField,
    DocumentGroup,
    DocumentLayer,
    DocumentShard,
    TablesData,
)

_HINT = "Compare the document with docs/reference/exchange.md"


class StoredField(NamedTuple):
    """A field of a document, with its layer and with the group and the shard that it refers to."""

    layer: DocumentLayer
    field: DocumentField
    group: DocumentGroup
    shard: DocumentShard

    @property
    def item(self) -> int:
        """Bytes of one storage item: one element, or 1 byte if several elements share a byte."""
        return DType.of(self.field.dtype).item

    @property
    def name(self) -> str:
        """The names of the layer and the field, for error messages."""
        return f"{self.field.name} of {self.layer.name}"

    def placement(self) -> Placement:
        """Return the field's placement.

        If an axis N has several (size, stride) steps, the steps become axes N, N1, N2, ...
        """
        steps = [
            (f"{axis}{place or ''}", size, stride)
            for axis, pairs in sorted(self.field.axes.items())
            for place, (size, stride) in enumerate(pairs)
        ]
        names, sizes, strides = zip(*steps, strict=True)
        return Placement(names, sizes, strides, self.field.offset, self.item)

    def rows(self) -> dict[str, int]:
        """Return the size of each axis except B and N, over all ranks of the model."""
        sizes = {axis: _total(pairs) for axis, pairs in self.field.axes.items() if axis not in "BN"}
        return sizes | ({self.shard.axis: self.shard.size} if self.shard.axis else {})


def stored_fields(document: DocumentData) -> Iterator[StoredField]:
    """Yield the fields of a document in order."""
    for layer in document.layers:
        for field in layer.fields:
            yield StoredField(
                layer, field, document.groups[layer.group], document.shards[field.shard]
            )


def bad_exchange(problem: str, got: object) -> AtlasError:
    """Return an `AtlasError` with code `bad_exchange`."""
    return AtlasError(Code.BAD_EXCHANGE, problem, got=got, hint=_HINT)


def check_document(document: DocumentData) -> None:
    """Raise an error if a document's parts overlap, are out of bounds or contradict each other."""
    _check_references(document)
    fields = list(stored_fields(document))
    for one in fields:
        DType.of(one.field.dtype)
        if one.field.dtype != DType.of(one.field.dtype).name:
            hint = f"Use {DType.of(one.field.dtype).name}"
            problem = "The document must use the canonical name of each dtype"
            raise AtlasError(Code.UNKNOWN_DTYPE, problem, got=repr(one.field.dtype), hint=hint)
    for shard in document.shards:
        _check_shard(shard, document.ranks)
    for one in fields:
        _check_axes(one)
    _check_content(fields)
    for one in fields:
        steps = [stride for pairs in one.field.axes.values() for _, stride in pairs]
        if any(number % one.item for number in (one.field.offset, *steps)):
            size = f"the element size, {one.item} bytes"
            problem = f"The offset and the strides of {one.name} must be multiples of {size}"
            got = f"offset {one.field.offset} and axes {one.field.axes}"
            raise AtlasError(Code.MISALIGNED, problem, got=got, hint=_HINT)
    _check_bounds(document, fields)
    _check_overlap(fields)


def _check_references(document: DocumentData) -> None:
    """Check indices, and that groups and regions are used consistently."""
    pools: dict[int, int] = {}
    for layer in document.layers:
        if layer.group >= len(document.groups):
            raise bad_exchange(f"The group of layer {layer.name} does not exist", layer.group)
        for field in layer.fields:
            if field.region >= len(document.regions) or field.shard >= len(document.shards):
                got = f"region {field.region} and shard {field.shard}"
                problem = (
                    f"The region or the shard of field {field.name} of {layer.name} does not exist"
                )
                raise bad_exchange(problem, got)
            pool = document.groups[layer.group].pool
            if pools.setdefault(field.region, pool) != pool:
                got = f"region {field.region} with pools {pools[field.region]} and {pool}"
                raise bad_exchange("A region must belong to one pool", got)
    for group in document.groups:
        if group.context > 1 and group.holds != "tokens":
            got = f"a group that holds {group.holds}, with context {group.context}"
            raise bad_exchange("Only groups that hold tokens can be divided over ranks", got)
    seen: dict[str, int] = {}
    for layer in document.layers:
        if seen.setdefault(layer.name, layer.index) != layer.index:
            raise bad_exchange("The parts of a layer must have the same index", layer.name)


def _check_shard(shard: DocumentShard, ranks: int) -> None:
    """Check that all ranks that hold rows of a shard hold the same number of rows.

    The rows of a rank must be in ascending ranges.
    """
    held = [ranges for ranges in shard.ranks if ranges is not None]
    rows = {sum(length for _, length in ranges) for ranges in held}
    fits = len(shard.ranks) == ranks and len(rows) == 1 and (bool(shard.axis) or shard.size == 1)
    for ranges in held:
        fits &= ranges[-1][0] + ranges[-1][1] <= shard.size
        fits &= all(start + length < second for (start, length), (second, _) in pairwise(ranges))
    if not fits:
        problem = (
            f"A shard must have {ranks} entries, one for each rank. All entries with rows must "
            "have equally many rows, in ascending ranges that do not touch"
        )
        got = f"axis {shard.axis!r} of size {shard.size}, with the entries {shard.ranks}"
        raise AtlasError(Code.BAD_FIELD, problem, got=got, hint=_HINT)


def _check_axes(one: StoredField) -> None:
    """Check the axes of a field against its group and its shard."""
    axes, group, shard = one.field.axes, one.group, one.shard
    fits = all(_total(pairs) <= MOST for pairs in axes.values())
    fits &= "B" in axes and len(axes["B"]) == 1 and shard.axis not in ("B", "N")
    fits &= ("N" in axes) == (group.holds != "state")
    if group.holds == "tokens" and "N" in axes:
        fits &= group.tokens % _total(axes["N"]) == 0
    if shard.axis:
        held = next(ranges for ranges in shard.ranks if ranges is not None)
        rows = sum(length for _, length in held)
        fits &= shard.axis in axes and [size for size, _ in axes[shard.axis]] == [rows]
    if not fits:
        problem = f"The axes of field {one.name} contradict the group or the shard of the field"
        raise AtlasError(Code.BAD_FIELD, problem, got=axes, hint=_HINT)


def _check_content(fields: list[StoredField]) -> None:
    """Check that the parts of a layer have the same fields and the same content."""
    parts: dict[tuple[str, str], list[StoredField]] = defaultdict(list)
    for one in fields:
        parts[one.layer.name, one.field.name].append(one)
    names: dict[str, set[str]] = defaultdict(set)
    for layer, field in parts:
        names[layer].add(field)
    for one in fields:
        own = [field.name for field in one.layer.fields]
        if set(own) != names[one.layer.name] or len(set(own)) < len(own):
            raise _unlike_parts(one)
    for alike in parts.values():
        for one in alike[1:]:
            if _form(one) != _form(alike[0]):
                raise _unlike_parts(one)


def _form(one: StoredField) -> tuple[object, ...]:
    """Return the properties of a field that must be equal in all parts of its layer."""
    return (one.field.dtype, one.field.scale, one.rows(), one.shard.axis, one.group.holds) + (
        (one.group.tokens // _total(one.field.axes["N"]),) if one.group.holds == "tokens" else ()
    )


def _unlike_parts(one: StoredField) -> AtlasError:
    problem = "All parts of a layer must have the same fields, dtypes and sizes"
    got = f"field {one.name} in {one.field.dtype}, with axes {one.field.axes}"
    return AtlasError(Code.BAD_FIELD, problem, got=got, hint=_HINT)


def _check_bounds(document: DocumentData, fields: list[StoredField]) -> None:
    for one in fields:
        steps = [step for pairs in one.field.axes.values() for step in pairs]
        last = one.field.offset + sum((size - 1) * stride for size, stride in steps)
        if last + one.item > document.regions[one.field.region]:
            got = f"{one.name}, which ends at byte {last + one.item}"
            nbytes = document.regions[one.field.region]
            problem = (
                f"Fields of region {one.field.region} must end within the region's {nbytes} bytes"
            )
            raise AtlasError(Code.OUT_OF_BOUNDS, problem, got=got, hint=_HINT)


def _check_overlap(fields: list[StoredField]) -> None:
    """Check that fields of one group share no bytes.

    Blocks of two groups may share bytes only if the blocks have the same id.
    """
    for one in fields:
        sizes, strides = zip(*(s for pairs in one.field.axes.values() for s in pairs), strict=True)
        if not is_nested(sizes, strides, one.item, apart=False):
            raise _overlap(f"axes {one.field.axes} of {one.name}")
    placed = [one.placement() for one in fields]
    groups: dict[tuple[int, int], dict[str, Placement]] = defaultdict(dict)
    regions: dict[int, list[int]] = defaultdict(list)
    for place, one in enumerate(fields):
        groups[one.field.region, one.layer.group][f"{place}, {one.name}"] = placed[place]
        regions[one.field.region].append(place)
    for parts in groups.values():
        refuse_unlike_steps(parts)
    for places in regions.values():
        if len({fields[place].layer.group for place in places}) > 1:
            _check_cells([(fields[place], placed[place]) for place in places])


def _check_cells(members: Sequence[tuple[StoredField, Placement]]) -> None:
    """Check that blocks of different groups in one region overlap only if their ids are equal."""
    steps = {one.field.axes["B"] for one, _ in members}
    ((count, cell),) = next(iter(steps))
    for one, placed in members:
        if len(steps) > 1 or (count > 1 and not stays_in_its_cell(placed, cell, count)):
            raise _overlap(f"a block of {one.name} and a block with another id")


def _overlap(got: str) -> AtlasError:
    return AtlasError(Code.OVERLAP, got=got, hint=_HINT)


def _total(pairs: Sequence[tuple[int, int]]) -> int:
    """Return the number of coordinates of an axis."""
    return math.prod(size for size, _ in pairs)


# -- block tables -----------------------------------------------------------------------


def check_tables_of(document: DocumentData, digest: str, tables: TablesData) -> None:
    """Raise an error if block tables do not fit a document. `digest` is the document's digest."""
    if tables.cache != digest:
        problem = "The block tables are for another document"
        raise AtlasError(
            Code.CHECKSUM,
            problem,
            got=f"tables of document {tables.cache}",
            hint=f"Pass the block tables of document {digest}",
        )
    most: dict[int, int] = {}
    for one in stored_fields(document):
        ((count, _),) = one.field.axes["B"]
        most[one.layer.group] = min(count, most.get(one.layer.group, count))
    numbers = [table.group for table in tables.tables]
    if len(set(numbers)) < len(numbers) or not set(numbers) <= set(most):
        problem = "There must be at most one table for each group, and the group must have layers"
        raise bad_exchange(problem, f"tables of groups {numbers}")
    taken: set[tuple[int, int]] = set()
    for table in tables.tables:
        group = document.groups[table.group]
        (first, stop), blocks = table.tokens, table.blocks
        if first > stop:
            problem = f"The token range of group {table.group} must not end before it starts"
            raise AtlasError(Code.BAD_TOKENS, problem, got=table.tokens, hint=_HINT)
        entries = needed_entries(group, first, stop)
        exact = group.holds == "tokens" or not entries or len(blocks) == 1
        if entries.stop > len(blocks) or not exact or None in blocks[entries.start : entries.stop]:
            needs = "a block id for every block of its tokens"
            if group.holds != "tokens":
                needs = "exactly one block id"
            problem = f"The table of group {table.group} must have {needs}"
            null = f"{blocks.count(None)} of them null"
            got = f"{len(blocks)} block ids, {null}, for tokens {first} to {stop - 1}"
            raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=_HINT)
        for block in blocks[entries.start : entries.stop]:
            if block is None or block >= most[table.group]:
                problem = f"Block ids of group {table.group} must be in 0..{most[table.group] - 1}"
                raise AtlasError(Code.OUT_OF_RANGE, problem, got=block, hint=_HINT)
            if (group.pool, block) in taken:
                problem = f"The tables must contain each block of pool {group.pool} only once"
                raise AtlasError(Code.TWICE, problem, got=block, hint=_HINT)
            taken.add((group.pool, block))


def needed_entries(group: DocumentGroup, first: int, stop: int) -> range:
    """Return the indices of the block table entries that hold tokens first .. stop - 1."""
    if first == stop:
        return range(0)
    if group.holds != "tokens":
        return range(1)
    span = group.tokens * group.context
    return range(first // span, -(-stop // span))
