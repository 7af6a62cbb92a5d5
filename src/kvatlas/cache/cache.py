"""`Cache`: the tensors of one rank of a plan, with one buffer for each pool.

`allocate` creates new buffers, and `bind` uses existing ones. Both return views of these buffers:
`cache[layer]` has a [B, H, N, C] tensor of bytes and a typed tensor for each field.
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
from kvatlas.geometry import Page, Placement
from kvatlas.geometry.byte_sizes import size
from kvatlas.planning import Plan, Pool
from kvatlas.planning.plans import checked_plan
from kvatlas.specs import Spec

ALIGNMENT = 2 << 20
"""Alignment of pools in bytes, which suits huge pages and transports."""

_S = TypeVar("_S", bound=Spec)


@dataclass(frozen=True, eq=False)
class LayerCache:
    """The cache of one layer on one rank: views into the pool that stores the layer.

    If a plan splits a recurrent state by heads, each `LayerCache` holds one part of the state.
    Layer caches are compared by identity.
    """

    name: str
    spec: Spec
    """The spec of the whole layer; the `page` of a rank holds a shard of it."""
    page: Page
    placement: Placement
    """Placement of the cells: axes B, H, N, C, and k if blocks hold several kernel blocks."""
    buffer: torch.Tensor = field(repr=False)
    """The bytes of the pool."""

    def spec_as(self, kind: type[_S]) -> _S:
        """Return the layer's spec, which must be an instance of `kind`."""
        if not isinstance(self.spec, kind):
            problem = f"The spec of {self.name} must be of type {kind.__name__}"
            got, hint = type(self.spec).__name__, "Call a kernel that supports this spec"
            raise AtlasError(Code.BAD_SPEC, problem, got=got, hint=hint)
        return self.spec

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The bytes of the layer as a [B, H, N, C] tensor; B counts kernel blocks."""
        return view(self.buffer, self.kernel_blocks, torch.uint8)

    @cached_property
    def kernel_blocks(self) -> Placement:
        """The layer's placement with axes B, H, N and C, where B counts kernel blocks.

        Kernel blocks are the blocks that kernels address. A block of the block table consists of
        one or more of them.
        """
        placed = self.placement
        if "k" in placed.axes:
            placed = placed.fold("B", "k", into="B")
        return placed.reorder("B", "H", "N", "C")

    def kernel_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the ids of the kernel blocks that make up the blocks `ids`.

        If a block has several kernel blocks, the last axis of the result is longer than the last
        axis of `ids`.

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
        """Number of states per block table entry, counting all kernel blocks of the entry."""
        return self.kernel_blocks.size("N") * self._split

    @property
    def _split(self) -> int:
        """Number of kernel blocks per block table entry."""
        return self.placement.size("k") if "k" in self.placement.axes else 1

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """Values that kernels compute once for this layer and reuse, such as launch parameters.

        They are freed together with the layer.
        """
        return {}

    @cached_property
    def _places(self) -> dict[str, Placement]:
        return {}

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def place(self, name: str) -> Placement:
        """Return the placement of a field; its axis B counts kernel blocks."""
        # Kernels call this for every layer of every step, so placements are cached.
        if name not in self._places:
            self._places[name] = self.page.view(self.kernel_blocks, name)
        return self._places[name]

    def field(self, name: str) -> torch.Tensor:
        """Return a field as a typed tensor. Its first axis counts kernel blocks."""
        if name not in self._tensors:
            dtype = torch_dtype(self.page.field(name).dtype)
            self._tensors[name] = view(self.buffer, self.place(name), dtype)
        return self._tensors[name]

    @property
    def fields(self) -> dict[str, torch.Tensor]:
        """All fields except padding, by name."""
        return {f.name: self.field(f.name) for f in self.page.fields if not f.padding}

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_") or name not in {f.name for f in self.page.fields}:
            raise AttributeError(name)
        return self.field(name)


class Cache(Mapping[str, LayerCache]):
    """The caches of one rank: `cache[layer]` is the cache of a layer.

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
        """Return the caches of all parts of a layer.

        A layer has one part, unless the plan splits its state by heads.
        """
        if layer not in self._parts:
            region, _ = self.plan.region_of(layer)
            problem = f"Rank {self.rank} does not hold this layer"
            got = f"{layer} of pipeline stage {region.stage}, on a rank of stage {self.stage}"
            hint = "Use a rank of the stage that holds the layer"
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
        """Zero the blocks that a group is about to use, if the plan requires it.

        Only bytes that the group reads are zeroed. Returns whether the plan requires zeroing.
        """
        if not 0 <= group < len(self.plan.groups):
            hint = f"Pass a group index in 0..{len(self.plan.groups) - 1}"
            got = f"group {group}"
            raise AtlasError(Code.OUT_OF_RANGE, "There is no such group", got=got, hint=hint)
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
        """Return a view of whole blocks of a pool; each row holds one block, with all its layers.

        The ids must ascend in equal steps. Use `kernels.gather_blocks` for scattered blocks.
        """
        pools = self.plan.rank_pools(self.rank)
        if pool not in pools:
            hint = f"Pass one of the pool indices {sorted(pools)}"
            problem = f"Rank {self.rank} has no such pool"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=f"pool {pool}", hint=hint)
        planned = pools[pool]
        strides = {
            region.block_stride
            for region in self.plan.regions
            if region.stage == self.stage and self.plan.groups[region.group].pool == pool
        }
        if strides != {planned.block_bytes}:
            problem = "The bytes of a block are not contiguous in this layout"
            hint = "Use a layout that starts with B, or get the byte ranges from Placement.runs"
            got = f"layout {self.plan.layout}"
            raise AtlasError(Code.NOT_CONTIGUOUS, problem, got=got, hint=hint)
        rows = self.pools[pool].view(planned.blocks, planned.block_bytes)
        chosen = _block_ids([ids] if isinstance(ids, int) else ids, planned).tolist()
        if not chosen:
            problem, hint = "At least one block id is required", "Pass one or more block ids"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got="no ids", hint=hint)
        steps = {b - a for a, b in pairwise(chosen)} or {1}
        if len(steps) > 1 or min(steps) < 1:
            problem = "The block ids of a view must ascend in equal steps"
            hint = "Gather scattered blocks with kernels.gather_blocks"
            raise AtlasError(Code.NOT_CONTIGUOUS, problem, got=f"ids {chosen[:8]}", hint=hint)
        return rows[chosen[0] : chosen[-1] + 1 : steps.pop()]


def allocate(plan: Plan, *, rank: int = 0, device: Any = "cpu") -> Cache:
    """Allocate one buffer for each pool of a rank, and return a cache of views into the buffers.

    Buffers are zeroed if any group requires it: recurrent states are read before they are
    written, and groups with different dtypes may overlay each other.
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
    """Return a cache of views into existing memory: a tensor, a mapped file or shared memory.

    `buffers` maps each pool index to the pool's bytes: a torch tensor or any object with a writable
    buffer. For a plan with one pool, `buffers` may also be the bytes of that pool. The caller
    keeps ownership of the memory.

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
    problem = f"Memory must be given for exactly the pools of rank {rank}"
    got = type(given).__name__
    if isinstance(given, Mapping):
        got = f"memory for pools {', '.join(sorted(map(str, given))) or 'none'}"
    hint = f"Pass a mapping from pool index to the pool's memory, for pools {sorted(planned)}"
    return AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)


def _block_ids(ids: Any, pool: Pool) -> torch.Tensor:
    return checked_ids(ids, pool.blocks, "Block ids", "Pass ids of blocks in this pool")


def _memory(nbytes: int, zero: bool, device: Any) -> torch.Tensor:
    """Allocate `nbytes` bytes whose address is a multiple of `ALIGNMENT`; zero them if `zero`."""
    make = torch.zeros if zero else torch.empty
    raw = make(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % ALIGNMENT
    return raw[skip : skip + nbytes]


def _bytes_of(memory: Any, pool: Pool) -> torch.Tensor:
    """Return the first `pool.nbytes` bytes of a buffer; raise an error if it is too small."""
    try:
        is_tensor = isinstance(memory, torch.Tensor)
        tensor = memory if is_tensor else torch.frombuffer(memory, dtype=torch.uint8)
    except (TypeError, ValueError, BufferError) as refusal:
        problem = "Memory must be a torch tensor or a writable buffer"
        got = type(memory).__name__
        hint = "Pass a bytearray, memoryview, mmap or uint8 tensor"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint) from refusal
    check_pool(tensor)
    if tensor.numel() < pool.nbytes:
        problem = f"The memory is too small for pool {pool.index}"
        hint = "Allocate more memory, or plan with less memory="
        got = f"{tensor.numel():,} bytes; {pool.nbytes:,} are needed"
        raise AtlasError(Code.OUT_OF_BOUNDS, problem, got=got, hint=hint)
    return tensor[: pool.nbytes]


def _largest_element(plan: Plan, pool: Pool) -> int:
    """Return the size in bytes of the largest element among all fields stored in a pool."""
    home = (pool.stage, pool.index)
    regions = [r for r in plan.regions if (r.stage, plan.groups[r.group].pool) == home]
    pages = [region.page(plan.tp, index=i) for region in regions for i in range(len(region.layers))]
    return max(field.dtype.item for page in dict.fromkeys(pages) for field in page.fields)


def _check_alignment(tensor: torch.Tensor, item: int, pool: Pool) -> None:
    """Raise an error if the memory is not aligned to `item` bytes, as torch views require."""
    if tensor.data_ptr() % item or tensor.storage_offset() % item:
        problem = f"The memory of pool {pool.index} must start at a multiple of {item} bytes"
        got = f"address {tensor.data_ptr():#x}, {tensor.storage_offset()} bytes into its storage"
        hint = "Pass memory from the start of an allocation"
        raise AtlasError(Code.MISALIGNED, problem, got=got, hint=hint)
