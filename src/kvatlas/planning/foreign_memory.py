"""`foreign()`: build a `Plan` that describes the existing memory of an engine.

A connector receives tensors from a running engine. A tensor has a shape, strides and an
offset, but no axis names, so the connector adds the names and passes each layer's tensor as a
`Placement`. `foreign` finds the plan that has the same placements and validates it. `foreign`
raises an error if no plan can describe the memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Placement
from kvatlas.geometry.integers import ceil_div, natural, positive
from kvatlas.models import Layer, Model
from kvatlas.planning.foreign_layers import SeenLayer, seen_layer, wrong_tensor
from kvatlas.planning.plan_parts import Group, Pool, Region
from kvatlas.planning.plans import Plan
from kvatlas.planning.sized_layers import FULL_KINDS, kind_of
from kvatlas.specs import Attention, Packing

Tensors = Mapping[str, Placement | Mapping[str, Placement]]
"""The tensors of a rank, by layer: one placement, or one for each field of the layer."""


def foreign(
    model: Any,
    layers: Tensors | Sequence[Tensors],
    *,
    tp: int = 1,
    max_len: int | None = None,
    groups: Sequence[Sequence[str]] | None = None,
    blocks: Mapping[str, int] | int | None = None,
    pools: Sequence[int] | None = None,
    packing: Packing | None = None,
    full: Collection[str] = (),
) -> Plan:
    """Return the plan that describes an engine's tensors.

    - `layers`: the placement of each layer on one rank, or one such mapping per pipeline
      stage. Placements have the axes B, H, N and C, with C in elements; axes that a layer
      does not need may be omitted. Offsets are relative to one base address per pool.
    - `groups`: the layers of each block table. By default, layers of the same kind share one.
    - `blocks`: tokens per block, for all layers or by layer. Needed if the tensor's B axis
      counts smaller kernel blocks, or if a layer has one state per block.
    - `pools`: the pool index of each group. By default, groups with the same number of blocks
      share a pool.
    - `packing`: where K and V are in a page; see `Attention.packing`.
    - `full`: layers whose groups keep all tokens, even if the layers see only a window.

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

    K and V in separate parts of a tensor, as in SGLang:

    >>> kv = np.zeros((36, 2, 4, 8, 16, 128), np.float16)  # layers, K and V, pages, heads, ...
    >>> tensors = {
    ...     layer.name: {
    ...         "k": Placement.from_tensor(kv[layer.index, 0], axes="BHNC"),
    ...         "v": Placement.from_tensor(kv[layer.index, 1], axes="BHNC"),
    ...     }
    ...     for layer in model.layers
    ... }
    >>> seen = foreign(model, tensors)
    >>> seen.view("model.layers.0.self_attn.attn", "v").offset == kv[0, 0].nbytes
    True
    """
    loaded = Model.load(model)
    stages = [layers] if isinstance(layers, Mapping) else list(layers)
    known = {layer.name: _packed(layer, packing) for layer in loaded.layers}
    named = [name for stage in stages for name in stage]
    unknown = sorted(set(named) - set(known))
    if unknown or not named:
        raise AtlasError(
            Code.UNKNOWN_LAYER,
            f"`layers` must use the layer names of {loaded.name}",
            got=", ".join(map(repr, unknown[:3])) or "no layers",
            hint=f"Use names such as {next(iter(known), '-')!r}",
        )
    if repeated := [name for name, count in Counter(named).items() if count > 1]:
        raise AtlasError(
            Code.UNKNOWN_LAYER,
            "Each layer must be on one pipeline stage only",
            got=f"{repeated[0]!r} on {Counter(named)[repeated[0]]} stages",
            hint="Pass each layer's placement once",
        )
    tp = positive(tp, "tp")
    longest = loaded.max_len or 32768 if max_len is None else max_len
    length = positive(longest, "max_len")
    seen = [
        seen_layer(stage, known[name], placed, _block(blocks, name), tp, length)
        for stage, tensors in enumerate(stages)
        for name, placed in tensors.items()
    ]
    _group(seen, groups)
    members: dict[int, list[SeenLayer]] = defaultdict(list)
    for one in seen:
        members[one.group].append(one)
    homes = _homes({group: own[0] for group, own in members.items()}, pools)
    tables = tuple(_table(own, homes[group], full) for group, own in sorted(members.items()))
    owned = _pools(seen, homes)
    regions = regions_of(seen)
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
        reasons=("This plan describes an engine's memory; kvatlas did not choose it.",),
    )


def _group(seen: list[SeenLayer], groups: Sequence[Sequence[str]] | None) -> None:
    """Set the group of each layer: from `groups`, or one group per kind of layer."""
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
        absent = f"; {', '.join(map(repr, missing[:3]))} in no group" if missing else ""
        raise AtlasError(
            Code.BAD_PLAN,
            "`groups` must list exactly the layers that have tensors",
            got=f"{len(tables)} layers in groups and {len(seen)} layers with tensors{absent}",
            hint="List each layer in one group",
        )
    for one in seen:
        one.group = tables[one.layer.name]


def _table(members: list[SeenLayer], pool: int, full: Collection[str]) -> Group:
    """Return a group of the layers `members`, with its blocks in pool `pool`.

    The group keeps all tokens if any of its layers needs all tokens. Layers named in `full` always
    need all tokens.
    """
    kinds = {kind_of(one.layer.spec) for one in members}
    kind, kept = kind_of(members[0].layer.spec), [k for k in FULL_KINDS if k in kinds]
    if kept or any(one.layer.name in full for one in members):
        kind = kept[0] if kept else "full_attention"
    spec = members[0].layer.spec
    return Group.of(kind, spec, block=members[0].block, pool=pool)


def _homes(first: dict[int, SeenLayer], pools: Sequence[int] | None) -> dict[int, int]:
    """Return the pool index of each group, by group index.

    `first` maps the index of each group to one layer of the group. `pools` is an argument of
    `foreign()`.
    """
    if pools is None:
        counts = list(dict.fromkeys(one.blocks for one in first.values()))
        return {group: counts.index(one.blocks) for group, one in first.items()}
    if isinstance(pools, str | Mapping) or max(first) >= len(pools):
        raise AtlasError(
            Code.BAD_PLAN,
            "`pools` must be a list with a pool index for each group",
            got=f"{pools!r:.100} for {max(first) + 1} groups",
            hint="Pass one pool index per group, or omit pools=",
        )
    return {group: natural(pools[group], "a pool index") for group in first}


def _pools(seen: list[SeenLayer], homes: dict[int, int]) -> tuple[Pool, ...]:
    """Return the pools of all stages; each pool ends where its last tensor ends.

    `homes` maps the index of each group to the index of its pool.
    """
    reach: dict[tuple[int, int], int] = defaultdict(int)
    counts: dict[tuple[int, int], int] = {}
    for one in seen:
        home = (one.stage, homes[one.group])
        reach[home] = max(reach[home], one.stop)
        if counts.setdefault(home, one.blocks) != one.blocks:
            got = f"{one.blocks} blocks, while other layers of its pool have {counts[home]}"
            raise wrong_tensor(one.layer.name, got)
    return tuple(
        Pool(stage=s, index=i, blocks=counts[s, i], block_bytes=ceil_div(n, counts[s, i]))
        for (s, i), n in sorted(reach.items())
    )


def regions_of(seen: list[SeenLayer]) -> list[Region]:
    """Return the regions of the tensors; layers at evenly spaced offsets share a region."""
    families: dict[object, list[SeenLayer]] = defaultdict(list)
    for one in seen:
        families[one.alike].append(one)
    regions: list[Region] = []
    for family in families.values():
        family.sort(key=lambda one: one.offsets)
        steps = {
            tuple(b - a for a, b in zip(before.offsets, after.offsets, strict=True))
            for before, after in pairwise(family)
        }
        whole = family[0].region(family, steps.pop()) if len(steps) == 1 else None
        if whole is not None:
            regions.append(whole)
            continue
        for one in family:
            region = one.region([one], (0,) * len(one.offsets))
            if region is None:
                raise wrong_tensor(one.layer.name, f"{one}, whose strides fit no layout")
            regions.append(region)
    return regions


def _packed(layer: Layer, packing: Packing | None) -> Layer:
    if packing is None or not isinstance(layer.spec, Attention):
        return layer
    return msgspec.structs.replace(layer, spec=msgspec.structs.replace(layer.spec, packing=packing))


def _block(blocks: Mapping[str, int] | int | None, name: str) -> int | None:
    block = blocks.get(name) if isinstance(blocks, Mapping) else blocks
    return None if block is None else positive(block, "the block size")
