"""The validator's verdict against counting every byte."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import AtlasError, Code, Layout, Placement, validate
from tests.cases import each
from tests.geometry.strategies import placements
from tests.oracle import byte_list, maximal_runs


@given(st.lists(placements(), min_size=1, max_size=4), st.integers(1, 300))
def test_verdict_equals_counting_bytes(parts: list[Placement], size: int) -> None:
    named = {f"part {i}": part for i, part in enumerate(parts)}
    counts = Counter(byte for part in parts for byte in byte_list(part))
    if max(counts) >= size:
        expected = Code.OUT_OF_BOUNDS
    elif max(counts.values()) > 1:
        expected = Code.OVERLAP
    elif len(counts) < size:
        expected = Code.HOLE
    else:
        expected = None
    try:
        validate(named, size=size)
    except AtlasError as refusal:
        assert refusal.code is expected
    else:
        assert expected is None


@given(placements(), st.data())
def test_whatever_is_left_over_can_be_named_padding(part: Placement, data: st.DataObject) -> None:
    size = part.stop + data.draw(st.integers(0, 5))
    taken = set(byte_list(part))
    gaps = {
        f"pad {start}": Placement((), (), (), offset=start, item=length)
        for start, length in maximal_runs(byte for byte in range(size) if byte not in taken)
    }
    validate({"part": part}, size=size, padding=gaps)
    if gaps:
        missing = dict(list(gaps.items())[1:])
        with pytest.raises(AtlasError) as refusal:
            validate({"part": part}, size=size, padding=missing)
        assert refusal.value.code is Code.HOLE


@each(["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_a_pool_of_a_million_pages_is_checked_by_its_axes(order: str) -> None:
    """64 pages x 20,000 blocks as 64 parts: enumerating the pages would take seconds."""
    pool = Layout(order).place(L=64, B=20_000, H=8, N=16, C=512)
    pages = {f"layer {i}": pool.select("L", i) for i in range(64)}
    validate(pages, size=pool.nbytes, align=512)
    moved = {**pages, "layer 7": pages["layer 7"].shift(1)}
    with pytest.raises(AtlasError) as refusal:
        validate(moved, size=pool.nbytes + 1)
    assert refusal.value.code is Code.OVERLAP
    assert "layer 7" in str(refusal.value)


def test_overlaid_groups_are_each_valid_over_the_same_bytes() -> None:
    attention = Layout("BLHNC").place(L=2, B=4, H=2, N=8, C=32)
    recurrent = Layout("BLHNC").place(L=2, B=4, H=1, N=1, C=500, strides={"L": 512, "B": 1024})
    gap = Placement.packed([("B", 4), ("L", 2)], item=12, strides={"B": 1024, "L": 512}, offset=500)
    validate({"attention": attention}, size=4096, align=512)
    validate({"recurrent": recurrent}, size=4096, padding={"pad": gap}, align=512)


def test_pages_of_unlike_shape_in_one_block() -> None:
    block = 3 * 96 + 2 * 160
    small = Layout("BLHNC").place(L=3, B=5, H=1, N=3, C=32, strides={"B": block})
    large = Layout("BLHNC").place(L=2, B=5, H=2, N=5, C=16, strides={"B": block}, offset=288)
    validate({"small": small, "large": large}, size=5 * block)


def test_alignment_holds_for_starts_slots_and_blocks() -> None:
    rows = Placement.packed([("B", 4)], item=100)
    with pytest.raises(AtlasError) as refusal:
        validate({"rows": rows}, size=400, align=64)
    assert refusal.value.code is Code.MISALIGNED
    with pytest.raises(AtlasError) as refusal:
        validate({"rows": Placement((), (), (), offset=4, item=4)}, size=8, align=8)
    assert refusal.value.code is Code.MISALIGNED


def test_the_first_hole_is_named() -> None:
    with pytest.raises(AtlasError, match="16 undeclared bytes of 48, the first at byte 16"):
        validate({"rows": Placement.packed([("B", 2)], item=16, strides={"B": 32})}, size=48)


def test_padding_may_not_take_a_parts_name() -> None:
    part = Placement((), (), (), item=4)
    with pytest.raises(AtlasError) as refusal:
        validate({"a": part}, size=8, padding={"a": part.shift(4)})
    assert refusal.value.code is Code.OVERLAP
