"""Kernels that are launched again without Triton's look at their arguments.

At each launch Triton asks of every argument whether 16 divides it, and finds what it compiled by
the answers and by all constants: that takes longer than the launch. Whoever knows that arguments
are like those of an earlier launch can have what was compiled for these.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

ALIGNED = 16
"""What Triton asks addresses and numbers to be a multiple of."""

Compiled = dict[str, Any]
"""Kernels that were compiled for arguments that are alike, by their names."""
_MOST_KEPT = 64
"""Kinds of arguments that are remembered."""


TensorKind = tuple[bool, torch.dtype, torch.device, tuple[int, ...]]
"""What kernels are compiled for of a tensor, and what checks ask of it besides its sizes: whether
its address is aligned, its dtype, its device and its strides."""


def kind_of(tensor: torch.Tensor) -> TensorKind:
    """The kind of a tensor.

    >>> kind_of(torch.zeros(4, 6))[1:]
    (torch.float32, device(type='cpu'), (6, 1))
    """
    return tensor.data_ptr() % ALIGNED == 0, tensor.dtype, tensor.device, tensor.stride()


def number_kind(number: int) -> tuple[bool, bool]:
    """What kernels are compiled for of a number of 32 bits: whether it is 1, and aligned."""
    return number == 1, number % ALIGNED == 0


def launch(
    kernel: Any,
    programs: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
    compiled: Compiled,
) -> None:
    """Launch what was compiled for arguments like these; Triton finds or compiles it first.

    `constants` are in the kernel's order, behind its arguments; the same name is launched with
    the same constants and options. `options` are Triton's, and may repeat constants.
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
    """Keep what was launched for a kind, of these tensors and more.

    Not where elements along a last axis are apart: whether that is refused depends on sizes. Nor
    on AMD's chips, for which Triton also asks whether the memory of a tensor is below 2 GiB.
    """
    if torch.version.hip is None and all(one is None or one[-1][-1:] == (1,) for one in tensors):
        if len(compiled) >= _MOST_KEPT:
            compiled.clear()
        compiled[kind] = made
