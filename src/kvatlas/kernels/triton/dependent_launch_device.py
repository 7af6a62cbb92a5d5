"""Launches that overlap: a kernel's programs are placed while the one before still runs.

On NVIDIA chips from Hopper on, a kernel that is launched early waits on the device for
the one before, whatever that was, and then lets the next one be placed. What is saved is
the time in which a chip stands empty between kernels: a microsecond or two for each.
Every kernel that is launched so waits before its first access, and so must others'.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl


@lru_cache(maxsize=16)
def early(device: torch.device) -> dict[str, Any]:
    """What a kernel that waits for its turn itself is launched with.

    >>> early(torch.device("cpu"))
    {'EARLY': False}
    """
    new = device.type == "cuda" and torch.version.hip is None
    if new and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """Wait for what the kernel before has written: before anything is read or written."""
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def before_next(EARLY: tl.constexpr):
    """Let the next kernel's programs be placed, once all of this one's are."""
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
