"""Placements as strided torch tensors. Views never copy.

This module creates every view of a cache, from a placement and the bytes of a pool. It raises an
error if a view is impossible, for example because an element does not start at a multiple of its
size.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Placement

_TORCH: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch dtype that stores elements of `dtype`; uint8 if torch has no such dtype.

    >>> torch_dtype(DType.of("bf16")), torch_dtype(DType.of("nvfp4"))
    (torch.bfloat16, torch.uint8)
    """
    return _TORCH.get(dtype.name, torch.uint8)


def check_pool(buffer: torch.Tensor) -> None:
    """Raise an error if a pool is not a contiguous one-dimensional uint8 tensor."""
    if not isinstance(buffer, torch.Tensor):
        hint = "Pass the whole allocation as a uint8 tensor"
        got = type(buffer).__name__
        raise AtlasError(Code.BAD_TENSOR, "A pool must be a torch tensor", got=got, hint=hint)
    if buffer.dtype != torch.uint8 or buffer.ndim != 1 or not buffer.is_contiguous():
        problem = "A pool must be a contiguous one-dimensional uint8 tensor"
        hint = "Pass the whole allocation"
        got = f"{buffer.dtype} of shape {tuple(buffer.shape)}"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)


def whole_tensor(given: Any, what: str, hint: str) -> torch.Tensor:
    """Return `given` as a tensor of integers; raise an error if it is something else.

    An empty tensor may have any dtype. `what` names the integers in errors.

    >>> whole_tensor([3, 1], "Block ids", "Pass ints")
    tensor([3, 1])
    """
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = None
    if found is None or (
        found.numel() and (found.is_floating_point() or found.dtype == torch.bool)
    ):
        got = type(given).__name__ if found is None else str(found.dtype)
        raise AtlasError(Code.NOT_AN_INTEGER, f"{what} must be integers", got=got, hint=hint)
    return found


def checked_ids(ids: torch.Tensor, count: int, what: str, hint: str) -> torch.Tensor:
    """Return ids as a one-dimensional int64 tensor; raise an error if one is not in 0..count - 1.

    Ids on a GPU are checked only with `KVATLAS_DEBUG=1`, because the check synchronizes with
    the device. Without it, an id out of range triggers a device-side assertion of torch.
    """
    ids = whole_tensor(ids, what, hint)
    if ids.dim() > 1:
        problem = f"{what} must have one dimension"
        raise AtlasError(Code.BAD_TENSOR, problem, got=f"shape {tuple(ids.shape)}", hint=hint)
    if ids.numel():
        if ids.is_cuda and os.environ.get("KVATLAS_DEBUG", "0") in ("", "0"):
            return ids.long()
        low, high = (int(n) for n in torch.aminmax(ids))
        if low < 0 or high >= count:
            problem = f"{what} must be in 0..{count - 1}"
            wrong = low if low < 0 else high
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=wrong, hint=hint)
    return ids.long()


def view(buffer: torch.Tensor, placement: Placement, dtype: torch.dtype) -> torch.Tensor:
    """Return a zero-copy view of a pool, with one dimension for each axis of the placement.

    >>> rows = Placement.packed([("B", 2), ("C", 3)], item=4, strides={"B": 16})
    >>> view(torch.zeros(32, dtype=torch.uint8), rows, torch.float32).stride()
    (4, 1)
    """
    item = dtype.itemsize
    check_pool(buffer)
    if placement.item != item:
        problem = "The dtype must have the size of the placement's items"
        got = f"{dtype} ({item} bytes) for items of {placement.item} bytes"
        hint = "Pass the placement of one field, as LayerCache.place returns it"
        raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=got, hint=hint)
    if placement.stop > buffer.numel():
        got = f"bytes up to {placement.stop} in a pool of {buffer.numel()} bytes"
        hint = "Allocate the size of the pool in the plan, `pool.nbytes`"
        raise AtlasError(Code.OUT_OF_BOUNDS, got=got, hint=hint)
    if any(step % item for step in (placement.offset, *placement.strides)):
        raise AtlasError(
            Code.MISALIGNED,
            "Every element of a view must start at a multiple of its size",
            got=f"{placement} as {dtype}",
            hint="Pad pages and blocks to multiples of the element size",
        )
    whole = buffer[: buffer.numel() // item * item].view(dtype)
    # A placement drops the stride of an axis of size 1, but some kernels check strides
    # regardless of sizes, so use the stride of a contiguous tensor.
    steps: list[int] = []
    inner = 1
    for size, stride in zip(reversed(placement.sizes), reversed(placement.strides), strict=True):
        steps.insert(0, stride // item if size > 1 else inner)
        inner = steps[0] * size
    start = whole.storage_offset() + placement.offset // item
    return torch.as_strided(whole, placement.sizes, steps, start)
