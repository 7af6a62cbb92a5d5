"""A `Plan` of memory that kvatlas did not plan: what a running engine hands a connector.

An engine has tensors: a shape, strides, a place in some storage, and (known to whoever
wrote it, not to the tensor) what each axis means. With axes named, each layer's tensor
is a `Placement`, and the plan that would have put it there is found and checked against
it byte by byte. What no plan can say is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Page, Placement
from kvatlas.geometry.integers import ceil_div, natural, positive
from kvatlas.models import Layer, Model
from kvatlas.planning.plan_parts import Group, Pool, Region
from kvatlas.planning.plans import Plan
from kvatlas.planning.sized_layers import FULL_KINDS, kind_of, page_of
from kvatlas.specs import Attention, Packing

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
    full: Collection[str] = (),
) -> Plan:
    """The plan behind an engine's own tensors, one placement for each layer of a rank.

    Placements have axes B, H, N and C (those that a layer has no use for may be left
    out), C in elements; with pipeline stages, pass one mapping for each. `groups` lists
    the layers of each block table, otherwise layers of a kind share one. `blocks` is the
    tokens of a block, by layer or for all, where a tensor counts smaller kernel blocks or
    keeps one state for each block. Offsets count from one base address for each pool;
    `pools` numbers the pool of each group, without it groups with equally many blocks
    share one. `packing` says where K and V sit in a page. A group that has one of the layers
    in `full` keeps all tokens, also where its layers see a window alone.

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
    loaded = Model.load(model)
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
    longest = loaded.max_len or 32768 if max_len is None else max_len
    length = positive(longest, "the greatest length")
    seen = [
        _Seen(stage, known[name], placed, _block(blocks, name), tp, length)
        for stage, tensors in enumerate(stages)
        for name, placed in tensors.items()
    ]
    _group(seen, groups)
    members: dict[int, list[_Seen]] = defaultdict(list)
    for one in seen:
        members[one.group].append(one)
    homes = _homes({group: own[0] for group, own in members.items()}, pools)
    tables = tuple(_table(own, homes[group], full) for group, own in sorted(members.items()))
    owned = _pools(seen, homes)
    regions = _regions(seen, tp)
    return Plan(
        model=loaded.name,
        policy="foreign",
        layout=regions[0].layout,
        tp=tp,
        pp=len(stages),
        dcp=1,
        memory=max(sum(p.nbytes for p in owned if p.stage == n) for n in range(len(stages))),
        block_size=tables[0].block,
        max_len=length,
        in_flight=0,
        groups=tables,
        pools=owned,
        regions=tuple(regions),
        reasons=("Somebody else's memory: described, not planned.",),
    )


class _Seen:
    """One layer's tensor, and the region that is the same bytes."""

    group = 0

    def __init__(
        self, stage: int, layer: Layer, placed: Placement, block: int | None, tp: int, most: int
    ) -> None:
        if not isinstance(placed, Placement):
            raise _unlike(layer.name, f"{type(placed).__name__} instead of a Placement")
        self.stage, self.layer, self.placed = stage, layer, _in_bytes(placed)
        size, per_state = self.placed.size, layer.spec.tokens_per_state
        self.kernel_block = (block or most) if per_state is None else size("N") * per_state
        self.block = block or self.kernel_block
        if self.block % self.kernel_block:
            raise _unlike(layer.name, f"blocks of {self.block} over {self.kernel_block} states")
        self.page: Page = page_of(layer.spec, self.kernel_block, tp)
        self.split = self.block // self.kernel_block
        self.blocks = size("B") // self.split
        if not self.blocks:
            raise _unlike(layer.name, f"{size('B')} kernel blocks for one block of {self.split}")
        sizes = [size(axis) for axis in "HNC"]
        if sizes != [self.page.heads, self.page.states, self.page.content]:
            page = f"{self.page.heads} heads, {self.page.states} states, {self.page.content} bytes"
            raise _unlike(layer.name, f"H, N, C of {sizes} for a page with {page}")

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for layers that one region may hold, if their pages step evenly."""
        placed = self.placed.shift(-self.placed.offset)
        return (self.group, self.stage, self.block, self.page, placed)


def _group(seen: list[_Seen], groups: Sequence[Sequence[str]] | None) -> None:
    """Say of each layer which group it is in: of `groups`, or one for each kind."""
    if groups is None:
        kinds: dict[tuple[Any, ...], int] = {}
        for one in seen:
            visible = one.layer.spec.visibility
            kind = (kind_of(one.layer.spec), one.block, visible.window or visible.chunk)
            one.group = kinds.setdefault(kind, len(kinds))
        return
    tables = {name: index for index, names in enumerate(groups) for name in names}
    missing = [one.layer.name for one in seen if one.layer.name not in tables]
    if missing or len(tables) != len(seen):
        raise AtlasError(
            Code.BAD_PLAN,
            "A layer is in no group, or a group lists one without a tensor",
            got=f"{len(tables)} grouped of {len(seen)}, without {missing[:3]}",
            hint="List each layer of the tensors in one of the groups",
        )
    for one in seen:
        one.group = tables[one.layer.name]


def _table(members: list[_Seen], pool: int, full: Collection[str]) -> Group:
    """The group of some layers: it keeps all tokens where one of them wants them."""
    kinds = {kind_of(one.layer.spec) for one in members}
    kind, kept = kind_of(members[0].layer.spec), [k for k in FULL_KINDS if k in kinds]
    if kept or any(one.layer.name in full for one in members):
        kind = kept[0] if kept else "full_attention"
    spec = members[0].layer.spec
    return Group.of(kind, spec, block=members[0].block, pool=pool)


def _homes(first: dict[int, _Seen], pools: Sequence[int] | None) -> dict[int, int]:
    """The pool of each group, by one of the group's layers."""
    if pools is None:
        counts = list(dict.fromkeys(one.blocks for one in first.values()))
        return {group: counts.index(one.blocks) for group, one in first.items()}
    if isinstance(pools, str | Mapping) or max(first) >= len(pools):
        raise AtlasError(
            Code.BAD_PLAN,
            "A group has no pool, or pools are not in a row",
            got=f"pools {pools!r:.100} for group {max(first)}",
            hint="Pass one pool number for each group",
        )
    return {group: natural(pools[group], "the number of a pool") for group in first}


def _pools(seen: list[_Seen], homes: dict[int, int]) -> tuple[Pool, ...]:
    """The pools of all stages, as large as the tensors reach."""
    reach: dict[tuple[int, int], int] = defaultdict(int)
    counts: dict[tuple[int, int], int] = {}
    for one in seen:
        home = (one.stage, homes[one.group])
        reach[home] = max(reach[home], one.placed.stop)
        if counts.setdefault(home, one.blocks) != one.blocks:
            raise _unlike(one.layer.name, f"{one.blocks} blocks where others have {counts[home]}")
    return tuple(
        Pool(stage=s, index=i, blocks=counts[s, i], block_bytes=ceil_div(n, counts[s, i]))
        for (s, i), n in sorted(reach.items())
    )


def _regions(seen: list[_Seen], tp: int) -> list[Region]:
    """As few regions as hold the tensors: layers at even steps through memory share one."""
    families: dict[object, list[_Seen]] = defaultdict(list)
    for one in seen:
        families[one.alike].append(one)
    regions: list[Region] = []
    for family in families.values():
        family.sort(key=lambda one: one.placed.offset)
        steps = {b.placed.offset - a.placed.offset for a, b in pairwise(family)}
        whole = _region(family, steps.pop(), tp) if len(steps) == 1 else None
        if whole is not None:
            regions.append(whole)
            continue
        for one in family:
            region = _region([one], 0, tp)
            if region is None:
                raise _unlike(one.layer.name, f"{one.placed} in no order of its axes")
            regions.append(region)
    return regions


def _region(family: list[_Seen], step: int, tp: int) -> Region | None:
    """The region that has layers, `step` bytes apart, where their tensors are; None without."""
    one = family[0]
    # An axis with one coordinate has no stride and may be anywhere, so it goes outermost.
    strides = {axis: one.placed.stride(axis) or _FAR for axis in "BHN"}
    strides["L"] = step or 2 * _FAR
    region = Region(
        stage=one.stage,
        group=one.group,
        layers=tuple(member.layer for member in family),
        block=one.block,
        kernel_block=one.kernel_block,
        page_bytes=one.page.nbytes * one.split,
        layout="".join(sorted("LBHN", key=lambda axis: -strides[axis])) + "C",
        offset=one.placed.offset,
        page_stride=step or one.page.nbytes,
        block_stride=(one.placed.stride("B") or one.page.nbytes) * one.split,
    )
    try:
        placed = region.placement(tp, one.blocks)
    except AtlasError:
        return None
    placed = placed.fold("B", "k", into="B") if "k" in placed.axes else placed
    pages = [placed.select("L", index).reorder(*"BHNC") for index in range(len(family))]
    return region if pages == [member.placed for member in family] else None


def _packed(layer: Layer, packing: Packing | None) -> Layer:
    if packing is None or not isinstance(layer.spec, Attention):
        return layer
    return msgspec.structs.replace(layer, spec=msgspec.structs.replace(layer.spec, packing=packing))


def _block(blocks: Mapping[str, int] | int | None, name: str) -> int | None:
    block = blocks.get(name) if isinstance(blocks, Mapping) else blocks
    return None if block is None else positive(block, "the block size")


def _in_bytes(placed: Placement) -> Placement:
    """The same memory over all axes of a page, C in bytes; axes left out have one coordinate."""
    missing = [axis for axis in "BHNC" if axis not in placed.axes]
    whole = Placement(
        (*placed.axes, *missing, "byte"),
        (*placed.sizes, *(1 for _ in missing), placed.item),
        (*placed.strides, *(0 for _ in missing), 1),
        placed.offset,
    )
    return whole.fold("C", "byte", into="C").reorder(*"BHNC")


def _unlike(layer: str, got: str) -> AtlasError:
    return AtlasError(
        Code.BAD_TENSOR,
        f"The tensor of {layer} does not hold pages of what it keeps, in any order",
        got=got,
        hint="Name the axes as the engine means them, and say the packing and the block size",
    )
