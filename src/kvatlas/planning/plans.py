"""`Plan`: groups, pools and regions of every rank, as data that travels.

A plan holds no tensor and no device. It prints, compares, hashes, goes to JSON and
back, and is checked whenever it is made or read.

- A **group** is the layers that share one block table.
- A **pool** is one allocation of a pipeline stage; the groups in it overlay each
  other, since a block id belongs to one of them at a time.
- A **region** is where alike layers of a group lie in a pool: an order, an offset,
  and the strides of pages and blocks. Every tensor-parallel rank of a stage has the
  same regions; they differ in which heads and rows those hold.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import (
    INT64_MAX,
    Layout,
    Page,
    Placement,
    keeps_to_its_blocks,
    positive,
    validate,
)
from kvatlas.planning.plan_parts import Group, Pool, Region
from kvatlas.planning.sized_layers import kind_of, page_of
from kvatlas.specs import Spec

_LIMIT = 1 << 16
"""Regions, groups, pools, ranks or stages that a plan from outside may claim to have."""

_FAR = 1 << 62

_TOGETHER = {
    ("sliding_window", "full_attention"),
    ("chunked_local_attention", "full_attention"),
    ("sliding_window_mla", "mla_attention"),
    ("mla_attention", "full_attention"),
    ("full_attention", "mla_attention"),
    ("sink_full_attention", "full_attention"),
    ("full_attention", "sink_full_attention"),
    ("sliding_window_mla", "sliding_window"),
}
"""(layer, group): kinds that may share a group of another kind, kept at full length or mixed."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Where everything that a model caches lies, on every rank.

    >>> from kvatlas.planning import plan
    >>> print(plan("gpt-oss-20b", memory="40GiB"))  # doctest: +NORMALIZE_WHITESPACE
    gpt-oss-20b, tp 1, policy atlas, order LBNHC: blocks of 16 tokens, 2 group(s),
    109,226 x 393,216 bytes
    """

    model: str
    policy: str
    layout: str
    tp: int
    pp: int
    dcp: int
    memory: int
    block_size: int
    max_len: int
    in_flight: int
    groups: tuple[Group, ...]
    pools: tuple[Pool, ...]
    regions: tuple[Region, ...]
    backends: tuple[str, ...] = ()
    accepted_layouts: tuple[str, ...] = ()
    pack: int = 1
    prefix_caching: bool = True
    reasons: tuple[str, ...] = ()
    """Why the block is as large as it is, and what was traded for it."""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.validate()

    def __str__(self) -> str:
        pools = " + ".join(f"{p.blocks:,} x {p.block_bytes:,} bytes" for p in self.pools)
        ranks = f"tp {self.tp}" + (f", pp {self.pp}" if self.pp > 1 else "")
        return (
            f"{self.model}, {ranks}, policy {self.policy}, order {self.layout}: blocks of "
            f"{self.block_size} tokens, {len(self.groups)} group(s), {pools}"
        )

    def __repr__(self) -> str:
        return f"<Plan {self}>"

    # -- travel ---------------------------------------------------------------------

    def to_json(self) -> bytes:
        """The plan as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> Plan:
        """A plan from JSON, checked as if it were made here."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError, TypeError) as problem:
            raise AtlasError(
                Code.BAD_PLAN,
                "A plan that is read is as sound as one that is made",
                got=str(problem),
                hint="Make it again with the same version of kvatlas",
            ) from problem

    # -- checks ---------------------------------------------------------------------

    def validate(self) -> None:
        """Refuse a plan whose parts do not fit together, in bounds and apart."""
        self._check_numbers()
        for stage in range(self.pp):
            claimed = sum(pool.nbytes for pool in self.pools if pool.stage == stage)
            if claimed > self.memory:
                raise _bad(f"pools of {claimed} bytes in {self.memory} at stage {stage}")
        if len(self._pools) < len(self.pools):
            raise _bad("two pools with one index at one stage")
        names: set[tuple[str, int]] = set()
        pieces: dict[tuple[int, int], dict[str, Placement]] = {}
        homes: dict[tuple[int, int], list[tuple[Region, Placement]]] = {}
        for region in self.regions:
            if not 0 <= region.group < len(self.groups) or not region.layers:
                raise _bad(f"a region of group {region.group} out of {len(self.groups)}")
            group = self.groups[region.group]
            if (region.stage, group.pool) not in self._pools:
                raise _bad(f"group {region.group} in pool {group.pool} at stage {region.stage}")
            self._check_region(region, group, names)
            placed = region.placement(self.tp, self._pools[region.stage, group.pool].blocks)
            homes.setdefault((region.stage, group.pool), []).append((region, placed))
            part = region.parts[0] if region.parts else 0
            key = f"{region.layers[0].name}, part {part}"
            pieces.setdefault((region.stage, region.group), {})[key] = placed
        if {region.group for region in self.regions} != set(range(len(self.groups))):
            raise _bad("a group without layers")
        for (stage, index), parts in pieces.items():
            validate(parts, size=self._pools[stage, self.groups[index].pool].nbytes, holes=True)
        for place, regions in homes.items():
            _refuse_mixed_blocks(regions, self._pools[place].blocks)

    def _check_numbers(self) -> None:
        """Counts are counts, and few enough that nothing from outside costs much."""
        if not self.pools or not self.groups:
            raise _bad("no pools or no groups")
        if max(len(self.groups), len(self.pools), len(self.regions)) > _LIMIT:
            raise _bad("more parts than any model has")
        Layout(self.layout)
        counts = [self.tp, self.pp, self.dcp, self.max_len, self.block_size, self.memory, self.pack]
        counts += [n for pool in self.pools for n in (pool.blocks, pool.block_bytes)]
        counts += [n for group in self.groups for n in (group.block, group.held, group.window or 1)]
        naturals = [self.in_flight, *(group.source for group in self.groups)]
        if not 1 <= min(counts) <= max(counts) <= INT64_MAX or not 0 <= min(naturals) <= _FAR:
            raise _bad(f"a count outside 1..2**63 among {sorted({*counts})[:4]}")
        if max(self.tp, self.pp) > _LIMIT or self.tp % self.dcp or max(naturals) > _FAR:
            raise _bad(f"tp {self.tp}, pp {self.pp}, dcp {self.dcp}")
        if not all(0 <= pool.stage < self.pp for pool in self.pools):
            raise _bad(f"a pool at a stage that is none of {self.pp}")

    def _check_region(self, region: Region, group: Group, names: set[tuple[str, int]]) -> None:
        if region.kernel_block < 1 or region.block < 1 or region.block % region.kernel_block:
            raise _bad(f"a block of {region.block} in kernel blocks of {region.kernel_block}")
        if region.block != group.block:
            raise _bad(f"a region with blocks of {region.block} in a group with {group.block}")
        parts = region.parts or (0,) * len(region.layers)
        wrong = region.splits < 1 or not all(0 <= part < region.splits for part in parts)
        if wrong or len(parts) != len(region.layers) or region.splits * self.tp > _LIMIT:
            raise _bad(f"states split into {region.splits} with parts {parts[:8]}")
        page = region.page(self.tp)
        for index, layer in enumerate(region.layers):
            if (layer.name, parts[index]) in names:
                raise _bad(f"layer {layer.name} twice")
            names.add((layer.name, parts[index]))
            own = page_of(layer.spec, region.kernel_block, self.tp * region.splits)
            if (own.heads, own.states, own.content) != (page.heads, page.states, page.content):
                raise _bad(f"layer {layer.name} in a region of unlike pages")
            kind = kind_of(layer.spec)
            if kind != group.kind and (kind, group.kind) not in _TOGETHER:
                raise _bad(f"layer {layer.name} of kind {kind} in a group of {group.kind}")

    # -- geometry -------------------------------------------------------------------

    @cached_property
    def _homes(self) -> dict[str, list[tuple[Region, int]]]:
        homes: dict[str, list[tuple[Region, int]]] = {}
        for region in self.regions:
            for index, layer in enumerate(region.layers):
                homes.setdefault(layer.name, []).append((region, index))
        for found in homes.values():
            found.sort(key=lambda home: home[0].parts[home[1]] if home[0].parts else 0)
        return homes

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers that keep a cache."""
        return tuple(self._homes)

    def region_of(self, layer: str, part: int = 0) -> tuple[Region, int]:
        """The region of a layer, or of one part of it, and its index along L there."""
        if part and not 0 < part < len(self._homes.get(layer, ())):
            raise AtlasError(
                Code.OUT_OF_RANGE,
                "A part is one that the layer's state is split into",
                got=f"part {part} of {layer}",
                hint="Plan.parts says how many there are",
            )
        if layer not in self._homes:
            raise AtlasError(
                Code.UNKNOWN_LAYER,
                "A layer is one of the plan's own",
                got=repr(layer),
                hint=f"This plan has {len(self._homes)} layers: {', '.join(self.layers[:2])}, ...",
            )
        return self._homes[layer][part]

    def parts(self, layer: str) -> int:
        """How many parts a layer's state is split into: 1 unless the plan says otherwise."""
        self.region_of(layer)
        return len(self._homes[layer])

    def page(self, layer: str, rank: int = 0, part: int = 0) -> Page:
        """A layer's page, for one kernel block, on one tensor-parallel rank."""
        region, index = self.region_of(layer, part)
        return region.page(self.tp, rank, index)

    def placement(self, layer: str, part: int = 0) -> Placement:
        """Where a layer's cells lie in its pool: axes B, H, N, C, and k for kernel blocks."""
        region, index = self.region_of(layer, part)
        return region.placement(self.tp, self.pool_of(layer).blocks).select("L", index)

    def view(self, layer: str, field: str, part: int = 0) -> Placement:
        """Where one field of a layer lies in its pool."""
        return self.page(layer, part=part).view(self.placement(layer, part), field)

    def spec(self, layer: str) -> Spec:
        """What a layer caches.

        >>> from kvatlas.planning import plan
        >>> plan("gpt-oss-20b", memory="40GiB").spec("model.layers.0.attn.attn").visibility.window
        128
        """
        region, index = self.region_of(layer)
        return region.layers[index].spec

    def pool_of(self, layer: str) -> Pool:
        """The pool that a layer lies in."""
        region, _ = self.region_of(layer)
        return self._pools[region.stage, self.groups[region.group].pool]

    # -- ranks ----------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """How many ranks there are: those of tensor parallelism on every pipeline stage."""
        return self.tp * self.pp

    def split_rank(self, rank: int) -> tuple[int, int]:
        """(pipeline stage, tensor-parallel rank) of a rank; stages count slowest.

        >>> from kvatlas.planning import plan
        >>> plan("gpt-oss-20b", memory="40GiB", tp=2, pp=2).split_rank(3)
        (1, 1)
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.ranks:
            raise AtlasError(
                Code.BAD_RANK,
                got=f"rank {rank!r} of tp {self.tp} x pp {self.pp}",
                hint=f"Ranks are 0..{self.ranks - 1}",
            )
        return divmod(rank, self.tp)

    def rank_pools(self, rank: int) -> dict[int, Pool]:
        """The pools of a rank by their index: those of its pipeline stage."""
        stage, _ = self.split_rank(rank)
        return {pool.index: pool for pool in self.pools if pool.stage == stage}

    def pool(self, rank: int, group: int) -> Pool:
        """The pool that a group draws blocks from on a rank.

        >>> from kvatlas.planning import plan
        >>> plan("gpt-oss-20b", memory="40GiB").pool(rank=0, group=1).blocks
        109226
        """
        stage, _ = self.split_rank(rank)
        pool = self._pools.get((stage, self.groups[group].pool))
        if pool is None:
            raise AtlasError(
                Code.OUT_OF_RANGE,
                f"Rank {rank} has no pool for group {group}",
                got=f"pools {sorted(self.rank_pools(rank))} on stage {stage}",
                hint="None of the group's layers lie on that stage",
            )
        return pool

    @cached_property
    def _pools(self) -> dict[tuple[int, int], Pool]:
        return {(pool.stage, pool.index): pool for pool in self.pools}

    @cached_property
    def groups_to_clear(self) -> tuple[int, ...]:
        """Groups whose blocks are zeroed when they take them.

        Recurrent states are read before they are written. And where groups of one pool keep
        unlike numbers, the bytes that one leaves can be NaN to the other, whose kernels read
        whole blocks: what a mask multiplies by zero is then NaN all the same.

        >>> from kvatlas.planning import plan
        >>> plan("gpt-oss-20b", memory="40GiB").groups_to_clear
        ()
        """
        kept: dict[int, set[str]] = {index: set() for index in range(len(self.groups))}
        for region in self.regions:
            fields = region.page(self.tp).fields
            kept[region.group] |= {field.dtype.name for field in fields}
        found = []
        for index, group in enumerate(self.groups):
            shared = [n for n, other in enumerate(self.groups) if other.pool == group.pool]
            numbers = set().union(*(kept[n] for n in shared))
            if group.kind == "recurrent" or (len(shared) > 1 and len(numbers) > 1):
                found.append(index)
        return tuple(found)

    # -- capacity -------------------------------------------------------------------

    @property
    def _first_pool(self) -> Pool:
        return min(self.pools, key=lambda pool: (pool.index, pool.stage))

    @property
    def num_blocks(self) -> int:
        """Blocks of the first pool, one of which engines keep as the null block."""
        return self._first_pool.blocks

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of the first pool, on the first stage that has it."""
        return self._first_pool.block_bytes

    def blocks_per_request(self, length: int | None = None) -> dict[int, int]:
        """Blocks that a request of `length` tokens takes of each pool, by the pool's index."""
        tokens = self.max_len if length is None else positive(length, "the length")
        taken: dict[int, int] = {}
        for group in self.groups:
            blocks = group.blocks(tokens, in_flight=self.in_flight, dcp=self.dcp)
            taken[group.pool] = taken.get(group.pool, 0) + blocks
        return taken

    def requests(self, length: int | None = None) -> float:
        """How many requests of `length` tokens fit at once."""
        taken = self.blocks_per_request(length)
        return min(
            (pool.blocks / taken[pool.index] for pool in self.pools if taken.get(pool.index)),
            default=float("inf"),
        )

    @property
    def tokens(self) -> int:
        """Tokens that fit in requests of the greatest length."""
        if not self.groups:
            return 0
        return int(self.requests() * self.max_len)

    def summary(self) -> dict[str, Any]:
        """What an operator asks first, as one JSON object."""
        from kvatlas.planning.report import summary

        return summary(self)

    def explain(self) -> str:
        """The reason for the block size and for each byte of waste, in sentences."""
        from kvatlas.planning.report import explain

        return explain(self)


def _bad(got: str) -> AtlasError:
    return AtlasError(
        Code.BAD_PLAN,
        "The parts of a plan fit together",
        got=got,
        hint="Plans are made by kvatlas.planning.plans, not by hand",
    )


def _refuse_mixed_blocks(regions: list[tuple[Region, Placement]], blocks: int) -> None:
    """Refuse groups that overlay each other in a pool other than block by block.

    A block id belongs to one group at a time, so a block of one group must not touch
    another block of another.
    """
    if len({region.group for region, _ in regions}) < 2:
        return
    cell = regions[0][0].block_stride
    for region, placed in regions:
        whole = placed.fold("B", "k", into="B") if "k" in placed.axes else placed
        split = region.block // region.kernel_block
        kept = keeps_to_its_blocks(whole, cell // split, blocks * split)
        if region.block_stride != cell or not kept:
            raise _bad(f"{region.layers[0].name} in blocks that other groups also use")
