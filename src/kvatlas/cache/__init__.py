"""Buffers for a plan, and zero-copy views of these buffers in the shapes that backends expect.

This package requires torch (`pip install 'kvatlas[torch]'`).
"""

from importlib.util import find_spec

from kvatlas.errors import MissingExtraError

if find_spec("torch") is None:
    raise MissingExtraError("torch", "torch")

from kvatlas.cache import adapters
from kvatlas.cache.cache import ALIGNMENT, Cache, LayerCache, allocate, bind
from kvatlas.cache.tensors import torch_dtype

__all__ = [
    "ALIGNMENT",
    "Cache",
    "LayerCache",
    "adapters",
    "allocate",
    "bind",
    "torch_dtype",
]
