"""Strips and stretches against brute force: every byte, every state, one by one."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import Layout, Placement
from kvatlas.geometry.address_arrays import join_pairs
from kvatlas.geometry.state_spans import Cells, meet, stretches
from kvatlas.geometry.strided_runs import Strip, between, closed, merged

SIZES: dict[str, Any] = {"L": 2, "B": 3, "H": 2, "N": 4, "C": 6}


def spread(strip: Strip, states: int) -> dict[int, int]:
    """Source byte by destination byte, for all blocks and states, without any folding."""
    found = {}
    for block, state in product(range(SIZES["B"]), range(states)):
        for src, dst in zip(strip.rows(0).tolist(), strip.rows(1).tolist(), strict=True):
            for byte in range(strip.item):
                start = [
                    strip.block[end] * block + strip.state[end] * state + row + byte
                    for end, row in ((0, src), (1, dst))
                ]
                assert start[1] not in found
                found[start[1]] = start[0]
    return found


def expected(src: Placement, dst: Placement) -> dict[int, int]:
    """The same map, from calling both placements at every coordinate."""
    found = {}
    for values in product(*(range(size) for size in src.sizes)):
        place = dict(zip(src.axes, values, strict=True))
        for byte in range(src.item):
            found[dst(**place) + byte] = src(**place) + byte
    return found


orders = st.permutations("LBHNC").map("".join)


@given(orders, orders, st.integers(0, 3), st.integers(1, 3))
def test_merged_and_closed_strips_carry_the_same_bytes(
    one: str, two: str, first: int, many: int
) -> None:
    """Pieces of the content, layer by layer, come to the same map however they are joined."""
    ends = [Layout(order).place(**SIZES) for order in (one, two)]
    narrowed = [end.narrow("C", first, many) for end in ends]
    pieces = [
        between(*(end.narrow("C", byte, 1).select("L", layer) for end in narrowed))
        for layer in range(SIZES["L"])
        for byte in range(many)
    ]
    whole: dict[int, int] = {}
    for layer in range(SIZES["L"]):
        whole |= expected(*(end.select("L", layer) for end in narrowed))
    joined = merged(pieces)
    assert len(joined) <= len(pieces)
    together: dict[int, int] = {}
    for strip in joined:
        part = spread(strip, SIZES["N"])
        assert not part.keys() & together.keys()
        together |= part
    assert together == whole
    together = {}
    for strip in closed(joined, SIZES["N"]):
        assert strip.state == (0, 0)
        together |= spread(strip, 1)
    assert together == whole


def test_k_and_v_of_all_layers_become_one_run() -> None:
    """A block-outermost pool: one strip, as long as a block."""
    pool = Layout("BLHNC").place(**SIZES)
    pieces = [
        between(*[pool.select("L", layer).narrow("C", first, 3)] * 2)
        for layer in range(SIZES["L"])
        for first in (0, 3)
    ]
    (strip,) = closed(merged(pieces), SIZES["N"])
    assert (strip.item, strip.sizes) == (2 * 2 * 4 * 6, ())


cells = st.builds(
    lambda states, split, every, residue: Cells(states, split, every, residue % every),
    st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3),
)  # fmt: skip


def spot(state: int, end: Cells) -> tuple[int, int, int] | None:
    """Where one state of a request is kept, if at all: entry, kernel block, state."""
    if state % end.every != end.residue:
        return None
    local = state // end.every
    return (
        local // (end.states * end.split),
        local // end.states % end.split,
        local % end.states,
    )


@given(st.integers(0, 40), st.integers(0, 40), cells, cells)
def test_stretches_name_every_common_state_once(
    first: int, many: int, src: Cells, dst: Cells
) -> None:
    found = stretches(first, first + many, src, dst)
    named = []
    for index, length in enumerate(found.length.tolist()):
        assert length >= 1
        for nth in range(length):
            ends = []
            for spots, end in ((found.src, src), (found.dst, dst)):
                entry, kernel, state = (int(part[index]) for part in spots)
                assert state + length <= end.states
                ends.append((entry, kernel, state + nth))
            named.append(tuple(ends))
    states = range(first, first + many)
    wanted = [(spot(s, src), spot(s, dst)) for s in states if spot(s, src) and spot(s, dst)]
    assert sorted(named) == sorted(wanted)
    assert len(set(named)) == len(named)
    if src.every == dst.every == 1:
        # As long as can be: the next stretch starts a cell at one end or the other.
        for index in range(1, len(found.length)):
            assert 0 in (found.src.state[index], found.dst.state[index])


@given(cells, cells)
def test_ends_meet_where_a_state_is_kept_by_both(src: Cells, dst: Cells) -> None:
    shared = any(spot(state, src) and spot(state, dst) for state in range(12))
    assert meet(src, dst) == shared


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=12))
def test_joined_pairs_are_the_fewest(pieces: list[tuple[int, int]]) -> None:
    """Bytes of pieces, copied to neighbouring places in a shuffled order."""
    rng = np.random.default_rng(len(pieces))
    src, dst, length = [], [], []
    place = 0
    for start, many in pieces:
        src.append(start * 4)
        dst.append(place)
        length.append(many)
        place += many + (start % 2)
    order = rng.permutation(len(pieces))
    arrays = [np.array(part, dtype=np.int64)[order] for part in (src, dst, length)]
    joined = join_pairs(*arrays)
    before, after = (
        {int(d) + i: int(s) + i for s, d, n in zip(*parts, strict=True) for i in range(n)}
        for parts in (arrays, joined)
    )
    assert before == after
    starts = [d for d in after if after.get(d - 1) != after[d] - 1 or d - 1 not in after]
    assert len(joined[0]) == len(starts)
