"""Dispatch: Triton kernels for tensors on a GPU, torch elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

import torch


def gpu_kernels(*tensors: torch.Tensor) -> Any:
    """Return `kvatlas.kernels.triton` if a tensor is on a GPU and Triton is installed, else None.

    >>> gpu_kernels(torch.zeros(1)) is None
    True
    """
    return _triton() if any(tensor.is_cuda for tensor in tensors) else None


@lru_cache(maxsize=1)
def _triton() -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("kvatlas.kernels.triton")
