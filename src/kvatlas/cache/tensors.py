"""Placements as strided torch tensors: always views, never copies.

Every view of a cache is made here, from a placement and the pool's bytes. What
cannot be a view (an element that does not start at a multiple of its size, say) is
refused with the reason.
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
    """The torch type of a field's storage items; bytes where torch has no such type.

    >>> torch_dtype(DType.of("bf16")), torch_dtype(DType.of("nvfp4"))
    (torch.bfloat16, torch.uint8)
    """
    return _TORCH.get(dtype.name, torch.uint8)


def check_pool(buffer: torch.Tensor) -> None:
    """Refuse a tensor that is not one contiguous axis of bytes."""
    if not isinstance(buffer, torch.Tensor):
        hint = "Pass the whole allocation as a tensor of uint8"
        got = type(buffer).__name__
        raise AtlasError(Code.BAD_TENSOR, "A pool is not a tensor", got=got, hint=hint)
    if buffer.dtype != torch.uint8 or buffer.ndim != 1 or not buffer.is_contiguous():
        problem, hint = "A pool is not one contiguous axis of uint8", "Pass the whole allocation"
        got = f"{buffer.dtype} of shape {tuple(buffer.shape)}"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)


def whole_tensor(given: Any, what: str, hint: str) -> torch.Tensor:
    """Whole numbers from outside as a tensor; an empty one may be of any type.

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
        raise AtlasError(Code.NOT_AN_INTEGER, got=f"{what} of {got}", hint=hint)
    return found


def checked_ids(ids: torch.Tensor, count: int, what: str, hint: str) -> torch.Tensor:
    """Ids as a row of int64, refused where one is not in 0..count-1.

    Ids on a GPU are looked at with `KVATLAS_DEBUG=1` alone, since that waits for the device;
    torch stops the program where it reads by ids that are not there.
    """
    ids = whole_tensor(ids, what, hint)
    if ids.dim() > 1:
        problem = f"{what} must be one row"
        raise AtlasError(Code.BAD_TENSOR, problem, got=f"shape {tuple(ids.shape)}", hint=hint)
    if ids.numel():
        if ids.is_cuda and os.environ.get("KVATLAS_DEBUG", "0") in ("", "0"):
            return ids.long()
        low, high = (int(n) for n in torch.aminmax(ids))
        if low < 0 or high >= count:
            problem = f"{what} must be 0..{count - 1}"
            raise AtlasError(Code.OUT_OF_RANGE, problem, got=f"{low}..{high}", hint=hint)
    return ids.long()


def view(buffer: torch.Tensor, placement: Placement, dtype: torch.dtype) -> torch.Tensor:
    """The items of a placement in a pool's bytes, as a tensor with one axis for each axis.

    >>> rows = Placement.packed([("B", 2), ("C", 3)], item=4, strides={"B": 16})
    >>> view(torch.zeros(32, dtype=torch.uint8), rows, torch.float32).stride()
    (4, 1)
    """
    item = dtype.itemsize
    check_pool(buffer)
    if placement.item != item:
        problem = f"Elements of {item} bytes are not as large as the placement's items"
        got, hint = f"{dtype} for items of {placement.item}", "View the field, not the cells"
        raise AtlasError(Code.UNLIKE_PLACEMENTS, problem, got=got, hint=hint)
    if placement.stop > buffer.numel():
        got = f"bytes up to {placement.stop} of a pool of {buffer.numel()}"
        raise AtlasError(Code.OUT_OF_BOUNDS, got=got, hint="Allocate what the plan says")
    if any(step % item for step in (placement.offset, *placement.strides)):
        problem = "Elements of the view do not start at multiples of their size"
        hint = "Plan pages and blocks whose sizes are multiples of the element"
        raise AtlasError(Code.MISALIGNED, problem, got=f"{placement} as {dtype}", hint=hint)
    whole = buffer[: buffer.numel() // item * item].view(dtype)
    # A placement forgets the stride of an axis of size 1; kernels that look at strides
    # without looking at sizes want what a contiguous tensor would have.
    steps: list[int] = []
    inner = 1
    for size, stride in zip(reversed(placement.sizes), reversed(placement.strides), strict=True):
        steps.insert(0, stride // item if size > 1 else inner)
        inner = steps[0] * size
    start = whole.storage_offset() + placement.offset // item
    return torch.as_strided(whole, placement.sizes, steps, start)
