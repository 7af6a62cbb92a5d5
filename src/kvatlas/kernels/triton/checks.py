"""What is refused before a kernel is launched: a bad pointer on a device is not an exception."""

from __future__ import annotations

import os

import torch

from kvatlas.errors import AtlasError, Code

_INTEGERS = (torch.int32, torch.int64)


def debugging() -> bool:
    """Whether block ids are looked at, which waits for the device: `KVATLAS_DEBUG=1`."""
    return os.environ.get("KVATLAS_DEBUG", "0") not in ("", "0")


def same_device(device: torch.device, **tensors: torch.Tensor | None) -> torch.device:
    """The device, where all tensors are on it; those that are None do not matter."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise AtlasError(
                Code.WRONG_DEVICE,
                "Tensors of one kernel are on different devices",
                got=f"{name} on {tensor.device}, the cache on {device}",
                hint="Move it first; kernels never do, since that would wait",
            )
    return device


def reachable(buffer: torch.Tensor, device: torch.device) -> None:
    """Refuse memory that a kernel on `device` cannot address."""
    pinned = device.type == "cuda" and buffer.device.type == "cpu" and buffer.is_pinned()
    if buffer.device != device and not pinned:
        raise AtlasError(
            Code.WRONG_DEVICE,
            "Memory is out of reach: neither on the kernel's device nor pinned",
            got=f"memory on {buffer.device}, not pinned, from {device}",
            hint="Allocate host pools with pin_memory=True",
        )


def integers(tensor: torch.Tensor, name: str, *, axes: int) -> None:
    """Refuse what is not a tensor of whole numbers with so many axes, the last contiguous."""
    tight = tensor.ndim == axes and (last_is_tight(tensor) or tensor.shape[-1] <= 1)
    if tensor.dtype not in _INTEGERS or not tight:
        raise AtlasError(
            Code.BAD_TENSOR,
            f"{name} must be int32 or int64, {axes} axes, the last one contiguous",
            got=f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            hint="Pass them as the scheduler made them",
        )


def last_is_tight(tensor: torch.Tensor) -> bool:
    """Whether neighbours along the last axis are neighbours in memory.

    >>> rows = torch.zeros(4, 6)
    >>> last_is_tight(rows), last_is_tight(rows[:, :3]), last_is_tight(rows.T)
    (True, True, False)
    """
    # To ask for strides takes longer, and most tensors are contiguous.
    return tensor.is_contiguous() or tensor.stride(-1) == 1


def in_range(ids: torch.Tensor, count: int, name: str = "Block ids") -> None:
    """Refuse ids that the pool does not have, where that is asked for."""
    if debugging() and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= count):
        raise AtlasError(
            Code.OUT_OF_RANGE,
            f"{name} are outside 0..{count - 1}",
            got=f"{int(ids.min())}..{int(ids.max())}",
            hint="Check the block table, and slots = block * states + state",
        )


def rows_of(tensor: torch.Tensor, name: str, shape: tuple[int | None, ...]) -> None:
    """Refuse floating rows of another shape, or whose elements are not neighbours."""
    given = tuple(tensor.shape)
    fits = given == shape or (
        len(given) == len(shape)
        and all(want is None or want == n for want, n in zip(shape, given, strict=True))
    )
    if not fits or not tensor.is_floating_point() or tensor.stride(-1) != 1:
        raise AtlasError(
            Code.BAD_TENSOR,
            f"{name} must be floating point, of shape {shape}, its last axis contiguous",
            got=f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            hint="Slices of a fused projection are fine; transposed rows are not",
        )


def apart(tensor: torch.Tensor, name: str) -> None:
    """Refuse rows that share memory: programs would write over each other's."""
    if tensor.is_contiguous():
        return
    axes = sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )  # fmt: skip
    reach = 1
    for stride, size in axes:
        if stride < reach:
            raise AtlasError(
                Code.BAD_TENSOR,
                f"Rows of {name} share memory",
                got=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
                hint="Pass memory of its own for every row",
            )
        reach = stride * (size - 1) + reach


def no_kernel(problem: str, got: object, hint: str) -> AtlasError:
    """A refusal of what no kernel is written for."""
    return AtlasError(Code.NO_KERNEL, problem, got=got, hint=hint)
