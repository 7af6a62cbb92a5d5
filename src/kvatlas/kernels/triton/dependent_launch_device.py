"""Programmatic dependent launch: a kernel's programs are placed while the one before still runs.

On NVIDIA chips from Hopper on, a kernel that is launched early waits on the device for
the one before, whatever that was, and then lets the next one be placed. What is saved is
the time in which a chip stands empty between kernels: a microsecond or two for each.
Every kernel that is launched so (`tune.dependent_launch`) waits before its first access,
and so must others'. One does not: `merge` reads the schedule first, which was written before the
kernel ahead of it began, since that one waits itself, or is not launched early, before it lets
`merge` in.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
