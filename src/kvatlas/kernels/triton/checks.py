"""Checks before a kernel launch. A kernel that gets a bad pointer raises no Python exception."""

from __future__ import annotations

import os

import torch

from kvatlas.errors import AtlasError, Code

_INTEGERS = (torch.int32, torch.int64)


def debugging() -> bool:
    """Return whether `KVATLAS_DEBUG=1` enables checks of device values, such as block ids."""
    return os.environ.get("KVATLAS_DEBUG", "0") not in ("", "0")


def same_device(device: torch.device, **tensors: torch.Tensor | None) -> torch.device:
    """Return `device`; raise an error if a tensor is on another device. None is ignored."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise AtlasError(
                Code.WRONG_DEVICE,
                f"`{name}` must be on the cache's device, {device}",
                got=f"a tensor on {tensor.device}",
                hint=f"Pass {name}.to({str(device)!r}); kernels do not move tensors",
            )
    return device


def reachable(buffer: torch.Tensor, device: torch.device) -> None:
    """Raise an error if a kernel on `device` cannot address a buffer."""
    pinned = device.type == "cuda" and buffer.device.type == "cpu" and buffer.is_pinned()
    if buffer.device != device and not pinned:
        raise AtlasError(
            Code.WRONG_DEVICE,
            f"A buffer must be on the kernel's device, {device}, or in pinned host memory",
            got=f"a buffer on {buffer.device} that is not pinned",
            hint="Allocate host pools with pin_memory=True",
        )


def integers(tensor: torch.Tensor, name: str, *, axes: int) -> None:
    """Raise an error unless a tensor is int32 or int64 and has `axes` axes, the last contiguous."""
    tight = tensor.ndim == axes and (last_is_tight(tensor) or tensor.shape[-1] <= 1)
    if tensor.dtype not in _INTEGERS or not tight:
        raise AtlasError(
            Code.BAD_TENSOR,
            f"`{name}` must be a {axes}-dimensional tensor of int32 or int64 with contiguous rows",
            got=f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            hint="Pass a contiguous tensor of int32 or int64",
        )


def last_is_tight(tensor: torch.Tensor) -> bool:
    """Return whether the last axis is contiguous.

    >>> rows = torch.zeros(4, 6)
    >>> last_is_tight(rows), last_is_tight(rows[:, :3]), last_is_tight(rows.T)
    (True, True, False)
    """
    # `is_contiguous` is cheaper than `stride`, and most tensors are contiguous.
    return tensor.is_contiguous() or tensor.stride(-1) == 1


def in_range(ids: torch.Tensor, count: int, name: str = "Block ids") -> None:
    """With `KVATLAS_DEBUG=1`, raise an error for ids that are not in 0..count - 1."""
    if debugging() and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= count):
        raise AtlasError(
            Code.OUT_OF_RANGE,
            f"{name} must be in 0..{count - 1}",
            got=f"{int(ids.min())}..{int(ids.max())}",
            hint="Check the block table or the slot mapping",
        )


def rows_of(tensor: torch.Tensor, name: str, shape: tuple[int | None, ...]) -> None:
    """Raise an error unless a tensor is floating point, of `shape`, with a contiguous last axis.

    None in `shape` permits any size.
    """
    given = tuple(tensor.shape)
    fits = given == shape or (
        len(given) == len(shape)
        and all(want is None or want == n for want, n in zip(shape, given, strict=True))
    )
    if not fits or not tensor.is_floating_point() or tensor.stride(-1) != 1:
        wanted = str(shape).replace("None", "any")
        raise AtlasError(
            Code.BAD_TENSOR,
            f"`{name}` must be floating point, of shape {wanted}, with a contiguous last axis",
            got=f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            hint="Pass a tensor of this shape. The tensor may be a slice of a fused projection, "
            "but not transposed",
        )


def apart(tensor: torch.Tensor, name: str) -> None:
    """Raise an error if rows share memory, because programs would overwrite each other's rows."""
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
                f"Rows of `{name}` must not share memory",
                got=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
                hint="Pass a tensor without expanded or overlapping axes",
            )
        reach = stride * (size - 1) + reach


def no_kernel(problem: str, got: object, hint: str) -> AtlasError:
    """Return the error for arguments that no kernel supports."""
    return AtlasError(Code.NO_KERNEL, problem, got=got, hint=hint)
