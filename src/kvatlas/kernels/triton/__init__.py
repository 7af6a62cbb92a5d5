"""The same kernels for GPUs, with Triton: `kvatlas.kernels` comes here for tensors on one.

Addresses come from placements alone, so that every order is read and written as it lies.
This room needs triton (`pip install kvatlas[triton]`), which also interprets it on a CPU
where `TRITON_INTERPRET=1` is set.
"""

from kvatlas.kernels.triton.attention.call import cut_of
from kvatlas.kernels.triton.attention.launch import attend, attend_latent
from kvatlas.kernels.triton.attention.schedule import Schedule, schedule
from kvatlas.kernels.triton.host_staging import Staging
from kvatlas.kernels.triton.launch_copy import Copy, Side, between, copy_blocks, zero_blocks
from kvatlas.kernels.triton.launch_write import write, write_latent
from kvatlas.kernels.triton.storage_formats import attends_latent, writes_latent

__all__ = [
    "Copy",
    "Schedule",
    "Side",
    "Staging",
    "attend",
    "attend_latent",
    "attends_latent",
    "between",
    "copy_blocks",
    "cut_of",
    "schedule",
    "write",
    "write_latent",
    "writes_latent",
    "zero_blocks",
]
