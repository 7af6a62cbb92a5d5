"""Offsets as nested steps: written out they are the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.geometry import NestedSteps

step = st.tuples(st.integers(1, 4), st.integers(-50, 50), st.integers(-50, 50))


@given(st.lists(step, max_size=4), st.lists(st.integers(0, 9), max_size=4))
def test_offsets_are_the_sums_of_their_steps(
    steps: list[tuple[int, int, int]], further: list[int]
) -> None:
    src = dst = np.zeros(1, np.int64)
    for count, by_source, by_destination in steps:
        src = (src[:, None] + np.arange(count) * by_source).reshape(-1)
        dst = (dst[:, None] + np.arange(count) * by_destination).reshape(-1)
    src, dst = np.append(src, further).astype(np.int64), np.append(dst, further).astype(np.int64)
    nested = NestedSteps.of(src, dst)
    assert all(one.times > 1 for one in nested.steps)
    for written, given_ in zip(nested.written_out(nested.steps), (src, dst), strict=True):
        assert written.tolist() == given_.tolist()


def test_an_arrays_elements_have_one_first() -> None:
    at = np.arange(2 * 3 * 5).reshape(2, 3, 5)
    dst = (at * 8).transpose(0, 2, 1).reshape(-1)
    nested = NestedSteps.of(at.transpose(0, 2, 1).reshape(-1), dst)
    assert len(nested.source) == 1
    assert sorted(one.times for one in nested.steps) == [2, 3, 5]
