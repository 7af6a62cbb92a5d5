"""Pages and fields: every byte has one owner, in every order that can hold the page."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from kvatlas import AtlasError, Code, DType, Field, Layout, Page, Placement, validate
from kvatlas.geometry import FieldAxis, Section, Sharding
from tests.cases import each
from tests.oracle import ORDERS, byte_list, key, walk

U8, BF16 = DType.of("uint8"), DType.of("bf16")


def dense(heads: int, states: int, dim: int, dtype: DType = U8) -> Page:
    cells = (FieldAxis("H", heads, "H"), FieldAxis("N", states, "N"))
    element = FieldAxis("C", dim, "C", dtype.item)
    half = dim * dtype.item
    return Page(
        heads,
        states,
        2 * half,
        (Field("k", dtype, (*cells, element)), Field("v", dtype, (*cells, element), offset=half)),
    )


@each(ORDERS)
def test_fields_follow_their_cells_in_every_order(order: str) -> None:
    page = dense(2, 3, 2)
    sizes = {"L": 2, "B": 2, "H": 2, "N": 3, "C": 4}
    pool, truth = page.place(Layout(order), pages=2, blocks=2), walk(order, sizes)
    owners: dict[int, str] = {}
    for name, first in (("k", 0), ("v", 2)):
        view = page.view(pool, name)
        for page_index, b, h, n, c in product(range(2), range(2), range(2), range(3), range(2)):
            address = view(L=page_index, B=b, H=h, N=n, C=c)
            assert address == truth[key({"L": page_index, "B": b, "H": h, "N": n, "C": first + c})]
            assert address not in owners
            owners[address] = name
    assert len(owners) == pool.nbytes


@each(ORDERS)
def test_an_element_is_never_split(order: str) -> None:
    page = dense(2, 3, 2, BF16)
    pool = page.place(Layout(order), pages=2, blocks=2)
    if Layout(order).cell_contiguous:
        taken = byte_list(page.view(pool, "k")) + byte_list(page.view(pool, "v"))
        assert sorted(taken) == list(range(pool.nbytes))
    else:
        with pytest.raises(AtlasError) as refusal:
            page.view(pool, "k")
        assert refusal.value.code is Code.SPLIT_ELEMENT


@each(ORDERS)
def test_padding_lies_behind_each_page_or_is_refused(order: str) -> None:
    page = dense(2, 3, 2).padded(32)
    if Layout(order).page_contiguous:
        pool = page.place(Layout(order), pages=2, blocks=3)
        starts = {pool.select("L", i).select("B", b).offset for i in range(2) for b in range(3)}
        assert starts == set(range(0, 6 * 32, 32))
        assert all(pool(L=i, B=b, H=1, N=2, C=3) % 32 < 24 for i in range(2) for b in range(3))
    else:
        with pytest.raises(AtlasError) as refusal:
            page.place(Layout(order), pages=2, blocks=3)
        assert refusal.value.code is Code.PADDING_INSIDE_PAGE


@each(["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_padding_can_be_named_and_then_nothing_is_left_over(order: str) -> None:
    page = dense(2, 3, 2).padded(32)
    pool = page.place(Layout(order), pages=2, blocks=3)
    gaps = page.gaps(pool)
    assert gaps is not None
    validate({"cells": pool}, size=6 * 32, padding={"padding": gaps}, align=32)
    assert not set(byte_list(pool)) & set(byte_list(gaps))
    assert dense(2, 3, 2).gaps(pool) is None


def test_padding_a_page_is_making_it_with_that_padding() -> None:
    page = dense(2, 3, 2)
    made = Page(page.heads, page.states, page.content, page.fields, padding=8)
    for padded in (page.padded(32), page.padded(40).padded(32), made.padded(32)):
        assert padded == made
        assert hash(padded) == hash(made)
        assert padded.padded(page.nbytes) == page
    assert page.padding == 0


def test_axes_of_size_one_do_not_break_a_padded_page() -> None:
    page = dense(1, 3, 2).padded(16)
    assert page.place(Layout("BHLNC"), pages=2, blocks=3).stride("L") == 16


@each(ORDERS)
def test_a_flat_field_needs_its_cells_in_a_row(order: str) -> None:
    """K transposed over the states of a head: fine where N is right outside C, else refused."""
    states, dim = 3, 2
    k = (
        FieldAxis("H", 2, "H"),
        FieldAxis("N", states, "C", 1),
        FieldAxis("C", dim, "C", states),
    )
    v = (FieldAxis("H", 2, "H"), FieldAxis("N", states, "C", dim), FieldAxis("C", dim, "C", 1))
    page = Page(2, states, 2 * dim, (Field("k", U8, k), Field("v", U8, v, offset=states * dim)))
    pool = page.place(Layout(order), pages=2, blocks=2)
    if "NC" in order:
        truth = walk(order, {"L": 2, "B": 2, "H": 2, "N": states, "C": 2 * dim})
        view = page.view(pool, "k")
        for n, d in product(range(states), range(dim)):
            cell, byte = divmod(d * states + n, 2 * dim)
            at = {"L": 1, "B": 1, "H": 1, "N": cell, "C": byte}
            assert view(L=1, B=1, H=1, N=n, C=d) == truth[key(at)]
    else:
        with pytest.raises(AtlasError) as refusal:
            page.view(pool, "k")
        assert refusal.value.code is Code.NOT_CONTIGUOUS


@each(
    [
        ([("a", 0, 4), ("b", 3, 4)], Code.OVERLAP),
        ([("a", 0, 4), ("b", 5, 3)], Code.HOLE),
        ([("a", 0, 4), ("b", 4, 5)], Code.OUT_OF_BOUNDS),
        ([("a", 0, 4), ("a", 4, 4)], Code.BAD_FIELD),
    ],
)
def test_a_page_whose_fields_do_not_tile_it_cannot_be_made(
    fields: list[tuple[str, int, int]], code: Code
) -> None:
    made = tuple(
        Field(name, U8, (FieldAxis("C", size, "C"),), offset=offset)
        for name, offset, size in fields
    )
    with pytest.raises(AtlasError) as refusal:
        Page(1, 1, 8, made)
    assert refusal.value.code is code


def test_a_hole_that_is_named_is_padding() -> None:
    a = Field("a", U8, (FieldAxis("C", 5, "C"),))
    pad = Field("pad", U8, (FieldAxis("C", 3, "C"),), offset=5)
    page = Page(1, 1, 8, (a, pad))
    assert [field.padding for field in page.fields] == [False, True]


def test_shardings_deal_every_row_to_as_many_ranks_as_replicas_say() -> None:
    shardings = [
        Sharding.by_heads(8),
        Sharding.by_heads(2),
        Sharding.by_sections("R", Section(4, 3), Section(4, 3), Section(8, 2)),
        Sharding.by_sections(
            "R", Section(8, 2), Section(1, 5, shared=True), Section(1, 5, shared=True)
        ),
        Sharding.by_sections("R", Section(8, 2), Section(2, 5, shared=True)),
    ]
    for sharding, tp in product(shardings, (1, 2, 4, 8)):
        total = sum(section.units * section.rows for section in sharding.sections)
        held = [0] * total
        try:
            pieces = [sharding.ranges(tp, rank) for rank in range(tp)]
        except AtlasError as refusal:
            assert refusal.code is Code.TP_HEADS
            assert any(not section.shared and section.units % tp for section in sharding.sections)
            continue
        for mine in pieces:
            local = 0
            for piece in mine:
                assert piece.local == local
                local += piece.length
                for row in range(piece.start, piece.start + piece.length):
                    held[row] += 1
            assert local == sharding.size(tp)
        assert min(held) >= 1
        assert all(count % sharding.replicas(tp) == 0 for count in held)
        expected = [
            1 if section.units % tp == 0 else tp // section.units
            for section in sharding.sections
            for _ in range(section.units * section.rows)
        ]
        assert held == expected


def test_a_section_is_never_cut_across_its_units() -> None:
    """Rank r's rows of each section are whole units, so q, k and v of a head stay together."""
    sharding = Sharding.by_sections("R", Section(4, 3), Section(4, 3), Section(8, 2))
    for rank in range(4):
        starts = [(piece.start, piece.length) for piece in sharding.ranges(4, rank)]
        assert starts == [(3 * rank, 3), (12 + 3 * rank, 3), (24 + 4 * rank, 4)]


def test_whole_fields_live_on_one_rank() -> None:
    assert Sharding.whole().ranges(1, 0) == ()
    with pytest.raises(AtlasError) as refusal:
        Sharding.whole().ranges(2, 0)
    assert refusal.value.code is Code.TP_WHOLE


@pytest.mark.parametrize("fields", [None, 7, "k", [None]])
def test_what_is_no_field_is_refused(fields: Any) -> None:
    with pytest.raises(AtlasError) as refusal:
        Page(1, 1, 8, fields)
    assert refusal.value.code is Code.BAD_FIELD


@pytest.mark.parametrize("axes", [None, 7, [3], {"B": 4}, [(["B"], 4)]])
def test_what_are_no_axes_is_refused(axes: Any) -> None:
    with pytest.raises(AtlasError) as refusal:
        Placement.packed(axes)
    assert refusal.value.code is Code.BAD_AXES


@pytest.mark.parametrize("strides", [7, "B", [("B", 64)]])
def test_what_are_no_strides_is_refused(strides: Any) -> None:
    with pytest.raises(AtlasError) as refusal:
        Placement.packed([("B", 4)], strides=strides)
    assert refusal.value.code is Code.BAD_AXES
