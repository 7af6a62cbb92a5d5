"""Launch kernels again without Triton's inspection of their arguments.

At each launch, Triton checks for every argument whether it is divisible by 16, and looks up the
compiled kernel by the results and all constants. This takes longer than the launch. A caller that
knows that its arguments match an earlier launch can reuse the compiled kernel directly.
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
    """Return the kind of a tensor.

    >>> kind_of(torch.zeros(4, 6))[1:]
    (torch.float32, device(type='cpu'), (6, 1))
    """
    return tensor.data_ptr() % ALIGNED == 0, tensor.dtype, tensor.device, tensor.stride()


def number_kind(number: int) -> tuple[bool, bool]:
    """Return the properties of a 32-bit integer that affect compilation: is 1, is aligned."""
    return number == 1, number % ALIGNED == 0


def launch(
    kernel: Any,
    programs: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
    compiled: Compiled,
) -> None:
    """Launch the compiled kernel for such arguments; let Triton compile it the first time.

    `constants` are in the order of the kernel's parameters, after its arguments. One kernel name
    must always have the same constants and options. `options` are Triton's, and may repeat
    constants.
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
    """Cache a compiled kernel for a kind of arguments, if that is safe.

    Tensors whose last axis is not contiguous are not cached, because the checks then depend on
    sizes. Nothing is cached on AMD GPUs, where Triton also checks whether a tensor's memory is
    below 2 GiB.
    """
    if torch.version.hip is None and all(one is None or one[-1][-1:] == (1,) for one in tensors):
        if len(compiled) >= _MOST_KEPT:
            compiled.clear()
        compiled[kind] = made
