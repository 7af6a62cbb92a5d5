"""Copy runs between byte buffers of one process, in steps.

Short runs of equal length are copied as numpy elements of that size, so one call copies thousands.
Such an element may start at any byte of a buffer. Long runs are copied one by one at the speed of
memcpy. The work is divided into steps of a few milliseconds, so that the caller can check the clock
or the peer between steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.copying.cuda_driver import load_driver
from kvatlas.copying.memory import HOST, Memory
from kvatlas.copying.run_bounds import Bytes, Places, check_runs
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.planning import Plan

STEP = 16 << 20
"""The approximate number of bytes that one step copies."""

_SHORT = 8 << 10
"""Runs of up to this many bytes are copied together. Longer runs are faster one by one."""
_SHORT_PACKED = 16 << 10
"""The same limit for runs that are contiguous in one of the buffers."""
_FEW = 4
"""Fewer short runs than this are copied one by one: an index array would cost more."""
_CACHED = 256 << 10
"""Bytes that are gathered before they are scattered, so that they stay in the CPU's cache."""
_UNLOCKED = 1 << 20
"""Runs of at least this many bytes are copied without the interpreter lock."""

Steps = Iterator[None]


def as_bytes(memory: Memory) -> Bytes:
    """Return a view of a host region as bytes. The caller keeps the region alive."""
    if memory.device != HOST:
        raise AtlasError(
            Code.WRONG_DEVICE,
            "Host code cannot access GPU memory",
            got=f"memory on {memory.device}",
            hint="Copy the memory to the host first, or use a transport that supports GPUs",
        )
    region: Any = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    return np.frombuffer(region, np.uint8)


def memory_of(pools: Any) -> dict[int, Memory]:
    """Return pools as regions that transports can register. Each region keeps its pool alive.

    `pools` is a `Cache`, or a dict from pool index to a contiguous numpy array, a contiguous tensor
    on any device, or a `Memory`, which is returned unchanged.

    >>> pool = np.zeros(64, np.uint8)
    >>> memory_of({0: pool})[0].nbytes, memory_of({0: pool})[0].device
    (64, 'host')
    """
    given = getattr(pools, "pools", pools)
    if not isinstance(given, Mapping):
        raise _cannot_register("the argument", f"a value of type {type(given).__name__}")
    return {index: _memory_of(index, pool) for index, pool in given.items()}


def _memory_of(index: int, pool: Any) -> Memory:
    if isinstance(pool, Memory):
        return pool
    if isinstance(pool, np.ndarray):
        if not pool.flags.c_contiguous:
            raise _cannot_register(f"pool {index}", f"an array with strides {pool.strides}")
        return Memory(pool.ctypes.data, pool.nbytes, owner=pool)
    if not callable(getattr(pool, "data_ptr", None)):
        raise _cannot_register(f"pool {index}", f"a value of type {type(pool).__name__}")
    if not pool.is_contiguous():
        raise _cannot_register(f"pool {index}", f"a tensor with strides {pool.stride()}")
    return Memory(pool.data_ptr(), pool.nbytes, device_of(pool), owner=pool)


def is_on_gpu(pools: Any) -> bool:
    """Return whether pools, as accepted by `memory_of`, are in GPU memory.

    >>> is_on_gpu({0: np.zeros(8)}), is_on_gpu({0: Memory(64, 8, "cuda:0")}), is_on_gpu(None)
    (False, True, False)
    """
    given = getattr(pools, "pools", pools) or {}
    devices = [getattr(pool, "device", HOST) for pool in given.values()]
    return any(str(device).startswith("cuda") for device in devices)


def device_of(tensor: Any) -> str:
    """Return the name of a torch tensor's device.

    >>> import torch
    >>> device_of(torch.zeros(1))
    'host'
    """
    kind, number = tensor.device.type, tensor.device.index
    return HOST if kind == "cpu" else f"{kind}:{number or 0}"


def _cannot_register(what: str, got: object) -> AtlasError:
    problem = f"{what[0].upper()}{what[1:]} cannot be used as memory for copies"
    hint = "Pass a Cache, or map each pool index to a contiguous array or tensor, or to a Memory"
    return AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)


def find_pool(pools: Mapping[int, Bytes], index: int) -> Bytes:
    """Return the pool with index `index`, or raise `out_of_bounds` if there is none."""
    if index not in pools:
        problem, hint = (
            "The memory of a pool is missing",
            "Pass every pool of the plan by its index",
        )
        got = f"pools {list(pools)}, without pool {index}"
        raise AtlasError(Code.OUT_OF_BOUNDS, problem, got=got, hint=hint)
    return pools[index]


def copy_runs(
    source: Bytes, destination: Bytes, source_at: Places, destination_at: Places, length: Int64s
) -> Steps:
    """Copy runs from `source` to `destination`, one step per iteration.

    `source_at` and `destination_at` are the byte offsets of the runs in the buffers.

    >>> source, destination = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    >>> runs = np.array([6, 0]), np.array([0, 5]), np.array([2, 3])
    >>> for _ in copy_runs(source, destination, *runs):
    ...     pass
    >>> destination.tolist()
    [6, 7, 0, 0, 0, 0, 1, 2]
    """
    source_at, length = check_runs(source_at, length, source)
    destination_at, length = check_runs(destination_at, length, destination, written=True)
    return copy_runs_unchecked(source, destination, source_at, destination_at, length)


def copy_runs_unchecked(
    source: Bytes, destination: Bytes, source_at: Places, destination_at: Places, length: Int64s
) -> Steps:
    """Copy runs like `copy_runs`, without bounds checks. All runs must be inside both buffers."""
    if not len(length):
        return
    if one_length(length):
        yield from _of_one_length(source, destination, source_at, destination_at, length)
        return
    source_at, destination_at = np.asarray(source_at), np.asarray(destination_at)
    by_size = np.argsort(length, kind="stable")
    sizes, counts = np.unique(length, return_counts=True)
    together = (counts >= _FEW) & (sizes <= _SHORT_PACKED)
    alone = by_size[~np.repeat(together, counts)]
    alone.sort()
    for first, count in zip((np.cumsum(counts) - counts)[together], counts[together], strict=True):
        alike = by_size[first : first + count]
        yield from _of_one_length(
            source, destination, source_at[alike], destination_at[alike], length[alike]
        )
    if len(alone):
        yield from _one_by_one(
            source, destination, source_at[alone], destination_at[alone], length[alone]
        )


def one_length(length: Int64s) -> bool:
    """Return whether all runs have the same length. There must be at least one run."""
    return length.strides == (0,) or bool((length == length[0]).all())


def _of_one_length(
    source: Bytes, destination: Bytes, source_at: Places, destination_at: Places, length: Int64s
) -> Steps:
    size, count = int(length[0]), len(length)
    source_at, destination_at = _packed(source_at, size), _packed(destination_at, size)
    packed = isinstance(source_at, range) or isinstance(destination_at, range)
    if count < _FEW or size > (_SHORT_PACKED if packed else _SHORT):
        yield from _one_by_one(
            source, destination, np.asarray(source_at), np.asarray(destination_at), length
        )
        return
    from_elements, to_elements = _elements(source, size), _elements(destination, size)
    gathers = isinstance(destination_at, range) and not isinstance(source_at, range)
    grid = _grid(source, np.asarray(source_at), size) if gathers else None
    # Runs that numpy gathers into a temporary array are scattered while it is in the cache.
    between = grid is None and not isinstance(source_at, range)
    together = max(1, (_CACHED if between else STEP) // size)
    moved = 0
    for first in range(0, count, together):
        some = slice(first, first + together)
        into = _index(destination_at[some])
        if grid is None:
            to_elements[into] = from_elements[_index(source_at[some])]
        else:
            np.take(grid[0], grid[1][some], out=to_elements[into], mode="clip")
        moved += together * size
        if moved >= STEP:
            yield
            moved = 0


def _grid(source: Bytes, starts: Int64s, size: int) -> tuple[NDArray[Any], Int64s] | None:
    """Return (`source` as an array of `size`-byte elements, index of each run's element).

    Return None unless all distances between starts are multiples of `size`. The elements do not
    overlap, so `numpy.take` can gather them without a temporary copy.
    """
    first = int(starts.min())
    places, phases = np.divmod(starts - first, size)
    if phases.any():
        return None
    return source[first : first + (len(source) - first) // size * size].view(f"V{size}"), places


def _packed(starts: Places, size: int) -> Places:
    """Return `starts` as a `range` if the runs of `size` bytes are adjacent, else unchanged."""
    if isinstance(starts, range):
        return starts
    first, last = int(starts[0]), int(starts[-1])
    if last - first == (len(starts) - 1) * size and bool((np.diff(starts) == size).all()):
        return range(first, last + 1, size)
    return starts


def _index(places: Places) -> Int64s | slice:
    return slice(places.start, places.stop, places.step) if isinstance(places, range) else places


def _elements(buffer: Bytes, size: int) -> NDArray[Any]:
    """Return a view whose element i is bytes i .. i + size - 1 of a buffer; elements overlap."""
    return np.ndarray((len(buffer) - size + 1,), f"V{size}", buffer, strides=(1,))


def _one_by_one(
    source: Bytes, destination: Bytes, source_at: Int64s, destination_at: Int64s, length: Int64s
) -> Steps:
    read_from, write_to = source.data, destination.data
    source_address, destination_address = source.ctypes.data, destination.ctypes.data
    columns = split_runs(source_at, destination_at, length)
    moved = 0
    for start, to, size in zip(*(column.tolist() for column in columns), strict=True):
        if size < _UNLOCKED:
            write_to[to : to + size] = read_from[start : start + size]
        else:
            ctypes.memmove(destination_address + to, source_address + start, size)
        moved += size
        if moved >= STEP:
            yield
            moved = 0


def split_runs(
    source_at: Int64s, destination_at: Int64s, length: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Split runs so that none is longer than `STEP` bytes.

    >>> runs = split_runs(np.array([0]), np.array([7]), np.array([STEP + 1]))
    >>> [column.tolist() for column in runs]
    [[0, 16777216], [7, 16777223], [16777216, 1]]
    """
    if int(length.max()) <= STEP:
        return source_at, destination_at, length
    parts = -(-length // STEP)
    skip = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * STEP
    left = np.repeat(length, parts) - skip
    return (
        np.repeat(source_at, parts) + skip,
        np.repeat(destination_at, parts) + skip,
        np.minimum(left, STEP),
    )


def rank_pools(plan: Plan, rank: int, given: Mapping[int, Any]) -> dict[int, Bytes]:
    """Return the pools of a rank as byte arrays, by pool index.

    `given` maps pool indices to `Memory` on the host, numpy arrays or CPU tensors. Raise
    `out_of_bounds` if a pool is missing, too small, not contiguous or not in host memory.
    """
    pools = {}
    for index, pool in plan.rank_pools(rank).items():
        held = _bytes_of(given[index]) if index in given else None
        if held is None or held.size < pool.nbytes:
            size = None if held is None else held.size
            raise _no_access(index, pool.nbytes, given, size)
        pools[index] = held
    return pools


def gpu_pools(plan: Plan, rank: int, given: Any) -> dict[int, Memory]:
    """Return the GPU pools of a rank as regions, by pool index.

    `given` is anything that `memory_of` accepts.
    Raise `out_of_bounds` if a pool is missing or too small.
    """
    memory = memory_of(given)
    for index, pool in plan.rank_pools(rank).items():
        held = memory[index].nbytes if index in memory else None
        if held is None or held < pool.nbytes:
            raise _no_access(index, pool.nbytes, memory, held)
    load_driver()
    return memory


def _no_access(index: int, nbytes: int, given: Mapping[int, Any], held: int | None) -> AtlasError:
    if held is not None:
        got = f"{held:,} bytes"
    elif index in given:
        got = f"pool {index} that is not contiguous, or not in host memory"
    else:
        got = f"pools {sorted(given)}, without pool {index}"
    return AtlasError(
        Code.OUT_OF_BOUNDS,
        f"This process must be able to access the {nbytes:,} bytes of pool {index}",
        got=got,
        hint="Pass the memory of each pool by pool index, or your own copy function as carry=",
    )


def _bytes_of(pool: Any) -> Bytes | None:
    """Return a pool as a byte array; None if it is not contiguous or not in host memory."""
    if isinstance(pool, Memory):
        return as_bytes(pool) if pool.device == HOST else None
    if isinstance(pool, np.ndarray):
        return pool.reshape(-1).view(np.uint8) if pool.flags.c_contiguous else None
    if not callable(getattr(pool, "data_ptr", None)) or pool.device.type != "cpu":
        return None
    return as_bytes(Memory(pool.data_ptr(), pool.nbytes)) if pool.is_contiguous() else None
