"""Copy KV caches inside one machine: between host memory, GPUs and files, along routes."""

from kvatlas.copying.memory import HOST, Memory
from kvatlas.copying.memory_copy import memory_of
from kvatlas.copying.nested_copy import copy_pools
from kvatlas.copying.stream_copy import copy_request

__all__ = ["HOST", "Memory", "copy_pools", "copy_request", "memory_of"]
