"""Kernels: writing, reading, copying, clearing and attending to what a cache holds.

With torch anywhere; on a GPU most of them are Triton's.
"""

from kvatlas.kernels.attend import attend, attend_latent
from kvatlas.kernels.attention import read, write
from kvatlas.kernels.blocks import copy_blocks, gather_blocks, zero_blocks
from kvatlas.kernels.codec import decode, encode
from kvatlas.kernels.latent import (
    decode_latent,
    encode_latent,
    read_latent,
    read_rows,
    write_latent,
    write_rows,
)
from kvatlas.kernels.states import read_states, write_states

__all__ = [
    "attend",
    "attend_latent",
    "copy_blocks",
    "decode",
    "decode_latent",
    "encode",
    "encode_latent",
    "gather_blocks",
    "read",
    "read_latent",
    "read_rows",
    "read_states",
    "write",
    "write_latent",
    "write_rows",
    "write_states",
    "zero_blocks",
]
