"""A compact form of regularly spaced offsets, like the shape and strides of an array.

If thousands of runs are spaced like the elements of an array, one call with a shape and strides
can copy them. It needs no list of thousands of offsets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvatlas.geometry.address_arrays import Int64s, outer_sum


class Steps(NamedTuple):
    """One axis of a regular grid of offsets. It has `times` offsets at a constant distance.

    Consecutive offsets are `source` bytes apart in the source, and `destination` bytes apart in
    the destination.

    >>> NestedSteps.of(np.array([0, 8, 16]), np.array([0, 5, 10])).steps
    (Steps(times=3, source=8, destination=5),)
    """

    times: int
    source: int
    destination: int


class NestedSteps(NamedTuple):
    """Source and destination offsets of a copy: base offsets, each repeated along all `steps`.

    >>> NestedSteps.of(np.array([0, 7, 9]), np.array([0, 1, 2])).source  # irregular: no steps
    array([0, 7, 9])
    """

    source: Int64s
    destination: Int64s
    steps: tuple[Steps, ...]
    """The nested steps, outermost first."""

    @classmethod
    def of(cls, source: Int64s, destination: Int64s) -> NestedSteps:
        """Return the offsets of a copy as nested steps with as few base offsets as possible.

        The order of the offsets does not change.

        >>> source, destination = np.array([0, 1, 2, 8, 9, 10]), np.array([0, 4, 8, 100, 104, 108])
        >>> NestedSteps.of(source, destination)  # doctest: +NORMALIZE_WHITESPACE
        NestedSteps(source=array([0]), destination=array([0]),
                    steps=(Steps(times=2, source=8, destination=100),
                           Steps(times=3, source=1, destination=4)))
        """
        steps: list[Steps] = []
        while (found := _innermost(source, destination)) is not None:
            steps.append(found)
            source, destination = source[:: found.times], destination[:: found.times]
        return cls(source, destination, tuple(reversed(steps)))

    def written_out(self, steps: tuple[Steps, ...]) -> tuple[Int64s, Int64s]:
        """Return (source offsets, destination offsets): base offsets, each repeated along `steps`.

        >>> nested = NestedSteps.of(np.array([0, 8, 16]), np.array([0, 5, 10]))
        >>> nested.written_out(nested.steps)
        (array([ 0,  8, 16]), array([ 0,  5, 10]))
        """
        source = outer_sum([self.source, *(np.arange(one.times) * one.source for one in steps)])
        destination = outer_sum(
            [self.destination, *(np.arange(one.times) * one.destination for one in steps)]
        )
        return source, destination


def _innermost(source: Int64s, destination: Int64s) -> Steps | None:
    """Divide offsets into series of the same length and spacing; return the steps of one series.

    Returns None if the offsets cannot be divided in this way.
    """
    if len(source) < 2:
        return None
    by_source, by_destination = np.diff(source), np.diff(destination)
    step = Steps(0, int(by_source[0]), int(by_destination[0]))
    alike = (by_source == step.source) & (by_destination == step.destination)
    count = len(source) if alike.all() else int(alike.argmin()) + 1
    if count < 2 or len(source) % count:
        return None
    # The distance from the last offset of one series to the first of the next does not matter.
    inside = np.append(alike, True).reshape(-1, count)[:, :-1]
    return step._replace(times=count) if inside.all() else None
