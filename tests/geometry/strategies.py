"""Placements and buffers to try, interleaved and padded ones among them."""

from __future__ import annotations

from hypothesis import strategies as st

from kvatlas import AtlasError, Placement

AXIS_POOL = "LBHNCxyz"


@st.composite
def nested(draw: st.DrawFn, max_axes: int = 5, max_size: int = 9) -> Placement:
    """Axes in any order, each with room behind it."""
    count = draw(st.integers(0, max_axes))
    item = draw(st.integers(1, 8))
    step, axes, room = item, [], 400
    for name in draw(st.permutations(AXIS_POOL))[:count]:
        size = draw(st.integers(1, max(1, min(max_size, room))))
        room //= size
        step += draw(st.sampled_from([0, 0, 0, 1, item, 5, 64]))
        axes.append((name, size, step))
        step *= size
    axes = draw(st.permutations(axes))
    return Placement(
        tuple(name for name, _, _ in axes),
        tuple(size for _, size, _ in axes),
        tuple(step for _, _, step in axes),
        offset=draw(st.integers(0, 9)),
        item=item,
    )


@st.composite
def raw_maps(draw: st.DrawFn) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], int]:
    """Any sizes and strides, most of them overlapping."""
    count = draw(st.integers(0, 4))
    sizes = tuple(draw(st.integers(1, 4)) for _ in range(count))
    strides = tuple(draw(st.integers(0, 24)) for _ in range(count))
    return tuple(AXIS_POOL[:count]), sizes, strides, draw(st.integers(1, 4))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Nested placements, and interleaved ones that happen to be free of overlap."""
    if draw(st.booleans()):
        return draw(nested())
    axes, sizes, strides, item = draw(raw_maps())
    try:
        return Placement(axes, sizes, strides, draw(st.integers(0, 9)), item)
    except AtlasError:
        return draw(nested())
