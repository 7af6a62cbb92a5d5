"""Copies of byte ranges inside one address space, in steps.

Long runs go one by one at the speed of memcpy. Short runs of one length are rows of
an array whose rows start at any byte, so that numpy gathers and scatters thousands of
them in one call. The work is cut into steps of a few milliseconds: whoever polls does
one step at a time, and can look at the clock, or at the peer, in between.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s
from kvatlas.routing import Copy
from kvatlas.wire.transports.base import Handle, Memory
from kvatlas.wire.transports.errors import cancelled, failed

STEP = 16 << 20
"""Bytes that are copied between two looks at the clock."""

_SHORT = 4 << 10
"""Runs up to here gain from being gathered; longer ones are copied faster one by one."""
_FEW = 16
"""Fewer short runs than this are not worth an array."""
_GATHERED = 256 << 10
"""Bytes that are gathered at once: what stays in the processor's cache on its way."""
_UNLOCKED = 1 << 20
"""Runs from here on are copied without holding up other threads."""

Bytes = NDArray[np.uint8]
Steps = Iterator[bool]
"""Yields True after a step, False where somebody else has to act first."""
Rows = list[tuple[int, int, int]]


def as_bytes(memory: Memory) -> Bytes:
    """The bytes of a region of this process; whoever registered it keeps it alive."""
    region: Any = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    found: Bytes = np.frombuffer(region, np.uint8)
    return found


def copied(src: Bytes, dst: Bytes, copy: Copy) -> Steps:
    """Carry out a copy between two regions.

    >>> src, dst = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    >>> runs = Copy(0, 0, np.array([6, 0]), np.array([0, 5]), np.array([2, 3]))
    >>> for _ in copied(src, dst, runs): pass
    >>> dst.tolist()
    [6, 7, 0, 0, 0, 0, 1, 2]
    """
    least, most = int(copy.length.min()), int(copy.length.max())
    ways = ((_short, 0, _SHORT), (_middle, _SHORT, _UNLOCKED), (_long, _UNLOCKED, most))
    for way, above, upto in ways:
        if most <= above or least > upto:
            continue
        columns = (copy.src, copy.dst, copy.length)
        if least <= above or most > upto:
            chosen = (copy.length > above) & (copy.length <= upto)
            columns = (copy.src[chosen], copy.dst[chosen], copy.length[chosen])
        if len(columns[0]):
            yield from way(src, dst, *columns)


def _short(src: Bytes, dst: Bytes, src_at: Int64s, dst_at: Int64s, length: Int64s) -> Steps:
    least = int(length.min())
    if len(length) >= _FEW and least == int(length.max()):
        yield from _gathered(src, dst, src_at, dst_at, least)
        return
    sizes, counts = np.unique(length, return_counts=True)
    rest = np.ones(len(length), dtype=bool)
    for size in sizes[counts >= _FEW].tolist():
        alike = length == size
        rest &= ~alike
        yield from _gathered(src, dst, src_at[alike], dst_at[alike], size)
    if bool(rest.any()):
        yield from _middle(src, dst, src_at[rest], dst_at[rest], length[rest])


def _gathered(src: Bytes, dst: Bytes, src_at: Int64s, dst_at: Int64s, size: int) -> Steps:
    from_rows, to_rows = _rows(src, size), _rows(dst, size)
    many = max(1, _GATHERED // size)
    pause = max(1, STEP // _GATHERED)
    for step, first in enumerate(range(0, len(src_at), many)):
        chosen = slice(first, first + many)
        to_rows[dst_at[chosen]] = from_rows[src_at[chosen]]
        if step % pause == pause - 1:
            yield True


def _rows(region: Bytes, size: int) -> NDArray[Any]:
    """Every stretch of a size, one starting at each byte."""
    return np.ndarray((len(region) - size + 1,), f"V{size}", region, strides=(1,))


def _middle(src: Bytes, dst: Bytes, src_at: Int64s, dst_at: Int64s, length: Int64s) -> Steps:
    source, target = src.data, dst.data
    for rows in _in_steps(src_at, dst_at, length):
        for start, to, size in rows:
            target[to : to + size] = source[start : start + size]
        yield True


def _long(src: Bytes, dst: Bytes, src_at: Int64s, dst_at: Int64s, length: Int64s) -> Steps:
    move = ctypes.memmove
    pieces = cut(src_at + src.ctypes.data, dst_at + dst.ctypes.data, length)
    for rows in _in_steps(*pieces):
        for start, to, size in rows:
            move(to, start, size)
        yield True


def _in_steps(src_at: Int64s, dst_at: Int64s, length: Int64s) -> Iterator[Rows]:
    """Rows (source, destination, length), a step's worth at a time."""
    share = (np.cumsum(length) - 1) // STEP
    rows = list(zip(src_at.tolist(), dst_at.tolist(), length.tolist(), strict=True))
    ends = [*(np.flatnonzero(np.diff(share)) + 1).tolist(), len(rows)]
    first = 0
    for end in ends:
        yield rows[first:end]
        first = end


def cut(src_at: Int64s, dst_at: Int64s, length: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """The same runs, none longer than a step.

    >>> [column.tolist() for column in cut(np.array([0]), np.array([7]), np.array([STEP + 1]))]
    [[0, 16777216], [7, 16777223], [16777216, 1]]
    """
    if int(length.max()) <= STEP:
        return src_at, dst_at, length
    parts = -(-length // STEP)
    skip = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * STEP
    left = np.repeat(length, parts) - skip
    return np.repeat(src_at, parts) + skip, np.repeat(dst_at, parts) + skip, np.minimum(left, STEP)


class Stepwise(Handle):
    """An operation that this process carries out itself, a step at each poll.

    >>> work = Stepwise(iter([True, True]))
    >>> work.poll(), work.poll(), work.poll()
    (False, False, True)
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._waits = False
        self._done = False
        self._failure: AtlasError | None = None

    def poll(self) -> bool:
        """Do one step."""
        if self._failure is not None:
            raise self._failure
        if self._done:
            return True
        try:
            self._waits = not next(self._steps)
        except StopIteration:
            self._done = True
        except AtlasError as failure:
            self._failure = failure
            raise
        except Exception as problem:
            # Steps that have raised look finished when asked again: they are not.
            self._failure = failed(f"{type(problem).__name__}: {problem}")
            raise self._failure from problem
        return self._done

    def wait(self, deadline: float) -> None:
        """Do all steps, without a pause unless somebody else has to act."""
        while not self.poll():
            if time.monotonic() > deadline:
                raise AtlasError(
                    Code.DEADLINE,
                    "A transfer ends before its deadline",
                    got="an operation that is still under way",
                    hint="Allow more time, or retry on another replica",
                )
            if self._waits:
                time.sleep(1e-3)

    def release(self) -> None:
        """Do no further step."""
        if not self._done and self._failure is None:
            self._failure = cancelled()
        self._steps = iter(())
