"""Copies within this process: byte ranges from pool to pool, without a buffer between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Copy
from kvatlas.wire import Bytes, Memory, as_bytes

_LONG = 16 << 10
"""From here on a run by itself costs less than its share of an indexed copy."""

_AT_ONCE = 256 << 10
"""Bytes of an indexed copy: what it gathers is scattered while still in cache."""


def carry_out(copies: Iterable[Copy], src: Mapping[int, Bytes], dst: Mapping[int, Bytes]) -> None:
    """Copy every range.

    >>> pools = {0: np.arange(8, dtype=np.uint8)}, {0: np.zeros(8, dtype=np.uint8)}
    >>> carry_out([Copy(0, 0, np.array([6, 0]), np.array([0, 4]), np.array([2, 3]))], *pools)
    >>> pools[1][0]
    array([6, 7, 0, 0, 0, 1, 2, 0], dtype=uint8)
    """
    for copy in copies:
        pools = src[copy.src_pool], dst[copy.dst_pool]
        if len(copy) and copy.length.min() == copy.length.max():
            _of_one_length(*pools, copy.src, copy.dst, int(copy.length[0]))
            continue
        for length in np.unique(copy.length).tolist():
            alike = copy.length == length
            _of_one_length(*pools, copy.src[alike], copy.dst[alike], length)


def _of_one_length(src: Bytes, dst: Bytes, starts: Any, ends: Any, length: int) -> None:
    if length >= _LONG or len(starts) == 1:
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            dst[end : end + length] = src[start : start + length]
        return
    # Every run of this length as one element of a wide type: elements copy fast.
    out_of, into = _elements(src, length), _elements(dst, length)
    step = max(1, _AT_ONCE // length)
    for first in range(0, len(starts), step):
        some = slice(first, first + step)
        into[ends[some]] = out_of[starts[some]]


def _elements(pool: Bytes, length: int) -> Any:
    """Elements of `length` bytes that begin at every byte of a pool; nothing is copied."""
    return np.ndarray((pool.size - length + 1,), f"V{length}", pool, 0, (1,))


def pools_of(plan: Plan, rank: int, given: Mapping[int, Any]) -> dict[int, Bytes]:
    """The pools of a rank as bytes: memory, numpy arrays or CPU tensors from outside."""
    held = {}
    for pool in plan.pools:
        if pool.stage != rank // plan.tp:
            continue
        own = _bytes_of(given[pool.index]) if pool.index in given else None
        if own is None or own.size < pool.nbytes:
            got = f"pools {sorted(given)}" if own is None else f"{own.size} bytes"
            raise AtlasError(
                Code.OUT_OF_BOUNDS,
                f"Pool {pool.index} is not {pool.nbytes} bytes that this process can reach",
                got=got,
                hint="Pass the rank's own pools by index, or carry= for memory elsewhere",
            )
        held[pool.index] = own
    return held


def _bytes_of(pool: Any) -> Bytes | None:
    """Memory of this process as bytes; None where it is not, or not in one piece."""
    if isinstance(pool, Memory):
        return as_bytes(pool) if pool.device == 0 else None
    if isinstance(pool, np.ndarray):
        return pool.reshape(-1).view(np.uint8) if pool.flags.c_contiguous else None
    if not callable(getattr(pool, "data_ptr", None)) or pool.device.type != "cpu":
        return None
    return as_bytes(Memory(pool.data_ptr(), pool.nbytes)) if pool.is_contiguous() else None
