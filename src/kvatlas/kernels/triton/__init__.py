"""The same kernels for GPUs, with Triton: `kvatlas.kernels` comes here for tensors on one.

Addresses come from placements alone, so that every order is read and written as it lies.
This room needs triton (`pip install 'kvatlas[triton]'`), which also interprets it on a CPU
where `TRITON_INTERPRET=1` is set.

What Triton compiles is in `*_device.py`; host code is everywhere else. The two meet in
NamedTuples: of tensors and numbers (`BatchSequences`, `PagedCache`), and of constants that a kernel
is compiled for (`AttentionShape`, `Tiling`), whose parameters are in capitals. In device
code a constant's field is bound to a name of its own (`TILE: tl.constexpr = TILING.tile`)
before it becomes part of a shape, or, if it is a string or a tuple, an argument: Triton 3.6
takes no bare Python values there. Nor does it take None beside numbers in a tuple: what a
kernel does not read is some tensor or number that is at hand.
"""

from kvatlas.kernels.triton.attention.arguments import split_of
from kvatlas.kernels.triton.attention.launch import attend, attend_latent
from kvatlas.kernels.triton.attention.schedule import Schedule, WorkSplit, schedule
from kvatlas.kernels.triton.launch_append import TableAppend
from kvatlas.kernels.triton.launch_convert import BlockConversion
from kvatlas.kernels.triton.launch_copy import (
    BlockCopy,
    CopyEnd,
    between,
    copy_blocks,
    zero_blocks,
)
from kvatlas.kernels.triton.launch_write import write, write_latent
from kvatlas.kernels.triton.offload_staging import Staging
from kvatlas.kernels.triton.storage_formats import attends_latent, writes_latent

__all__ = [
    "BlockConversion",
    "BlockCopy",
    "CopyEnd",
    "Schedule",
    "Staging",
    "TableAppend",
    "WorkSplit",
    "attend",
    "attend_latent",
    "attends_latent",
    "between",
    "copy_blocks",
    "schedule",
    "split_of",
    "write",
    "write_latent",
    "writes_latent",
    "zero_blocks",
]
