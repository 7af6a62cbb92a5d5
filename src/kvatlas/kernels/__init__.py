"""Kernels: writing, reading, copying, clearing and attending to what a cache holds, with torch."""

from kvatlas.kernels.attend import attend, attend_latent
from kvatlas.kernels.attention import read, write
from kvatlas.kernels.blocks import copy_blocks, gather_blocks, zero_blocks
from kvatlas.kernels.codec import decode, encode

__all__ = [
    "attend",
    "attend_latent",
    "copy_blocks",
    "decode",
    "encode",
    "gather_blocks",
    "read",
    "write",
    "zero_blocks",
]
