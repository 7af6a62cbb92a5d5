"""Plans come to life: buffers, and views of them in the shapes that backends take.

This room needs torch (`pip install kvatlas[torch]`).
"""

from kvatlas.cache import adapters
from kvatlas.cache.cache import ALIGNMENT, Cache, LayerCache, allocate, bind
from kvatlas.cache.tensors import torch_dtype, view

__all__ = [
    "ALIGNMENT",
    "Cache",
    "LayerCache",
    "adapters",
    "allocate",
    "bind",
    "torch_dtype",
    "view",
]
