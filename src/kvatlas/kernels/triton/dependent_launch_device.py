"""Programmatic dependent launch: start a kernel's programs while the previous kernel still runs.

On Hopper and later NVIDIA GPUs, a kernel can be launched early: it waits on the device for the
previous kernel, and then permits the launch of the next one. This saves one or two microseconds of
idle time between two kernels.

Every kernel that is launched this way (`tune.dependent_launch`) waits before its first memory
access, and external kernels must do the same. The only exception is `merge`, which reads the
schedule before it waits for the decode kernel. An earlier kernel (`count_tiles` or `select`) writes
the schedule. The schedule is complete when `merge` starts, because `merge` is launched after the
decode kernel, which itself either waits for the earlier kernel or is not launched early.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """Wait for the previous kernel's writes if `EARLY` is set, else do nothing.

    `EARLY` means that this kernel was launched early. Call this before any read or write.
    """
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def before_next(EARLY: tl.constexpr):
    """Permit the launch of the next kernel, if `EARLY` is set.

    The next kernel may start once all programs of this kernel have called `before_next`.
    """
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
