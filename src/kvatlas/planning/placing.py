"""Build a plan from groups: divide memory into pools and place each group in its pool.

This is the last step of every policy. Groups that overlay each other share a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import lcm
from typing import NamedTuple

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import (
    Layout,
    PageSet,
    PoolPosition,
    pack_positions,
    shared_pages,
    side_by_side,
)
from kvatlas.geometry.byte_sizes import size
from kvatlas.geometry.integers import ceil_div, round_up
from kvatlas.planning.applied_rules import chip_warnings, rule_reasons
from kvatlas.planning.backends import Backend
from kvatlas.planning.block_size import BlockSize
from kvatlas.planning.grouping import GroupDraft
from kvatlas.planning.plan_parts import Group, Pool, Region
from kvatlas.planning.plans import Plan
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.sized_layers import LOCAL_KINDS, SizedLayer, page_of

_FORGOTTEN_UNIT = 1_000
"""If the memory is less than this many bytes, the error asks whether a unit is missing."""


class PoolDraft(msgspec.Struct, frozen=True, dict=True):
    """Groups that overlay each other in one pool."""

    groups: tuple[GroupDraft, ...]
    layout: Layout
    pack: int = 1
    """Number of attention layers in a page."""
    page: int = 0
    """Size in bytes of the pages that attention and states share; 0 if they share none."""
    states: bool = False
    """Whether this is a separate pool of recurrent states, sized by the number of requests."""
    interleaved: bool = True
    """Whether the kernel blocks of different layers may alternate in a block. They then have one
    stride in the whole pool."""
    rounds_sum: bool = False
    """Whether the sum of a block's pages is rounded up, instead of each page, in every layout."""

    def on(self, stages: dict[str, int], stage: int) -> PoolDraft:
        """Return this draft with only the layers of pipeline stage `stage`.

        `stages` maps the name of each layer to its stage.
        """
        groups = tuple(
            GroupDraft(tuple(x for x in group.layers if stages[x.name] == stage), group.mixed)
            for group in self.groups
        )
        return msgspec.structs.replace(self, groups=groups)

    @cached_property
    def width(self) -> int:
        """Bytes per block of the pool, as its largest group requires; 0 if there are no layers."""
        filled = [group.layers for group in self.groups if group.layers]
        if not filled:
            return 0
        if self.page:
            return self.page * max(
                len(x) if x[0].kind == "recurrent" else ceil_div(len(x), self.pack) for x in filled
            )
        if not (self.layout.block_outermost or self.rounds_sum):
            return max(sum(layer.spread for layer in layers) for layers in filled)
        widest = max(sum(layer.nbytes for layer in layers) for layers in filled)
        return round_up(widest, lcm(*(layer.alignment for layers in filled for layer in layers)))

    def needed(self, request: PlanRequest) -> int:
        """Return how many blocks of this pool a request of `max_len` tokens holds."""
        needed = 0
        for group in self.groups:
            first = group.layers[0]
            unlike = [x for x in group.layers if x.spec is not first.spec]
            needed += max(blocks_held(x, request) for x in (first, *unlike))
        return needed


class PlanDraft(msgspec.Struct, frozen=True, dict=True):
    """The pools and block size from which a plan is built."""

    pools: tuple[PoolDraft, ...]
    size: BlockSize
    orders: tuple[str, ...]
    """Layouts that work for the backends and pages."""

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of all pools, in order."""
        return tuple(
            _group(group, index) for index, pool in enumerate(self.pools) for group in pool.groups
        )

    def stages(self, request: PlanRequest) -> list[tuple[PoolDraft, ...]]:
        """Return the pools of each pipeline stage, with only the layers of that stage."""
        if request.pp == 1:
            return [self.pools]
        return [
            tuple(pool.on(request.stages, stage) for pool in self.pools)
            for stage in range(request.pp)
        ]


class Spot(NamedTuple):
    """Layers of a group with the same kind of page, and the position of their pages in the pool."""

    layers: Sequence[SizedLayer]
    position: PoolPosition
    kernel_block: int
    page_bytes: int


def blocks_held(layer: SizedLayer, request: PlanRequest, block: int | None = None) -> int:
    """Return the maximum number of blocks that a request of `max_len` tokens holds for a layer.

    `block` is the block size in tokens; it defaults to the block size of the layer.
    """
    if request.dcp > 1 and layer.kind in LOCAL_KINDS:
        raise AtlasError(
            Code.BAD_TOPOLOGY,
            "Decode context parallelism does not support windows or chunks",
            got=f"dcp {request.dcp} with {layer.kind} in {layer.name}",
            hint="Pass dcp=1 for this model",
        )
    held, size = 1 + layer.checkpoints, block or layer.block
    group = Group.of(layer.kind, layer.spec, block=size, pool=0, held=held)
    return group.blocks(request.max_len, in_flight=request.in_flight, dcp=request.dcp)


def make_plan(request: PlanRequest, draft: PlanDraft, *, policy: str) -> Plan:
    """Build the plan that a draft describes. `policy` is the name of the policy in the plan."""
    drafts, stages = draft.pools, draft.stages(request)
    counts = divide_memory(request, drafts, stages)
    warnings = list(request.model.warnings)
    longest = request.model.max_len
    if longest and request.max_len > longest:
        warnings.append(
            f"max_len is {request.max_len:,} tokens, but the model supports only {longest:,}."
        )
    if request.requests and policy == "atlas" and not any(pool.states for pool in drafts):
        warnings.append(
            "requests= has no effect: it sets the size of a separate pool of recurrent states, "
            "and this plan has none."
        )
    pools: list[Pool] = []
    regions: list[Region] = []
    for stage, parts in enumerate(stages):
        group = 0
        for index, part in enumerate(parts):
            if part.width:
                pool = Pool(stage=stage, index=index, blocks=counts[index], block_bytes=part.width)
                pools.append(pool)
            for members in part.groups:
                spots = place_group(part, members, counts[index], warnings)
                regions += [_region(stage, group, part.layout, spot) for spot in spots]
                group += 1
    return Plan(
        model=request.model.name,
        policy=policy,
        layout=drafts[0].layout.order,
        tp=request.tp,
        pp=request.pp,
        dcp=request.dcp,
        memory=request.memory,
        block_size=draft.size.tokens,
        max_len=request.max_len,
        in_flight=request.in_flight,
        groups=draft.groups,
        pools=tuple(pools),
        regions=tuple(regions),
        backends=tuple(dict.fromkeys(b.name for b in request.backends.values() if b)),
        accepted_layouts=draft.orders,
        pack=max(pool.pack for pool in drafts),
        prefix_caching=request.prefix_caching,
        reasons=(*draft.size.reasons, *rule_reasons(request)),
        warnings=tuple(dict.fromkeys([*warnings, *chip_warnings(request)])),
    )


def divide_memory(
    request: PlanRequest, drafts: Sequence[PoolDraft], stages: Sequence[Sequence[PoolDraft]]
) -> list[int]:
    """Return the number of blocks of each pool.

    Every pool gets one null block, which engines never allocate. A separate pool of states gets
    blocks for `request.requests` requests, if this number is given. The rest of the memory is
    divided among the other pools in proportion to the bytes that a request of `max_len` tokens
    needs in each pool. `stages` contains the pools of each pipeline stage, as returned by
    `PlanDraft.stages`.
    """
    needs = [draft.needed(request) for draft in drafts]
    named = [request.requests if draft.states else None for draft in drafts]
    least = _least_blocks(needs, named)
    grows = [0 if many else need for need, many in zip(needs, named, strict=True)]
    counts: dict[int, int] = {}
    for parts in stages:
        widths = [part.width for part in parts]
        taken = sum(blocks * width for blocks, width in zip(least, widths, strict=True))
        if taken > request.memory:
            longest = _longest_request(request, drafts, stages)
            raise not_enough(request, taken, longest, states=any(named))
        total = sum(need * width for need, width in zip(grows, widths, strict=True))
        for i, width in enumerate(widths):
            if width:
                share = (request.memory - taken) * grows[i] * width
                blocks = least[i] + (share // total // width if share else 0)
                counts[i] = min(counts.get(i, blocks), blocks)
    return [counts.get(i, 1) for i in range(len(drafts))]


def _least_blocks(needs: Sequence[int], named: Sequence[int | None]) -> list[int]:
    """Return the minimum number of blocks of each pool, including its null block.

    `needs` and `named` have one element per pool: the number of blocks that a request needs, and
    the number of requests that must fit, or None for one request.
    """
    return [need * (many or 1) + 1 for need, many in zip(needs, named, strict=True)]


def least_memory(request: PlanRequest, draft: PlanDraft) -> int:
    """Return the fewest bytes per rank at which a request of `max_len` tokens fits in a draft."""
    return _least_memory(request, draft.pools, draft.stages(request))


def longest_request(request: PlanRequest, draft: PlanDraft) -> int:
    """Return the tokens of the longest request that fits in a draft's plan; 0 if none fits."""
    return _longest_request(request, draft.pools, draft.stages(request))


def _least_memory(
    request: PlanRequest, pools: Sequence[PoolDraft], stages: Sequence[Sequence[PoolDraft]]
) -> int:
    needs = [pool.needed(request) for pool in pools]
    least = _least_blocks(needs, [request.requests if pool.states else None for pool in pools])
    return max(
        sum(blocks * part.width for blocks, part in zip(least, parts, strict=True))
        for parts in stages
    )


def _longest_request(
    request: PlanRequest, pools: Sequence[PoolDraft], stages: Sequence[Sequence[PoolDraft]]
) -> int:
    fits, too_long = 0, request.max_len
    while too_long - fits > 1:
        length = (fits + too_long) // 2
        shorter = msgspec.structs.replace(request, max_len=length)
        if _least_memory(shorter, pools, stages) <= request.memory:
            fits = length
        else:
            too_long = length
    return fits


def not_enough(
    request: PlanRequest, needed: int, longest: int, *, states: bool = False
) -> AtlasError:
    """Return the error for a plan that needs at least `needed` bytes of memory per rank.

    `longest` is the length in tokens of the longest request that fits; 0 if none does. If `states`
    is true, the message also mentions the separate pool of recurrent states.
    """
    what = f"one request of {request.max_len:,} tokens needs"
    if states:
        what = (
            f"one request of {request.max_len:,} tokens and the states of "
            f"{request.requests:,} requests need"
        )
    hint = f"Provide at least {needed:,} bytes per rank"
    if longest:
        hint += f", or reduce max_len to {longest:,} tokens, the longest request that fits"
    if request.memory < _FORGOTTEN_UNIT:
        hint = f"Did you mean {request.memory}GB?"
    return AtlasError(
        Code.NOT_ENOUGH_MEMORY,
        f"Not enough memory: {what} {size(needed)} per rank",
        got=size(request.memory),
        hint=hint,
    )


def place_group(
    pool: PoolDraft, group: GroupDraft, blocks: int, warnings: list[str]
) -> Iterator[Spot]:
    """Yield one `Spot` for each kind of page of a group.

    `pool` contains only the layers of one pipeline stage. `blocks` is the number of blocks of the
    pool. Problems are appended to `warnings`.
    """
    layout, width, sets = pool.layout, pool.width, group.regions
    if pool.page and group.layers:
        yield from _place_packed(pool, group.layers, blocks, warnings)
        return
    splits = {_kernel_blocks(layer) for layer in group.layers}
    split = splits.pop() if len(splits) == 1 else 1
    if split > 1 and pool.interleaved and layout.block_outermost and width % split == 0:
        pages = [page_of(x[0].spec, x[0].block // split, x[0].tp) for x in sets]
        rows = [PageSet(p, len(x), p.nbytes) for p, x in zip(pages, sets, strict=True)]
        positions = side_by_side(rows, layout, blocks=blocks, width=width, split=split)
        for layers, position in zip(sets, positions, strict=True):
            yield Spot(layers, position, layers[0].block // split, layers[0].nbytes)
        return
    rows = [PageSet(layers[0].page, len(layers), layers[0].spread) for layers in sets]
    positions = side_by_side(rows, layout, blocks=blocks, width=width)
    for layers, position in zip(sets, positions, strict=True):
        dense = layout.outside("B", "N") and (
            not layout.block_outermost or position.block_stride <= position.page_stride
        )
        kernel = _kernel_block(layers[0], warnings, dense=dense)
        yield Spot(layers, position, kernel, layers[0].nbytes)


def _place_packed(
    pool: PoolDraft, layers: Sequence[SizedLayer], blocks: int, warnings: list[str]
) -> Iterator[Spot]:
    """Yield a `Spot` for each region of `layers`, in a pool where attention and states share pages.

    A page holds either `pool.pack` attention layers or one recurrent state.
    """
    layout, width, first = pool.layout, pool.width, layers[0]
    shared = shared_pages(layout, pool.page, blocks=blocks, width=width)
    if first.kind == "recurrent":
        yield Spot(layers, shared, first.block, pool.page)
        return
    kernel = _kernel_block(first, warnings, dense=False)
    packed = pack_positions(
        first.page, len(layers), pool.pack, layout, shared=shared, blocks=blocks, width=width
    )
    for count, position in packed:
        yield Spot(layers[:count], position, kernel, first.nbytes)
        layers = layers[count:]


def _kernel_blocks(layer: SizedLayer) -> int:
    """Return the number of kernel blocks in a block of a layer."""
    if layer.backend is None or layer.padded:
        return 1
    return layer.block // (layer.backend.kernel_block(layer.block) or layer.block)


def kernels_read(backends: Mapping[str, Backend | None], plan: Plan) -> bool:
    """Return whether every layer's backend supports the kernel block size of its region."""
    read = [(backends[x.name], r.kernel_block) for r in plan.regions for x in r.layers]
    return all(backend is None or backend.reads(block) for backend, block in read)


def _kernel_block(layer: SizedLayer, warnings: list[str], *, dense: bool) -> int:
    """Return the kernel block size of a layer in tokens; its block size if blocks are not split.

    Blocks can be split only if `dense` is true, that is, if the layer's kernel blocks follow each
    other without gaps. If the backend needs smaller blocks but they cannot be split, a warning is
    appended to `warnings`.
    """
    if layer.backend is None or layer.backend.reads(layer.block):
        return layer.block
    kernel = layer.backend.kernel_block(layer.block)
    if kernel is None or not dense or layer.padded:
        warnings.append(
            f"{layer.backend.name} reads blocks of {' or '.join(map(str, layer.backend.sizes))} "
            f"tokens, but this plan has blocks of {layer.block} tokens that cannot be split. "
            "Engines will refuse to bind the plan."
        )
        return layer.block
    return kernel


def _region(stage: int, group: int, layout: Layout, spot: Spot) -> Region:
    first = spot.layers[0]
    return Region(
        stage=stage,
        group=group,
        layers=tuple(layer.layer for layer in spot.layers),
        block=first.block,
        kernel_block=spot.kernel_block,
        page_bytes=spot.page_bytes,
        layout=layout.order,
        **spot.position._asdict(),
        splits=first.splits,
        parts=tuple(layer.part for layer in spot.layers) if first.splits > 1 else (),
    )


def _group(draft: GroupDraft, pool: int) -> Group:
    first = draft.layers[0]
    held = 1 + max(layer.checkpoints for layer in draft.layers)
    return Group.of(
        first.kind, first.spec, block=first.block, pool=pool, held=held, mixed=draft.mixed
    )
