"""Kernels for cached data: write, read, copy, clear, convert and attend.

All kernels run in torch on any device. Most also have a Triton implementation for GPUs.
"""

import kvatlas.cache  # noqa: F401 - first: its error names the extra that installs torch
from kvatlas.kernels.append_and_gather import AppendStep, append_step
from kvatlas.kernels.block_conversion import convert_blocks
from kvatlas.kernels.block_copy import copy_blocks, gather_blocks, zero_blocks
from kvatlas.kernels.paged_attention import attend, attend_latent
from kvatlas.kernels.quantise import decode, encode
from kvatlas.kernels.recurrent_states import read_states, write_states
from kvatlas.kernels.write_read_kv import read, write
from kvatlas.kernels.write_read_latent import (
    decode_latent,
    encode_latent,
    read_latent,
    read_rows,
    write_latent,
    write_rows,
)

__all__ = [
    "AppendStep",
    "append_step",
    "attend",
    "attend_latent",
    "convert_blocks",
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
