"""`Cache`: a plan come to life, in one buffer for each pool.

`allocate` makes the buffers and `bind` takes somebody else's; both then only make
views. `cache[layer]` has the standard [B, H, N, C] bytes and a typed tensor for each
field, all of them windows into the same allocation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import torch

from kvatlas.cache.tensors import check_pool, torch_dtype, view
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Field, Page, Placement
from kvatlas.planning import Plan, Pool
from kvatlas.specs import Spec

ALIGNMENT = 2 << 20
"""Bytes that a pool starts at a multiple of: what large pages and transports like."""

_S = TypeVar("_S", bound=Spec)


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps, on one rank: views into its pool.

    Where a plan cuts a state by heads, this is one part of it.
    """

    name: str
    spec: Spec
    """What the whole layer caches; a rank's `page` holds a shard of it."""
    page: Page
    placement: Placement
    """Where its cells lie: axes B, H, N, C, and k where blocks hold several kernel blocks."""
    buffer: torch.Tensor
    """Its pool's bytes."""

    def spec_as(self, kind: type[_S]) -> _S:
        """The layer's spec, refused where it is not of a kind that a kernel serves."""
        if not isinstance(self.spec, kind):
            raise AtlasError(
                Code.BAD_SPEC,
                f"This kernel is for layers of {kind.__name__}",
                got=f"{type(self.spec).__name__} in {self.name}",
                hint="Call the kernel of the layer's own kind",
            )
        return self.spec

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The standard [B, H, N, C] tensor of bytes; kernel blocks count as blocks."""
        return view(self.buffer, self.kernel_blocks, torch.uint8)

    @cached_property
    def kernel_blocks(self) -> Placement:
        """Its cells with one axis B over kernel blocks, as kernels number them."""
        placed = self.placement
        if "k" in placed.axes:
            placed = placed.fold("B", "k", into="B")
        return placed.reorder("B", "H", "N", "C")

    @cached_property
    def _places(self) -> dict[str, Placement]:
        return {}

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def place(self, name: str) -> Placement:
        """Where a field lies, by kernel blocks."""
        # Kernels ask for every layer of every step, so answers are remembered.
        if name not in self._places:
            self._places[name] = self.page.view(self.kernel_blocks, name)
        return self._places[name]

    def field(self, name: str) -> torch.Tensor:
        """A field as a typed tensor: blocks first, then the field's own axes."""
        if name not in self._tensors:
            field: Field = self.page.field(name)
            self._tensors[name] = view(self.buffer, self.place(name), torch_dtype(field.dtype))
        return self._tensors[name]

    @property
    def fields(self) -> dict[str, torch.Tensor]:
        """Every field by its name, padding left out."""
        return {f.name: self.field(f.name) for f in self.page.fields if not f.padding}

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_") or name not in {f.name for f in self.page.fields}:
            raise AttributeError(name)
        return self.field(name)


class Cache(Mapping[str, LayerCache]):
    """The caches of one rank, by layer.

    >>> from kvatlas.planning import plan
    >>> cache = allocate(plan("Qwen3-8B", memory="1GiB", max_len=512))
    >>> layer = cache["model.layers.3.self_attn.attn"]
    >>> layer.k.shape, layer.k.dtype
    (torch.Size([455, 8, 16, 128]), torch.bfloat16)
    >>> layer.v.untyped_storage().data_ptr() == cache.pools[0].untyped_storage().data_ptr()
    True
    """

    def __init__(self, plan: Plan, rank: int, pools: Mapping[int, torch.Tensor]) -> None:
        self.plan = plan
        self.stage, self.tp_rank = plan.split_rank(rank)
        self.rank = rank
        self.pools = dict(pools)
        self._layers = {
            layer: self.stage_layer(layer)
            for layer in plan.layers
            if plan.region_of(layer)[0].stage == self.stage
        }

    def __getitem__(self, layer: str) -> LayerCache:
        if layer not in self._layers:
            self.plan.region_of(layer)
            raise AtlasError(
                Code.UNKNOWN_LAYER,
                "A layer lies on this rank's pipeline stage",
                got=f"{layer} on stage {self.stage}",
                hint="Ask a rank of the stage that holds it",
            )
        return self._layers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def stage_layer(self, layer: str, part: int = 0) -> LayerCache:
        """A layer, or one part of a state that the plan cuts by heads."""
        region, index = self.plan.region_of(layer, part)
        return LayerCache(
            name=layer,
            spec=region.layers[index].spec,
            page=self.plan.page(layer, self.tp_rank, part),
            placement=self.plan.placement(layer, part),
            buffer=self.pools[self.plan.pool(self.rank, region.group).index],
        )

    def parts(self, layer: str) -> list[LayerCache]:
        """All parts of a layer's state: one, unless the plan cuts it by heads."""
        self[layer]
        return [self.stage_layer(layer, part) for part in range(self.plan.parts(layer))]

    def clear(self, group: int, ids: Sequence[int] | torch.Tensor) -> bool:
        """Make blocks ready for a group that takes them: zeroed where the plan needs it.

        Says whether it was needed. Only what the group itself can read is written.
        """
        regions = [
            region
            for region in self.plan.regions
            if (region.stage, region.group) == (self.stage, group)
        ]
        if not 0 <= group < len(self.plan.groups):
            raise AtlasError(
                Code.OUT_OF_RANGE,
                "A group is one of the plan's own",
                got=group,
                hint=f"This plan has {len(self.plan.groups)} groups",
            )
        index = self.plan.groups[group].pool
        chosen = torch.as_tensor(ids, dtype=torch.long)
        if regions:
            self._refuse_ids(chosen.tolist(), self._pool(index).blocks)
        if group not in self.plan.groups_to_clear:
            return False
        for region in regions:
            placed = region.placement(self.plan.tp, self._pool(index).blocks)
            cells = view(self.pools[index], placed, torch.uint8)
            cells.index_fill_(placed.axes.index("B"), chosen.to(cells.device), 0)
        return True

    def block(self, ids: Sequence[int] | torch.Tensor | int, pool: int = 0) -> torch.Tensor:
        """Whole blocks of a pool across all layers, as rows of bytes.

        One id, or ids that step evenly, are a view; a scattered choice cannot be.
        """
        home = self._pool(pool)
        if not self._rows(pool):
            raise AtlasError(
                Code.NOT_CONTIGUOUS,
                "A block is one row of bytes in block-outermost orders",
                got=f"order {self.plan.layout}",
                hint="Use an order that starts with B, or Placement.runs for the pieces",
            )
        rows = self.pools[pool].view(home.blocks, home.block_bytes)
        chosen = [ids] if isinstance(ids, int) else [int(i) for i in ids]
        steps = {b - a for a, b in pairwise(chosen)}
        if not chosen:
            raise AtlasError(
                Code.OUT_OF_RANGE,
                "A view holds at least one block",
                got=chosen,
                hint="Ask for some blocks of the pool",
            )
        self._refuse_ids(chosen, home.blocks)
        if len(steps) > 1 or min(steps, default=1) < 1:
            raise AtlasError(
                Code.NOT_CONTIGUOUS,
                "A view holds blocks that step evenly upwards",
                got=f"ids {chosen[:8]}",
                hint="Gather scattered blocks with a copy kernel",
            )
        return rows[chosen[0] : chosen[-1] + 1 : min(steps, default=1)]

    @staticmethod
    def _refuse_ids(ids: Sequence[int], blocks: int) -> None:
        if ids and (min(ids) < 0 or max(ids) >= blocks):
            raise AtlasError(
                Code.OUT_OF_RANGE,
                f"Block ids are 0..{blocks - 1}",
                got=list(ids[:8]),
                hint="Ids are those of the pool's own blocks",
            )

    def _pool(self, index: int) -> Pool:
        pools = self.plan.rank_pools(self.rank)
        if index not in pools:
            raise AtlasError(
                Code.OUT_OF_RANGE,
                "The rank has no such pool",
                got=index,
                hint=f"This rank has pools {sorted(pools)}",
            )
        return pools[index]

    def _rows(self, index: int) -> bool:
        """Every region of a pool keeps a block's bytes in one row of it."""
        pool = self._pool(index)
        regions = [
            region
            for region in self.plan.regions
            if region.stage == self.stage and self.plan.groups[region.group].pool == index
        ]
        return all(region.block_stride == pool.block_bytes for region in regions)


def allocate(plan: Plan, *, rank: int = 0, device: Any = "cpu") -> Cache:
    """Memory for one rank of a plan, one buffer for each pool.

    Buffers are zeroed where some group needs it: recurrent states are read before they
    are written, and groups that keep unlike numbers overlay each other.
    """
    zero = bool(plan.groups_to_clear)
    pools = plan.rank_pools(rank).items()
    return Cache(plan, rank, {index: _memory(p.nbytes, zero, device) for index, p in pools})


def bind(buffers: Mapping[int, Any] | Any, plan: Plan, *, rank: int = 0) -> Cache:
    """A cache in memory that somebody else owns: an engine's, a mapped file, shared memory.

    `buffers` are bytes for each pool by its index, or one for a plan with one pool; a
    torch tensor, or anything with a writable buffer.

    >>> from kvatlas.planning import plan
    >>> made = plan("Qwen3-8B", memory="1GiB", max_len=512)
    >>> memory = bytearray(made.pools[0].nbytes)
    >>> bind(memory, made)["model.layers.0.self_attn.attn"].k.fill_(1).sum().item() > 0
    True
    >>> memory[1]
    63
    """
    mine = plan.rank_pools(rank)
    given = buffers if isinstance(buffers, Mapping) else {0: buffers}
    if set(given) != set(mine):
        raise AtlasError(
            Code.BAD_TENSOR,
            "Every pool of the rank is given its memory",
            got=f"memory for pools {sorted(given)}, not {sorted(mine)}",
            hint="Pass a mapping from pool index to bytes",
        )
    pools = {}
    for index, memory in given.items():
        tensor = memory if isinstance(memory, torch.Tensor) else _from_buffer(memory)
        check_pool(tensor)
        if tensor.numel() < mine[index].nbytes:
            raise AtlasError(
                Code.OUT_OF_BOUNDS,
                "A pool's memory is as large as the plan says",
                got=f"{tensor.numel():,} of {mine[index].nbytes:,} bytes for pool {index}",
                hint="Allocate more, or plan for less",
            )
        pools[index] = tensor[: mine[index].nbytes]
    return Cache(plan, rank, pools)


def _memory(nbytes: int, zero: bool, device: Any) -> torch.Tensor:
    """Aligned bytes; the allocator need not align, so a little more is asked for."""
    make = torch.zeros if zero else torch.empty
    raw = make(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % ALIGNMENT
    return raw[skip : skip + nbytes]


def _from_buffer(memory: Any) -> torch.Tensor:
    try:
        return torch.frombuffer(memory, dtype=torch.uint8)
    except (TypeError, ValueError, BufferError) as problem:
        raise AtlasError(
            Code.BAD_TENSOR,
            "Memory is a torch tensor or a writable buffer",
            got=type(memory).__name__,
            hint="Pass a bytearray, a memoryview, an mmap or a tensor of uint8",
        ) from problem
