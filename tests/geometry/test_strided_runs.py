"""Strided runs and spans of states against brute force: every byte, every state, one by one."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import Layout, Placement
from kvatlas.geometry import StateBlocks, StateSpans, StridedRuns, merge_runs
from kvatlas.geometry.address_arrays import join_copies
from kvatlas.geometry.strided_runs import fold_states

SIZES: dict[str, Any] = {"L": 2, "B": 3, "H": 2, "N": 4, "C": 6}


def spread(runs: StridedRuns, states: int) -> dict[int, int]:
    """Source byte by destination byte, for all blocks and states, without any folding."""
    sources: dict[int, int] = {}
    for block, state in product(range(SIZES["B"]), range(states)):
        for src, dst in zip(
            runs.item_offsets(0).tolist(), runs.item_offsets(1).tolist(), strict=True
        ):
            for byte in range(runs.item):
                start = [
                    runs.block_strides[end] * block + runs.state_strides[end] * state + row + byte
                    for end, row in ((0, src), (1, dst))
                ]
                assert start[1] not in sources
                sources[start[1]] = start[0]
    return sources


def expected(src: Placement, dst: Placement) -> dict[int, int]:
    """The same map, from calling both placements at every coordinate."""
    sources = {}
    for values in product(*(range(size) for size in src.sizes)):
        place = dict(zip(src.axes, values, strict=True))
        for byte in range(src.item):
            sources[dst(**place) + byte] = src(**place) + byte
    return sources


orders = st.permutations("LBHNC").map("".join)


@given(orders, orders, st.integers(0, 3), st.integers(1, 3))
def test_merged_and_folded_runs_carry_the_same_bytes(
    one: str, two: str, first: int, many: int
) -> None:
    """Pieces of the content, layer by layer, come to the same map however they are joined."""
    ends = [Layout(order).place(**SIZES) for order in (one, two)]
    narrowed = [end.narrow("C", first, many) for end in ends]
    pieces = [
        StridedRuns.between(*(end.narrow("C", byte, 1).select("L", layer) for end in narrowed))
        for layer in range(SIZES["L"])
        for byte in range(many)
    ]
    whole: dict[int, int] = {}
    for layer in range(SIZES["L"]):
        whole |= expected(*(end.select("L", layer) for end in narrowed))
    joined = merge_runs(pieces)
    assert len(joined) <= len(pieces)
    together: dict[int, int] = {}
    for runs in joined:
        part = spread(runs, SIZES["N"])
        assert not part.keys() & together.keys()
        together |= part
    assert together == whole
    together = {}
    for runs in fold_states(joined, SIZES["N"]):
        assert runs.state_strides == (0, 0)
        together |= spread(runs, 1)
    assert together == whole


def test_k_and_v_of_all_layers_become_one_run() -> None:
    """A block-outermost pool: one family, as long as a block."""
    pool = Layout("BLHNC").place(**SIZES)
    pieces = [
        StridedRuns.between(*[pool.select("L", layer).narrow("C", first, 3)] * 2)
        for layer in range(SIZES["L"])
        for first in (0, 3)
    ]
    (runs,) = fold_states(merge_runs(pieces), SIZES["N"])
    assert (runs.item, runs.sizes) == (2 * 2 * 4 * 6, ())


state_blocks = st.builds(
    lambda states, split, every, residue: StateBlocks(states, split, every, residue % every),
    st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3),
)  # fmt: skip


def place_of(state: int, end: StateBlocks) -> tuple[int, int, int] | None:
    """Where one state of a request is kept, if at all: entry, kernel block, state."""
    if state % end.every != end.residue:
        return None
    local = state // end.every
    return (
        local // (end.states * end.split),
        local // end.states % end.split,
        local % end.states,
    )


@given(st.integers(0, 40), st.integers(0, 40), state_blocks, state_blocks)
def test_spans_name_every_common_state_once(
    first: int, many: int, src: StateBlocks, dst: StateBlocks
) -> None:
    spans = StateSpans.between(first, first + many, src, dst)
    named = []
    for index, length in enumerate(spans.length.tolist()):
        assert length >= 1
        for nth in range(length):
            ends = []
            for starts, end in ((spans.source, src), (spans.destination, dst)):
                entry, kernel, state = (int(part[index]) for part in starts)
                assert state + length <= end.states
                ends.append((entry, kernel, state + nth))
            named.append(tuple(ends))
    states = range(first, first + many)
    wanted = [
        (place_of(s, src), place_of(s, dst))
        for s in states
        if place_of(s, src) and place_of(s, dst)
    ]
    assert sorted(named) == sorted(wanted)
    assert len(set(named)) == len(named)
    if src.every == dst.every == 1:
        # As long as can be: the next span starts a kernel block at one end or the other.
        for index in range(1, len(spans.length)):
            assert 0 in (spans.source.state[index], spans.destination.state[index])


@given(state_blocks, state_blocks)
def test_ends_meet_where_a_state_is_kept_by_both(src: StateBlocks, dst: StateBlocks) -> None:
    shared = any(place_of(state, src) and place_of(state, dst) for state in range(12))
    assert src.overlaps(dst) == shared


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
    joined = join_copies(*arrays)
    before, after = (
        {int(d) + i: int(s) + i for s, d, n in zip(*parts, strict=True) for i in range(n)}
        for parts in (arrays, joined)
    )
    assert before == after
    starts = [d for d in after if after.get(d - 1) != after[d] - 1 or d - 1 not in after]
    assert len(joined[0]) == len(starts)
