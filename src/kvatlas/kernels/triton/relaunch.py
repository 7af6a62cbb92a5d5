"""Kernels that are launched again without Triton's look at their arguments.

At each launch Triton asks of every argument whether 16 divides it, and finds what it compiled by
the answers and by all constants: that takes longer than the launch. Whoever knows that arguments
are like those of an earlier launch can have what was compiled for these.
"""

from __future__ import annotations

from typing import Any

import torch

ALIGNED = 16
"""What Triton asks addresses and numbers to be a multiple of."""

Compiled = dict[str, Any]
"""Kernels that were compiled for arguments that are alike, by their names."""


TensorKind = tuple[bool, torch.dtype, torch.device, tuple[int, ...]]
"""What kernels are compiled for of a tensor, and what checks ask of it besides its sizes: whether
its address is aligned, its dtype, its device and its strides."""


def kind_of(tensor: torch.Tensor) -> TensorKind:
    """The kind of a tensor.

    >>> kind_of(torch.zeros(4, 6))[1:]
    (torch.float32, device(type='cpu'), (6, 1))
    """
    return tensor.data_ptr() % ALIGNED == 0, tensor.dtype, tensor.device, tensor.stride()


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
