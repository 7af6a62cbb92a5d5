"""Triton kernels. `kvatlas.kernels` dispatches to this package for tensors on a GPU.

Kernels compute addresses from placements only, so they support every layout without a copy. This
package requires triton (`pip install 'kvatlas[triton]'`). With `TRITON_INTERPRET=1`, Triton
interprets the kernels on a CPU.

Files named `*_device.py` contain the code that Triton compiles; all other files are host code.
Host code passes NamedTuples to device code: some contain tensors and numbers (`BatchSequences`,
`PagedCache`), others contain compile-time constants (`AttentionShape`, `Tiling`). Constant
parameters have names in capitals.

Two limits of Triton 3.6 shape the device code. First, a field of a constant must be bound to a name
(`TILE: tl.constexpr = TILING.tile`) before it is used in a shape or, if it is a string or a tuple,
as an argument. Second, a tuple cannot mix None with numbers, so an unused argument receives an
arbitrary tensor or number as a placeholder.
"""

from kvatlas.kernels.triton.attention.launch import attend, attend_latent
from kvatlas.kernels.triton.attention.launch_arguments import split_of
from kvatlas.kernels.triton.attention.step_schedule import Schedule, WorkSplit, schedule
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
