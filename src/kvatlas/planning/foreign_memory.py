"""A `Plan` of memory that kvatlas did not plan: what a running engine hands a connector.

An engine has tensors: a shape, strides, a place in some storage, and (known to whoever
wrote it, not to the tensor) what each axis means. With axes named, each layer's tensor
is a `Placement`, and the plan that would have put it there is found and checked against
it byte by byte. What no plan can say is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Page, Placement, ceil_div, natural, positive
from kvatlas.models import Layer, Model
from kvatlas.planning.plan_parts import Group, Pool, Region
from kvatlas.planning.plans import Plan
from kvatlas.planning.sized_layers import kind_of, page_of
from kvatlas.specs import Attention, Packing, Spec

_FAR = 1 << 62


def foreign(
    model: Any,
    layers: Mapping[str, Placement] | Sequence[Mapping[str, Placement]],
    *,
    tp: int = 1,
    max_len: int | None = None,
    groups: Sequence[Sequence[str]] | None = None,
    blocks: Mapping[str, int] | int | None = None,
    pools: Sequence[int] | None = None,
    packing: Packing | None = None,
) -> Plan:
    """The plan behind an engine's own tensors, one placement for each layer of a rank.

    Placements have axes B, H, N and C (those that a layer has no use for may be left
    out), C in elements; with pipeline stages, pass one mapping for each. `groups` lists
    the layers of each block table, otherwise layers of a kind share one. `blocks` is the
    tokens of a block, by layer or for all, where a tensor counts smaller kernel blocks or
    keeps one state for each block. Offsets count from one base address for each pool;
    `pools` numbers the pool of each group, without it groups with equally many blocks
    share one. `packing` says where K and V sit in a page.

    >>> import numpy as np
    >>> model = Model.load("Qwen3-8B")
    >>> kv = np.zeros((36, 4, 16, 8, 256), np.float16)  # layers, blocks, states, heads, K|V
    >>> tensors = {
    ...     layer.name: Placement.from_tensor(kv[layer.index], axes="BNHC")
    ...     for layer in model.layers
    ... }
    >>> seen = foreign(model, tensors)
    >>> seen.layout, seen.block_size, seen.num_blocks, seen.pools[0].nbytes == kv.nbytes
    ('LBNHC', 16, 4, True)
    """
    loaded = model if isinstance(model, Model) else Model.load(model)
    stages = [layers] if isinstance(layers, Mapping) else list(layers)
    known = {layer.name: _packed(layer, packing) for layer in loaded.layers}
    named = [name for stage in stages for name in stage]
    unknown = sorted(set(named) - set(known))
    if unknown or len(set(named)) < len(named) or not named:
        raise AtlasError(
            Code.UNKNOWN_LAYER,
            "Tensors are not of the model's own layers, or name one twice",
            got=f"{unknown[:3] or named[:3]} for {loaded.name}",
            hint=f"It has layers such as {next(iter(known), '-')}",
        )
    tp = positive(tp, "tp")
    length = positive(max_len or loaded.max_len or 32768, "the greatest length")
    seen = [
        _Seen(stage, known[name], placed, _block(blocks, name), tp, length)
        for stage, tensors in enumerate(stages)
        for name, placed in tensors.items()
    ]
    tables = _tables(seen, groups)
    homes = _homes(seen, tables, pools)
    return _plan(loaded, seen, tables, homes, tp=tp, pp=len(stages), max_len=length)


class _Seen:
    """One layer's tensor, and the region that is the same bytes."""

    def __init__(
        self, stage: int, layer: Layer, placed: Placement, block: int | None, tp: int, most: int
    ) -> None:
        self.stage, self.layer, self.placed = stage, layer, _in_bytes(placed)
        spec: Spec = layer.spec
        per_state = spec.tokens_per_state
        self.kernel_block = (
            (block or most) if per_state is None else _size(self.placed, "N") * per_state
        )
        self.block = block or self.kernel_block
        if self.block % self.kernel_block:
            raise _unlike(layer.name, f"blocks of {self.block} over {self.kernel_block} states")
        self.page: Page = page_of(spec, self.kernel_block, tp)
        self.split = self.block // self.kernel_block
        self.blocks = _size(self.placed, "B") // self.split
        sizes = [_size(self.placed, axis) for axis in "HNC"]
        if sizes != [self.page.heads, self.page.states, self.page.content]:
            page = f"{self.page.heads} heads, {self.page.states} states, {self.page.content} bytes"
            raise _unlike(layer.name, f"H, N, C of {sizes} for a page with {page}")

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for layers that one region may hold, if their pages step evenly."""
        return (self.stage, self.block, self.page, self.placed.shift(-self.placed.offset))


def _regions(seen: list[_Seen], tables: dict[str, int], tp: int) -> list[Region]:
    """As few regions as hold the tensors: layers at even steps through memory share one."""
    families: dict[tuple[int, object], list[_Seen]] = defaultdict(list)
    for one in seen:
        families[tables[one.layer.name], one.alike].append(one)
    all_regions: list[Region] = []
    for (group, _), family in families.items():
        family.sort(key=lambda one: one.placed.offset)
        steps = {b.placed.offset - a.placed.offset for a, b in pairwise(family)}
        step = steps.pop() if len(steps) == 1 else 0
        regions = [_region(family, group, step)] if step else []
        if not regions or not _same(regions[0], family, tp):
            regions = [_region([one], group, 0) for one in family]
            for region, one in zip(regions, family, strict=True):
                if not _same(region, [one], tp):
                    raise _unlike(one.layer.name, f"{one.placed} in no order of its axes")
        all_regions += regions
    return all_regions


def _region(family: list[_Seen], group: int, step: int) -> Region:
    one = family[0]
    apart = one.placed.stride("B") if _size(one.placed, "B") > 1 else one.page.nbytes
    return Region(
        stage=one.stage,
        group=group,
        layers=tuple(member.layer for member in family),
        block=one.block,
        kernel_block=one.kernel_block,
        page_bytes=one.page.nbytes * one.split,
        layout=_order(one.placed, step),
        offset=one.placed.offset,
        page_stride=step or one.page.nbytes,
        block_stride=apart * one.split,
    )


def _same(region: Region, family: list[_Seen], tp: int) -> bool:
    """Whether a region has its layers where their tensors are."""
    try:
        placed = region.placement(tp, family[0].blocks)
    except AtlasError:
        return False
    placed = placed.fold("B", "k", into="B") if "k" in placed.axes else placed
    return all(
        placed.select("L", index).reorder(*"BHNC") == _whole(one.placed)
        for index, one in enumerate(family)
    )


def _order(placed: Placement, step: int) -> str:
    """The order of the axes; those with one coordinate may be anywhere, so outermost."""
    sizes = {axis: _size(placed, axis) for axis in "BHN"}
    steps = {axis: placed.stride(axis) if n > 1 else _FAR for axis, n in sizes.items()}
    steps["L"] = step or 2 * _FAR
    return "".join(sorted("LBHN", key=lambda axis: -steps[axis])) + "C"


def _plan(
    model: Model,
    seen: list[_Seen],
    tables: dict[str, int],
    homes: dict[int, int],
    *,
    tp: int,
    pp: int,
    max_len: int,
) -> Plan:
    first = {tables[one.layer.name]: one for one in reversed(seen)}
    groups = [
        Group.of(kind_of(one.layer.spec), one.layer.spec, block=one.block, pool=homes[index])
        for index, one in sorted(first.items())
    ]
    reach: dict[tuple[int, int], int] = defaultdict(int)
    counts: dict[tuple[int, int], int] = {}
    for one in seen:
        home = (one.stage, homes[tables[one.layer.name]])
        reach[home] = max(reach[home], one.placed.stop)
        if counts.setdefault(home, one.blocks) != one.blocks:
            raise _unlike(one.layer.name, f"{one.blocks} blocks where others have {counts[home]}")
    pools = tuple(
        Pool(stage=s, index=i, blocks=counts[s, i], block_bytes=ceil_div(n, counts[s, i]))
        for (s, i), n in sorted(reach.items())
    )
    regions = _regions(seen, tables, tp)
    memory = max(sum(pool.nbytes for pool in pools if pool.stage == stage) for stage in range(pp))
    return Plan(
        model=model.name,
        policy="foreign",
        layout=regions[0].layout,
        tp=tp,
        pp=pp,
        dcp=1,
        memory=memory,
        block_size=groups[0].block,
        max_len=max_len,
        in_flight=0,
        groups=tuple(groups),
        pools=pools,
        regions=tuple(regions),
        reasons=("Somebody else's memory: described, not planned.",),
    )


def _tables(seen: list[_Seen], groups: Sequence[Sequence[str]] | None) -> dict[str, int]:
    """Which group each layer is in."""
    if groups is not None:
        tables = {name: index for index, names in enumerate(groups) for name in names}
        missing = [one.layer.name for one in seen if one.layer.name not in tables]
        if missing or len(tables) != len(seen):
            raise AtlasError(
                Code.BAD_PLAN,
                "A layer is in no group, or a group lists one without a tensor",
                got=f"{len(tables)} grouped of {len(seen)}, without {missing[:3]}",
                hint="List each layer of the tensors in one of the groups",
            )
        return tables
    kinds: dict[tuple[Any, ...], int] = {}
    tables = {}
    for one in seen:
        seen_by = one.layer.spec.visibility
        key = (kind_of(one.layer.spec), one.block, seen_by.window or seen_by.chunk)
        tables[one.layer.name] = kinds.setdefault(key, len(kinds))
    return tables


def _homes(
    seen: list[_Seen], tables: dict[str, int], pools: Sequence[int] | None
) -> dict[int, int]:
    """The pool of each group."""
    counts: dict[int, int] = {}
    homes: dict[int, int] = {}
    for one in seen:
        group = tables[one.layer.name]
        if pools is None:
            homes.setdefault(group, counts.setdefault(one.blocks, len(counts)))
        elif group < len(pools):
            homes[group] = natural(pools[group], "the number of a pool")
        else:
            raise AtlasError(
                Code.BAD_PLAN,
                "A group has no pool",
                got=f"{len(pools)} pools for group {group}",
                hint="Pass one pool number for each group",
            )
    return homes


def _packed(layer: Layer, packing: Packing | None) -> Layer:
    if packing is None or not isinstance(layer.spec, Attention):
        return layer
    return msgspec.structs.replace(layer, spec=msgspec.structs.replace(layer.spec, packing=packing))


def _block(blocks: Mapping[str, int] | int | None, name: str) -> int | None:
    block = blocks.get(name) if isinstance(blocks, Mapping) else blocks
    return None if block is None else positive(block, "the block size")


def _in_bytes(placed: Placement) -> Placement:
    """The same memory with C in bytes."""
    if placed.item == 1:
        return placed
    bytes_axis = Placement(
        (*placed.axes, "byte"),
        (*placed.sizes, placed.item),
        (*placed.strides, 1),
        placed.offset,
    )
    return (
        bytes_axis.fold("C", "byte", into="C")
        if "C" in placed.axes
        else bytes_axis.rename(byte="C")
    )


def _whole(placed: Placement) -> Placement:
    """With every axis of a page, those left out as one coordinate."""
    missing = [axis for axis in "BHNC" if axis not in placed.axes]
    return Placement(
        (*placed.axes, *missing),
        (*placed.sizes, *(1 for _ in missing)),
        (*placed.strides, *(0 for _ in missing)),
        placed.offset,
        placed.item,
    ).reorder(*"BHNC")


def _size(placed: Placement, axis: str) -> int:
    return placed.size(axis) if axis in placed.axes else 1


def _unlike(layer: str, got: str) -> AtlasError:
    return AtlasError(
        Code.BAD_TENSOR,
        f"The tensor of {layer} does not hold pages of what it keeps, in any order",
        got=got,
        hint="Name the axes as the engine means them, and say the packing and the block size",
    )
