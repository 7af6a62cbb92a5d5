"""Regions of memory, on the host or on a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvatlas.errors import AtlasError, Code

STAGING = -1
"""The pool index under which a process registers its staging buffers."""

HOST = "host"
"""The device name of host memory. GPUs are named `cuda:0`, `cuda:1` and so on."""

_DEVICE = re.compile(r"host|cuda:(0|[1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class Memory:
    """One region of memory: its address, size and device.

    `device` is `host`, or a torch device name such as `cuda:0`. This value keeps `owner` alive.

    >>> Memory(0x7F0000000000, 4096, "cuda:1").number
    1
    """

    address: int
    nbytes: int
    device: str = HOST
    owner: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise AtlasError(
                Code.WRONG_DEVICE,
                "The device name of a memory region is invalid",
                got=repr(self.device),
                hint='Use "host", or a name such as "cuda:0"',
            )

    @property
    def number(self) -> int:
        """The index of the GPU; 0 for the host."""
        return 0 if self.device == HOST else int(self.device.removeprefix("cuda:"))
