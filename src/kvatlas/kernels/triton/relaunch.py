"""Launch compiled kernels directly, without Triton's inspection of the arguments.

At each launch, Triton checks whether 16 divides each argument. The results and all constants form
the key under which Triton looks up the compiled kernel. Both steps together take longer than the
launch itself. A caller whose arguments are of the same kind as in an earlier launch can reuse the
compiled kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

ALIGNED = 16
"""Alignment that Triton checks for addresses and integers."""

Compiled = dict[str, Any]
"""Compiled kernels for one kind of arguments, by kernel name."""
_MOST_KEPT = 64
"""Maximum number of argument kinds that are cached."""


TensorKind = tuple[bool, torch.dtype, torch.device, tuple[int, ...]]
"""Properties of a tensor that affect compilation or checks, apart from its sizes: whether its
address is aligned, its dtype, its device and its strides."""


def kind_of(tensor: torch.Tensor) -> TensorKind:
    """Return the properties of a tensor on which compiled kernels and checks depend.

    >>> kind_of(torch.zeros(4, 6))[1:]
    (torch.float32, device(type='cpu'), (6, 1))
    """
    return tensor.data_ptr() % ALIGNED == 0, tensor.dtype, tensor.device, tensor.stride()


def number_kind(number: int) -> tuple[bool, bool]:
    """Return (`number` is 1, 16 divides `number`); Triton specialises kernels on both."""
    return number == 1, number % ALIGNED == 0


def launch(
    kernel: Any,
    programs: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
    compiled: Compiled,
) -> None:
    """Launch a kernel, compiled by Triton the first time and then cached in `compiled`.

    `constants` are in the order of the kernel's parameters, after its arguments. A kernel that
    is cached in `compiled` must always have the same constants and options. `options` are Triton's
    launch options, and may repeat constants.
    """
    known = compiled.get(kernel.__name__)
    if known is not None:
        known[programs](*arguments, *constants.values())
    else:
        compiled[kernel.__name__] = kernel[programs](*arguments, **{**constants, **options})


def keep(
    compiled: dict[Hashable, _T],
    kind: Hashable,
    tensors: Iterable[TensorKind | None],
    made: _T,
) -> None:
    """Cache `made`, the compiled kernels for a kind of arguments, unless that is unsafe.

    It is unsafe if the last axis of a tensor is not contiguous, because the result of the checks
    then depends on sizes. It is also unsafe on AMD GPUs, where Triton also specialises on whether a
    tensor is smaller than 2 GiB.
    """
    if torch.version.hip is None and all(one is None or one[-1][-1:] == (1,) for one in tensors):
        if len(compiled) >= _MOST_KEPT:
            compiled.clear()
        compiled[kind] = made
