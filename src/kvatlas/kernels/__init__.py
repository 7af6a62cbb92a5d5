"""Kernels: writing, reading, copying, clearing and attending to what a cache holds, with torch."""

from kvatlas.kernels.attend import attend, attend_latent
from kvatlas.kernels.blocks import copy_blocks, read, write, zero_blocks
from kvatlas.kernels.codec import decode, encode

__all__ = [
    "attend",
    "attend_latent",
    "copy_blocks",
    "decode",
    "encode",
    "read",
    "write",
    "zero_blocks",
]
