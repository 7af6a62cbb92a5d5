"""`Cache`: a plan come to life, in one buffer for each pool.

`allocate` makes the buffers and `bind` takes somebody else's; both then only make
views. `cache[layer]` has the standard [B, H, N, C] bytes and a typed tensor for each
field, all of them windows into the same allocation.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import torch

from kvatlas.cache.tensors import check_pool, checked_ids, torch_dtype, view
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Page, Placement, size
from kvatlas.planning import Plan, Pool, checked_plan
from kvatlas.specs import Spec

ALIGNMENT = 2 << 20
"""Bytes that a pool starts at a multiple of: what large pages and transports like."""

_S = TypeVar("_S", bound=Spec)


@dataclass(frozen=True, eq=False)
class LayerCache:
    """What one layer keeps, on one rank: views into its pool.

    Where a plan splits a recurrent state by heads, this is one part of it. Two are equal
    only if they are the same one: memory has no value to compare.
    """

    name: str
    spec: Spec
    """What the whole layer caches; a rank's `page` holds a shard of it."""
    page: Page
    placement: Placement
    """Where its cells lie: axes B, H, N, C, and k where blocks hold several kernel blocks."""
    buffer: torch.Tensor = field(repr=False)
    """Its pool's bytes."""

    def spec_as(self, kind: type[_S]) -> _S:
        """The layer's spec, refused where it is of another kind than `kind`."""
        if not isinstance(self.spec, kind):
            problem = f"{self.name} is no layer of {kind.__name__}"
            got, hint = type(self.spec).__name__, "Call the kernel for the layer's own kind"
            raise AtlasError(Code.BAD_SPEC, problem, got=got, hint=hint)
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

    def kernel_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Block ids [..., n] as kernels number them: a block may be several kernel blocks.

        >>> from kvatlas.planning import plan
        >>> large = {"block_size": 128, "backend": "FLASHINFER"}  # kernel blocks of 64 tokens
        >>> made = plan("Qwen3-8B", memory="1GiB", max_len=512, **large)
        >>> allocate(made)["model.layers.0.self_attn.attn"].kernel_ids(torch.tensor([[5, 3]]))
        tensor([[10, 11,  6,  7]])
        """
        split = self._split
        if split == 1:
            return ids
        return (ids.unsqueeze(-1) * split + torch.arange(split, device=ids.device)).flatten(-2)

    @property
    def block_states(self) -> int:
        """States of a block as block tables have them: it may be several kernel blocks."""
        return self.kernel_blocks.size("N") * self._split

    @property
    def _split(self) -> int:
        """Kernel blocks of a block."""
        return self.placement.size("k") if "k" in self.placement.axes else 1

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """What kernels have worked out of this layer, by what else it depends on.

        It lives and dies with the layer, and so does what it refers to.
        """
        return {}

    @cached_property
    def _places(self) -> dict[str, Placement]:
        return {}

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def place(self, name: str) -> Placement:
        """Where a field lies, by kernel blocks."""
        # Kernels call this for every layer of every step, so placements are remembered.
        if name not in self._places:
            self._places[name] = self.page.view(self.kernel_blocks, name)
        return self._places[name]

    def field(self, name: str) -> torch.Tensor:
        """A field as a typed tensor: blocks first, then the field's own axes."""
        if name not in self._tensors:
            dtype = torch_dtype(self.page.field(name).dtype)
            self._tensors[name] = view(self.buffer, self.place(name), dtype)
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
    >>> cache
    <Cache Qwen3-8B, rank 0, cpu: 36 layers in 1 pool, 1 GiB>
    >>> layer = cache["model.layers.3.self_attn.attn"]
    >>> layer.k.shape, layer.k.dtype
    (torch.Size([455, 8, 16, 128]), torch.bfloat16)
    >>> layer.v.untyped_storage().data_ptr() == cache.pools[0].untyped_storage().data_ptr()
    True
    """

    def __init__(self, plan: Plan, rank: int, pools: Mapping[int, torch.Tensor]) -> None:
        self.plan = checked_plan(plan)
        self.stage, self.tp_rank = plan.split_rank(rank)
        self.rank = rank
        planned = set(plan.rank_pools(rank))
        if not isinstance(pools, Mapping) or set(pools) != planned:
            raise _not_the_pools(rank, pools, planned)
        for memory in pools.values():
            check_pool(memory)
        self.pools = dict(pools)
        self._parts = {
            layer: [self._part(layer, part) for part in range(plan.parts(layer))]
            for layer in plan.layers
            if plan.region_of(layer)[0].stage == self.stage
        }

    def __repr__(self) -> str:
        total = sum(pool.nbytes for pool in self.plan.rank_pools(self.rank).values())
        pools = f"{len(self.pools)} pool{'s' if len(self.pools) > 1 else ''}"
        devices = ", ".join(sorted({str(memory.device) for memory in self.pools.values()}))
        where = f"rank {self.rank}, {devices}"
        return f"<Cache {self.plan.model}, {where}: {len(self)} layers in {pools}, {size(total)}>"

    def __getitem__(self, layer: str) -> LayerCache:
        return self.parts(layer)[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def parts(self, layer: str) -> list[LayerCache]:
        """All parts of a layer's state: one, unless the plan splits it by heads."""
        if layer not in self._parts:
            region, _ = self.plan.region_of(layer)
            problem = f"The layer is on another pipeline stage than rank {self.rank}"
            got = f"{layer} on stage {region.stage}, not {self.stage}"
            hint = "Ask a rank of the stage that holds it"
            raise AtlasError(Code.UNKNOWN_LAYER, problem, got=got, hint=hint)
        return list(self._parts[layer])

    def _part(self, layer: str, part: int) -> LayerCache:
        region, index = self.plan.region_of(layer, part)
        return LayerCache(
            name=layer,
            spec=region.layers[index].spec,
            page=self.plan.page(layer, self.tp_rank, part),
            placement=self.plan.placement(layer, part),
            buffer=self.pools[self.plan.groups[region.group].pool],
        )

    def clear(self, group: int, ids: Sequence[int] | torch.Tensor) -> bool:
        """Make blocks ready for a group that takes them: zeroed where the plan needs it.

        Returns whether it was needed. Only bytes that the group itself reads are written.
        """
        if not 0 <= group < len(self.plan.groups):
            hint = f"Groups are 0..{len(self.plan.groups) - 1}"
            raise AtlasError(Code.OUT_OF_RANGE, "There is no such group", got=group, hint=hint)
        needed, here = group in self.plan.groups_to_clear, (self.stage, group)
        regions = [r for r in self.plan.regions if (r.stage, r.group) == here]
        if regions:
            pool = self.plan.pool(self.rank, group)
            buffer = self.pools[pool.index]
            chosen = _block_ids(ids, pool).to(buffer.device)
        for region in regions if needed else ():
            placed = region.placement(self.plan.tp, pool.blocks)
            cells = view(buffer, placed, torch.uint8)
            cells.index_fill_(placed.axes.index("B"), chosen, 0)
        return needed

    def block(self, ids: Sequence[int] | torch.Tensor | int, pool: int = 0) -> torch.Tensor:
        """Whole blocks of a pool across all layers, as rows of bytes.

        One id, or ids that step evenly, are a view; a scattered choice cannot be.
        """
        pools = self.plan.rank_pools(self.rank)
        if pool not in pools:
            hint = f"Rank {self.rank} has pools {sorted(pools)}"
            raise AtlasError(Code.OUT_OF_RANGE, "There is no such pool", got=pool, hint=hint)
        planned = pools[pool]
        strides = {
            region.block_stride
            for region in self.plan.regions
            if region.stage == self.stage and self.plan.groups[region.group].pool == pool
        }
        if strides != {planned.block_bytes}:
            problem = "The bytes of a block are not one row: blocks are not the outermost axis"
            hint = "Use a layout that starts with B, or Placement.runs for each stretch of bytes"
            raise AtlasError(Code.NOT_CONTIGUOUS, problem, got=self.plan.layout, hint=hint)
        rows = self.pools[pool].view(planned.blocks, planned.block_bytes)
        chosen = _block_ids([ids] if isinstance(ids, int) else ids, planned).tolist()
        if not chosen:
            raise AtlasError(Code.OUT_OF_RANGE, "No blocks", got=ids, hint="Pass one id or more")
        steps = {b - a for a, b in pairwise(chosen)} or {1}
        if len(steps) > 1 or min(steps) < 1:
            problem = "No view holds these blocks: their ids do not step evenly upwards"
            hint = "Gather scattered blocks with kernels.gather_blocks"
            raise AtlasError(Code.NOT_CONTIGUOUS, problem, got=f"ids {chosen[:8]}", hint=hint)
        return rows[chosen[0] : chosen[-1] + 1 : steps.pop()]


def allocate(plan: Plan, *, rank: int = 0, device: Any = "cpu") -> Cache:
    """Allocate memory for one rank of a plan, one buffer for each pool.

    Buffers are zeroed where some group needs it: recurrent states are read before they
    are written, and groups that keep unlike numbers overlay each other.
    """
    try:
        device = torch.get_default_device() if device is None else torch.device(device)
    except (TypeError, ValueError, RuntimeError) as problem:
        got, hint = f"{device!r}: {problem}", "Pass 'cpu', 'cuda' or 'cuda:0'"
        raise AtlasError(Code.WRONG_DEVICE, "There is no such device", got=got, hint=hint) from None
    zero = bool(checked_plan(plan).groups_to_clear)
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
    planned = checked_plan(plan).rank_pools(rank)
    buffers = buffers if isinstance(buffers, Mapping) else {0: buffers}
    if set(buffers) != set(planned):
        raise _not_the_pools(rank, buffers, planned)
    made = {}
    for index, pool in planned.items():
        made[index] = _bytes_of(buffers[index], pool)
        _check_alignment(made[index], _largest_element(plan, pool), pool)
    return Cache(plan, rank, made)


def _not_the_pools(rank: int, given: Any, planned: Collection[int]) -> AtlasError:
    problem = f"There must be memory for each pool of rank {rank}"
    named = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
    got = f"memory for pools {named}, not {sorted(planned)}"
    hint = "Pass a mapping from pool index to bytes"
    return AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)


def _block_ids(ids: Any, pool: Pool) -> torch.Tensor:
    return checked_ids(ids, pool.blocks, "Block ids", "Pass ids of the pool's own blocks")


def _memory(nbytes: int, zero: bool, device: Any) -> torch.Tensor:
    """Aligned bytes; the allocator need not align, so a little more is allocated."""
    make = torch.zeros if zero else torch.empty
    raw = make(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % ALIGNMENT
    return raw[skip : skip + nbytes]


def _bytes_of(memory: Any, pool: Pool) -> torch.Tensor:
    """A pool's bytes in memory that may be larger."""
    try:
        is_tensor = isinstance(memory, torch.Tensor)
        tensor = memory if is_tensor else torch.frombuffer(memory, dtype=torch.uint8)
    except (TypeError, ValueError, BufferError) as refusal:
        problem = "This is neither a torch tensor nor a writable buffer"
        got = type(memory).__name__
        hint = "Pass a bytearray, a memoryview, an mmap or a tensor of uint8"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint) from refusal
    check_pool(tensor)
    if tensor.numel() < pool.nbytes:
        problem = f"Memory is too small for pool {pool.index}"
        hint = "Allocate more, or plan for less"
        got = f"{tensor.numel():,} of {pool.nbytes:,} bytes"
        raise AtlasError(Code.OUT_OF_BOUNDS, problem, got=got, hint=hint)
    return tensor[: pool.nbytes]


def _largest_element(plan: Plan, pool: Pool) -> int:
    """Bytes of the largest element that a pool holds."""
    home = (pool.stage, pool.index)
    regions = [r for r in plan.regions if (r.stage, plan.groups[r.group].pool) == home]
    pages = [region.page(plan.tp, index=i) for region in regions for i in range(len(region.layers))]
    return max(field.dtype.item for page in dict.fromkeys(pages) for field in page.fields)


def _check_alignment(tensor: torch.Tensor, item: int, pool: Pool) -> None:
    """Refuse memory that starts between two elements, where torch makes no typed views."""
    if tensor.data_ptr() % item or tensor.storage_offset() % item:
        problem = f"Memory of pool {pool.index} does not start at a multiple of {item} bytes"
        got = f"address {tensor.data_ptr():#x}, {tensor.storage_offset()} bytes into its storage"
        hint = "Pass memory from the start of an allocation"
        raise AtlasError(Code.MISALIGNED, problem, got=got, hint=hint)
