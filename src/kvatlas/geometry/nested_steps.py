"""Compact form of regular offsets, as sums of nested steps.

Thousands of runs that are spaced like the elements of an array can be copied with one call
that takes the array's shape and strides, instead of a list of thousands of offsets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvatlas.geometry.address_arrays import Int64s, outer_sum


class Steps(NamedTuple):
    """`times` offsets, `src` bytes apart at the source and `dst` bytes apart at the destination.

    >>> NestedSteps.of(np.array([0, 8, 16]), np.array([0, 5, 10])).steps
    (Steps(times=3, src=8, dst=5),)
    """

    times: int
    src: int
    dst: int


class NestedSteps(NamedTuple):
    """Offsets at source and destination: base offsets, each repeated along the nested steps.

    >>> NestedSteps.of(np.array([0, 7, 9]), np.array([0, 1, 2])).src  # irregular: no steps
    array([0, 7, 9])
    """

    src: Int64s
    dst: Int64s
    steps: tuple[Steps, ...]
    """The nested steps, outermost first."""

    @classmethod
    def of(cls, src: Int64s, dst: Int64s) -> NestedSteps:
        """Return the offsets of a copy as nested steps with as few base offsets as possible.

        The order of the offsets does not change.

        >>> src, dst = np.array([0, 1, 2, 8, 9, 10]), np.array([0, 4, 8, 100, 104, 108])
        >>> NestedSteps.of(src, dst)  # doctest: +NORMALIZE_WHITESPACE
        NestedSteps(src=array([0]), dst=array([0]),
                    steps=(Steps(times=2, src=8, dst=100), Steps(times=3, src=1, dst=4)))
        """
        steps: list[Steps] = []
        while (found := _innermost(src, dst)) is not None:
            steps.append(found)
            src, dst = src[:: found.times], dst[:: found.times]
        return cls(src, dst, tuple(reversed(steps)))

    def written_out(self, steps: tuple[Steps, ...]) -> tuple[Int64s, Int64s]:
        """Return (source offsets, destination offsets): base offsets, each repeated along `steps`.

        >>> nested = NestedSteps.of(np.array([0, 8, 16]), np.array([0, 5, 10]))
        >>> nested.written_out(nested.steps)
        (array([ 0,  8, 16]), array([ 0,  5, 10]))
        """
        src = outer_sum([self.src, *(np.arange(one.times) * one.src for one in steps)])
        dst = outer_sum([self.dst, *(np.arange(one.times) * one.dst for one in steps)])
        return src, dst


def _innermost(src: Int64s, dst: Int64s) -> Steps | None:
    """Return the innermost steps that repeat throughout all offsets; None if there are none."""
    if len(src) < 2:
        return None
    by_src, by_dst = np.diff(src), np.diff(dst)
    step = Steps(0, int(by_src[0]), int(by_dst[0]))
    alike = (by_src == step.src) & (by_dst == step.dst)
    count = len(src) if alike.all() else int(alike.argmin()) + 1
    if count < 2 or len(src) % count:
        return None
    # The jump from the end of one series of steps to the start of the next may be anything.
    inside = np.append(alike, True).reshape(-1, count)[:, :-1]
    return step._replace(times=count) if inside.all() else None
