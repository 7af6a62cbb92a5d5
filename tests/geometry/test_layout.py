"""Layouts against a buffer written from its first byte to its last."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from kvatlas import AtlasError, Code, Layout
from kvatlas.geometry import ENGINE_LAYOUTS
from tests.cases import each
from tests.oracle import ORDERS, coordinates, key, maximal_runs, walk

SIZES: dict[str, Any] = {"L": 2, "B": 3, "H": 2, "N": 4, "C": 3}


@each(ORDERS)
def test_place_puts_every_byte_where_the_order_says(order: str) -> None:
    placement, truth = Layout(order).place(**SIZES), walk(order, SIZES)
    assert placement.axes == tuple("LBHNC")
    assert all(placement(**c) == truth[key(c)] for c in coordinates(SIZES))


def one_stretch(order: str, **fixed: int) -> bool:
    truth = walk(order, SIZES)
    taken = [truth[key(c)] for c in coordinates(SIZES) if fixed.items() <= c.items()]
    return len(maximal_runs(taken)) == 1


@each(ORDERS)
def test_questions_mean_what_memory_shows(order: str) -> None:
    layout = Layout(order)
    assert layout.block_outermost == one_stretch(order, B=1)
    assert layout.layer_compact == one_stretch(order, L=1)
    assert layout.page_contiguous == one_stretch(order, L=1, B=1)
    assert layout.cell_contiguous == one_stretch(order, L=1, B=1, H=1, N=1)
    assert layout.heads_outside_pages == (order.index("H") < order.index("L"))
    for outer, inner in permutations("LBHNC", 2):
        assert layout.outside(outer, inner) == (order.index(outer) < order.index(inner))


@each(ORDERS)
def test_fixed_strides_leave_the_inside_alone(order: str) -> None:
    layout = Layout(order)
    outermost = order[0]
    packed = layout.place(**SIZES)
    wide = layout.place(**SIZES, strides={outermost: 1000}, offset=7)
    for c in coordinates(SIZES):
        moved = 7 + c[outermost] * (1000 - packed.stride(outermost))
        assert wide(**c) == packed(**c) + moved


def test_the_six_engine_orders_and_the_old_names() -> None:
    assert [str(layout) for layout in ENGINE_LAYOUTS] == [
        "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC",
    ]  # fmt: skip
    assert Layout("NHD") == Layout("LBNHC") == Layout("lbnhc")
    assert Layout("HND").alias == "HND"
    assert Layout("BHLNC").alias is None


@each(["", "LBNH", "LBNHCC", "LBNHX", "LLBNH", "nope", 5, None])
def test_an_order_with_a_letter_missing_or_twice_is_refused(order: object) -> None:
    with pytest.raises(AtlasError) as refusal:
        Layout(order)  # type: ignore[arg-type]
    assert refusal.value.code is Code.BAD_ORDER


def test_gpt_oss_20b_known_buffers() -> None:
    """Block-outermost over 12 pages, and head-major at tp 2, as engines reported them."""
    whole = Layout("BLHNC").place(L=12, B=136756, H=8, N=16, C=256)
    assert (whole.stride("B"), whole.stride("L")) == (393216, 32768)
    shard = Layout("BHLNC").place(L=12, B=66511, H=4, N=16, C=256)
    assert [shard.stride(axis) for axis in "BHL"] == [196608, 49152, 4096]
