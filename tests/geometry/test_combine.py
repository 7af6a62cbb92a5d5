"""Stacking and appending, by their post-condition over all coordinates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import AtlasError, Placement
from kvatlas.geometry import append, stack
from tests.geometry.strategies import nested
from tests.oracle import items


@given(nested(), st.integers(1, 4000))
def test_stack_holds_both(p: Placement, by: int) -> None:
    q = p.shift(by)
    try:
        both = stack(p, q, axis="kv", behind="B")
    except AtlasError:
        # Refused only where the two share a byte.
        mine = {a + i for _, a in items(p) for i in range(p.item)}
        assert mine & {byte + by for byte in mine}
        return
    for c, address in items(p):
        assert both(**c, kv=0) == address
        assert both(**c, kv=1) == address + by
    assert both.count == 2 * p.count


@given(nested(), st.data())
def test_append_undoes_narrow(p: Placement, data: st.DataObject) -> None:
    wide = [axis for axis in p.axes if p.size(axis) > 1]
    if not wide:
        return
    axis = data.draw(st.sampled_from(wide))
    at = data.draw(st.integers(1, p.size(axis) - 1))
    first, second = p.narrow(axis, 0, at), p.narrow(axis, at, p.size(axis) - at)
    if at == 1 and p.stride(axis) != p.item:
        # One coordinate has forgotten its step; only a gapless one can be told.
        with pytest.raises(AtlasError):
            append(first, second, axis=axis)
        return
    assert append(first, second, axis=axis) == p


def test_unlike_placements_are_refused() -> None:
    p = Placement.packed([("B", 4), ("C", 8)], strides={"B": 64})
    for q in (p, p.narrow("B", 0, 2).shift(8), p.rename(B="L").shift(8)):
        with pytest.raises(AtlasError):
            stack(p, q, axis="kv", behind="B")
    for q in (p.shift(16), p.narrow("B", 0, 2).shift(8)):
        with pytest.raises(AtlasError):
            append(p, q, axis="C")
