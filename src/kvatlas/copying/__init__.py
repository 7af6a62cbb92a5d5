"""Copy KV caches within one machine, between host memory, GPUs and files, as a route specifies."""

from kvatlas.copying.memory import HOST, Memory
from kvatlas.copying.memory_copy import memory_of
from kvatlas.copying.nested_copy import copy_pools
from kvatlas.copying.stream_pieces import copy_request

__all__ = ["HOST", "Memory", "copy_pools", "copy_request", "memory_of"]
