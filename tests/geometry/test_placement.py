"""Every operator by its post-condition over all coordinates.

All 120 orders at small sizes; hypothesis at larger ones, with padded and
interleaved strides.
"""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvatlas import AtlasError, Code, Layout, Placement
from kvatlas.geometry import fold_together
from kvatlas.geometry.combine import fold_beside
from tests.cases import each
from tests.geometry.strategies import nested, placements, raw_maps
from tests.oracle import (
    ORDERS,
    byte_list,
    coordinates,
    items,
    key,
    maximal_runs,
    sizes_of,
    walk,
)

SIZES: dict[str, Any] = {"L": 2, "B": 3, "H": 2, "N": 4, "C": 2}


Truth = dict[tuple[int, ...], int]
ALL_ORDERS: list[tuple[Placement, Truth]] = [
    (
        Layout(order).place(**SIZES, offset=5),
        {place: address + 5 for place, address in walk(order, SIZES).items()},
    )
    for order in ORDERS
]
"""Placements in all 120 orders, and where brute force finds every coordinate."""
PLACED = [placed for placed, _ in ALL_ORDERS]


def folds(p: Placement, outer: str, inner: str) -> bool:
    return p.stride(outer) == p.size(inner) * p.stride(inner)


class TestAllOrders:
    @each(ALL_ORDERS)
    def test_narrow(self, placed: Placement, truth: Truth) -> None:
        for axis, size in SIZES.items():
            for start in range(size):
                for length in range(1, size - start + 1):
                    part = placed.narrow(axis, start, length)
                    assert part.size(axis) == length
                    for c, address in items(part):
                        assert address == truth[key({**c, axis: c[axis] + start})]

    @each(ALL_ORDERS)
    def test_select(self, placed: Placement, truth: Truth) -> None:
        for axis, size in SIZES.items():
            for index in range(size):
                part = placed.select(axis, index)
                assert axis not in part.axes
                assert part.count == placed.count // size
                for c, address in items(part):
                    assert address == truth[key({**c, axis: index})]

    @each(ALL_ORDERS)
    def test_split(self, placed: Placement, truth: Truth) -> None:
        for inner in (1, 2, 4):
            part = placed.split("N", into=("k", "n"), inner=inner)
            assert (part.size("k"), part.size("n")) == (4 // inner, inner)
            for c, address in items(part):
                whole = {**{a: c[a] for a in "LBHC"}, "N": c["k"] * inner + c["n"]}
                assert address == truth[key(whole)]

    @each(ALL_ORDERS)
    def test_fold(self, placed: Placement, truth: Truth) -> None:
        for outer, inner in permutations("LBHNC", 2):
            steps = {
                truth[key({**c, outer: c[outer] + 1, inner: 0})]
                - truth[key({**c, inner: SIZES[inner] - 1})]
                for c in coordinates(SIZES)
                if c[outer] + 1 < SIZES[outer] and c[inner] == 0
            }
            step = truth[key({**dict.fromkeys("LBHNC", 0), inner: 1})] - truth[(0, 0, 0, 0, 0)]
            if steps == {step}:
                part = placed.fold(outer, inner, into="f")
                assert part.size("f") == SIZES[outer] * SIZES[inner]
                for c, address in items(part):
                    rest = {a: i for a, i in c.items() if a != "f"}
                    pair = {outer: c["f"] // SIZES[inner], inner: c["f"] % SIZES[inner]}
                    assert address == truth[key({**rest, **pair})]
            else:
                with pytest.raises(AtlasError) as refusal:
                    placed.fold(outer, inner)
                assert refusal.value.code is Code.NOT_FOLDABLE

    @each(ALL_ORDERS)
    def test_reorder_and_rename_keep_the_map(self, placed: Placement, truth: Truth) -> None:
        for axes in (("C", "N", "H", "B", "L"), ("B", "L", "N", "C", "H")):
            part = placed.reorder(*axes)
            assert part.axes == axes
            assert all(address == truth[key(c)] for c, address in items(part))
            assert part.reorder(*placed.axes) == placed
        renamed = placed.rename(B="block", N="state")
        for c, address in items(renamed):
            names = {"block": "B", "state": "N"}
            assert address == truth[key({names.get(a, a): i for a, i in c.items()})]

    @each(ALL_ORDERS)
    def test_shift(self, placed: Placement, truth: Truth) -> None:
        assert all(address == truth[key(c)] + 11 for c, address in items(placed.shift(11)))

    @each(PLACED)
    def test_runs_are_the_maximal_stretches(self, placed: Placement) -> None:
        for part in (
            placed,
            placed.select("L", 1),
            placed.narrow("H", 1, 1),
            placed.narrow("N", 1, 2).select("B", 2),
            placed.narrow("B", 0, 2).narrow("C", 0, 1),
        ):
            starts, lengths = part.runs()
            assert list(zip(starts, lengths, strict=True)) == maximal_runs(byte_list(part))

    @each(ALL_ORDERS)
    def test_runs_of_chosen_blocks(self, placed: Placement, truth: Truth) -> None:
        for ids in ([1], [2, 0], [0, 1, 2], [2, 2, 1]):
            starts, lengths = placed.runs(B=ids)
            taken = [truth[key(c)] for c in coordinates(SIZES) if c["B"] in ids]
            assert list(zip(starts, lengths, strict=True)) == maximal_runs(taken)

    @each(PLACED)
    def test_folded_names_the_same_bytes(self, placed: Placement) -> None:
        part = placed.narrow("H", 0, 1)
        folded = part.folded()
        assert sorted(byte_list(folded)) == sorted(byte_list(part))
        assert folded.count == len(maximal_runs(byte_list(part)))

    @each(ALL_ORDERS)
    def test_descriptors_follow_the_axes_named(self, placed: Placement, truth: Truth) -> None:
        for over in ((), ("L",), ("B", "L"), ("L", "B"), ("B", "H", "L"), tuple("LBHNC")):
            rows = placed.descriptors(*over, base=1 << 40, device=3).tolist()
            expected = []
            for c in coordinates({axis: SIZES[axis] for axis in over}):
                taken = [
                    truth[key({**rest, **c})]
                    for rest in coordinates({a: n for a, n in SIZES.items() if a not in over})
                ]
                expected += [[(1 << 40) + s, n, 3] for s, n in maximal_runs(taken)]
            assert rows == expected

    @each(ALL_ORDERS)
    def test_descriptors_of_chosen_blocks(self, placed: Placement, truth: Truth) -> None:
        ids = [2, 0, 2]
        rows = placed.descriptors("L", B=np.array(ids)).tolist()
        expected = []
        for page in range(SIZES["L"]):
            for block in ids:
                taken = [
                    truth[key(c)] for c in coordinates(SIZES) if c["L"] == page and c["B"] == block
                ]
                expected += [[s, n, 0] for s, n in maximal_runs(taken)]
        assert rows == expected

    @each(ALL_ORDERS)
    def test_view_reads_what_the_map_names(self, placed: Placement, truth: Truth) -> None:
        buffer = np.arange(256, dtype=np.uint8)[: placed.stop]
        seen = placed.view(buffer)
        assert np.shares_memory(seen, buffer)
        for c in coordinates(SIZES):
            assert seen[tuple(c.values())][0] == truth[key(c)]

    @each(PLACED)
    def test_from_tensor_finds_the_map_again(self, placed: Placement) -> None:
        buffer = np.zeros(placed.stop, np.uint8)
        seen = placed.view(buffer)[..., 0]
        assert Placement.from_tensor(seen, axes="LBHNC") == placed

    @each(PLACED)
    def test_fold_together_is_the_longest_run_of_a_copy(self, placed: Placement) -> None:
        other = Layout("BLNHC").place(**SIZES, strides={"B": 64})
        src, dst = fold_together(placed, other)
        assert src.axes == dst.axes
        assert src.item == dst.item
        moved = {}
        for (_, a), (_, b) in zip(items(src), items(dst), strict=True):
            moved.update({a + i: b + i for i in range(src.item)})
        assert moved == {placed(**c): other(**c) for c in coordinates(SIZES)}
        for axis in src.axes:
            assert (src.stride(axis), dst.stride(axis)) != (src.item, dst.item)
        for outer, inner in permutations(src.axes, 2):
            assert not (folds(src, outer, inner) and folds(dst, outer, inner))


class TestAnyStrides:
    @given(raw_maps())
    def test_overlap_is_refused_exactly_when_a_byte_is_shared(self, raw: Any) -> None:
        axes, sizes, strides, item = raw
        taken = [
            sum(i * s for i, s in zip(c.values(), strides, strict=True)) + byte
            for c in coordinates(dict(zip(axes, sizes, strict=True)))
            for byte in range(item)
        ]
        try:
            placement = Placement(axes, sizes, strides, item=item)
        except AtlasError as refusal:
            assert refusal.code is Code.OVERLAP
            assert len(set(taken)) < len(taken)
        else:
            assert len(set(taken)) == len(taken)
            assert sorted(byte_list(placement)) == sorted(taken)

    @given(placements())
    def test_runs_and_folding(self, p: Placement) -> None:
        starts, lengths = p.runs()
        truth = maximal_runs(byte_list(p))
        assert list(zip(starts, lengths, strict=True)) == truth
        assert p.contiguous == (len(truth) == 1)
        assert p.nbytes == len(byte_list(p))
        assert p.stop == max(byte_list(p)) + 1
        assert sorted(byte_list(p.folded())) == sorted(byte_list(p))
        assert p.folded() == p.folded().folded()

    @given(placements(), st.data())
    def test_narrow_select_split(self, p: Placement, data: st.DataObject) -> None:
        assume(p.axes)
        axis = data.draw(st.sampled_from(p.axes))
        size = p.size(axis)
        start = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, size - start))
        for c, address in items(p.narrow(axis, start, length)):
            assert address == p(**{**c, axis: c[axis] + start})
        for c, address in items(p.select(axis, start)):
            assert address == p(**c, **{axis: start})
        inner = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        for c, address in items(p.split(axis, into=("outer", "inner"), inner=inner)):
            rest = {a: i for a, i in c.items() if a in p.axes}
            assert address == p(**{**rest, axis: c["outer"] * inner + c["inner"]})

    @given(placements(), st.data())
    def test_equal_means_the_same_map(self, p: Placement, data: st.DataObject) -> None:
        steps = [data.draw(st.sampled_from([s, s, s + 1, s * 2])) for s in p.strides]
        offset = data.draw(st.sampled_from([p.offset, p.offset, p.offset + 1]))
        try:
            q = Placement(p.axes, p.sizes, tuple(steps), offset, p.item)
        except AtlasError:
            return
        assert (p == q) == (items(p) == items(q))
        assert (p != q) or hash(p) == hash(q)

    @given(nested(), st.data())
    def test_descriptors_cover_exactly_once(self, p: Placement, data: st.DataObject) -> None:
        over = data.draw(st.permutations(p.axes))[: data.draw(st.integers(0, len(p.axes)))]
        rows = p.descriptors(*over, base=1000).tolist()
        taken = [a - 1000 + i for a, n, _ in rows for i in range(n)]
        assert sorted(taken) == sorted(byte_list(p))

    @given(nested(), st.data())
    def test_reorder_view_and_from_tensor(self, p: Placement, data: st.DataObject) -> None:
        q = p.reorder(*data.draw(st.permutations(p.axes)))
        assert dict(zip(q.axes, q.strides, strict=True)) == dict(
            zip(p.axes, p.strides, strict=True)
        )
        assert sorted(byte_list(q)) == sorted(byte_list(p))
        buffer = np.arange(q.stop, dtype=np.uint64).view(np.uint8)[: q.stop]
        seen = q.view(buffer)
        assert np.shares_memory(seen, buffer)
        for c, address in items(q):
            assert seen[tuple(c.values())].tolist() == buffer[address : address + q.item].tolist()
        whole = np.zeros(q.stop, np.uint8)
        again = Placement.from_tensor(q.view(whole), axes=(*q.axes, "byte"))
        assert [again(**c, byte=0) for c, _ in items(q)] == [address for _, address in items(q)]

    @given(nested(), st.data())
    def test_fold_is_refused_exactly_when_memory_says_so(
        self, p: Placement, data: st.DataObject
    ) -> None:
        assume(len(p.axes) > 1)
        outer, inner = data.draw(st.permutations(p.axes))[:2]
        walked = [
            p.select(outer, i).select(inner, j).offset
            for i in range(p.size(outer))
            for j in range(p.size(inner))
        ]
        even = len({b - a for a, b in pairwise(walked)}) <= 1
        try:
            q = p.fold(outer, inner, into="f")
        except AtlasError as refusal:
            assert refusal.code is Code.NOT_FOLDABLE
            assert not even
        else:
            assert even
            assert [q.select("f", i).offset for i in range(q.size("f"))] == walked

    @given(nested(), st.data())
    def test_both_ends_of_a_copy_fold_alike(self, p: Placement, data: st.DataObject) -> None:
        order = data.draw(st.permutations(list(zip(p.axes, p.sizes, strict=True))))
        q = Placement.packed(order, item=p.item, offset=data.draw(st.integers(0, 5)))
        a, b = fold_together(p, q)
        moved = {}
        for (_, x), (_, y) in zip(items(a), items(b), strict=True):
            moved.update({x + i: y + i for i in range(a.item)})
        truth = {p(**c) + i: q(**c) + i for c in coordinates(sizes_of(p)) for i in range(p.item)}
        assert moved == truth

    @given(nested(), st.data())
    def test_runs_of_chosen_coordinates(self, p: Placement, data: st.DataObject) -> None:
        assume(p.axes)
        axis = data.draw(st.sampled_from(p.axes))
        ids = data.draw(st.lists(st.integers(0, p.size(axis) - 1), min_size=1, max_size=6))
        starts, lengths = p.runs(**{axis: ids})
        taken = [address + i for c, address in items(p) if c[axis] in ids for i in range(p.item)]
        assert list(zip(starts, lengths, strict=True)) == maximal_runs(taken)

    @given(nested(), st.data())
    def test_calls_take_arrays(self, p: Placement, data: st.DataObject) -> None:
        chosen = {
            axis: np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=3, max_size=3)))
            for axis, n in sizes_of(p).items()
        }
        assume(chosen)
        expected = [p(**{a: int(v[i]) for a, v in chosen.items()}) for i in range(3)]
        assert p(**chosen).tolist() == expected


def test_an_axis_of_size_one_has_one_spelling() -> None:
    a = Placement(("L", "B"), (1, 4), (999, 8), item=8)
    b = Placement(("L", "B"), (1, 4), (32, 8), item=8)
    assert a == b
    assert a(B=3) == a(L=0, B=3) == 24


def test_interleaved_axes_join_across_items() -> None:
    """0, 2, 3, 5: strides 3 and 2 are apart, yet bytes 2 and 3 are one run."""
    p = Placement(("x", "y"), (2, 2), (3, 2))
    assert p.runs()[0].tolist() == [0, 2, 5]
    assert p.runs()[1].tolist() == [1, 2, 1]


def test_tangled_strides_are_refused_rather_than_searched_for_ever() -> None:
    primes = (1000003, 1000033, 1000037, 1000039, 1000081)
    with pytest.raises(AtlasError) as refusal:
        Placement(tuple("abcde"), (997,) * 5, primes)
    assert refusal.value.code is Code.UNDECIDED


@each([((10**12,), (0,)), ((10**12, 10**12), (10, 9)), ((10**9,), (1,))])
def test_huge_axes_are_decided_at_once(sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    with pytest.raises(AtlasError) as refusal:
        Placement(tuple("ab"[: len(sizes)]), sizes, strides, item=8)
    assert refusal.value.code in (Code.OVERLAP, Code.UNDECIDED)


def test_rows_past_the_first_template_are_right_too() -> None:
    """Enough rows that both ways of writing them are used, against one call for each."""
    for sizes, over in (({"L": 3, "B": 40_000}, "LB"), ({"B": 40_000, "L": 3}, "BL")):
        axes = [("L", 3), ("B", 40_000), ("N", 2)]
        pool = Placement.packed(axes, item=8, strides={"B": 24})
        rows = pool.descriptors(*over, base=1 << 40)
        grids = np.meshgrid(*(np.arange(n) for n in sizes.values()), indexing="ij")
        chosen = {axis: grid.ravel() for axis, grid in zip(sizes, grids, strict=True)}
        starts = pool(**chosen, N=np.zeros(120_000, np.int64)) + (1 << 40)
        assert np.array_equal(rows[:, 0].astype(np.int64), starts)
        assert (rows[:, 1] == 16).all()
        assert (rows[:, 2] == 0).all()
    ids = np.random.default_rng(7).permutation(40_000)
    chosen_rows = pool.descriptors("L", B=ids)
    expected = [pool(L=page, B=ids, N=np.zeros(40_000, np.int64)) for page in range(3)]
    assert np.array_equal(chosen_rows[:, 0].astype(np.int64), np.concatenate(expected))


def test_ids_are_one_row_of_whole_numbers() -> None:
    pool = Placement.packed([("L", 2), ("B", 8)], item=8)
    empty = pool.descriptors("L", B=[])
    assert empty.shape == (0, 3)
    assert pool.descriptors(B=np.array([3], np.uint64)).tolist() == pool.descriptors(B=3).tolist()
    for ids in ([[0, 1], [2, 3]], {1, 2}, None, 2**70, ["a"], [[1], [2, 3]], np.array([True])):
        with pytest.raises(AtlasError) as refusal:
            pool.descriptors("L", B=ids)
        assert refusal.value.code is Code.NOT_AN_INTEGER


def test_kept_axes_are_ready_for_block_ids() -> None:
    src = Layout("BLHNC").place(L=3, B=6, H=2, N=4, C=8)
    dst = Layout("LBNHC").place(L=3, B=6, H=2, N=4, C=8)
    a, b = fold_beside(src, dst, axis="B")
    assert a.axes[0] == b.axes[0] == "B"
    moved = {}
    for (_, x), (_, y) in zip(items(a), items(b), strict=True):
        moved.update({x + i: y + i for i in range(a.item)})
    assert moved == {src(**c): dst(**c) for c in coordinates(sizes_of(src))}


class TestTensors:
    def test_torch_and_meta(self) -> None:
        torch = pytest.importorskip("torch")
        for device in ("cpu", "meta"):
            pool = torch.zeros(10, 2, 4, 16, 8, dtype=torch.bfloat16, device=device)
            view = pool.permute(0, 2, 3, 1, 4)[3:, 1:, :, 1]
            p = Placement.from_tensor(view, axes=("B", "H", "N", "C"))
            assert p.sizes == (7, 3, 16, 8)
            assert p(B=1, H=0, N=2, C=3) == pool[4, 1, 1, 2, 3].storage_offset() * 2
            assert p.item == 2

    def test_torch_elements_lie_where_the_map_says(self) -> None:
        torch = pytest.importorskip("torch")
        pool = torch.arange(2 * 3 * 4 * 5, dtype=torch.int16).reshape(2, 3, 4, 5)
        view = pool.transpose(1, 3)[:, ::2]
        p = Placement.from_tensor(view, axes="BHNC")
        raw = pool.reshape(-1)
        for c, address in items(p):
            assert raw[address // 2] == view[tuple(c.values())]

    def test_numpy_views_know_their_offset(self) -> None:
        base = np.zeros((6, 5, 4), np.int16)
        p = Placement.from_tensor(base[2:, 1::2], axes="BNC")
        assert p.offset == (2 * 20 + 4) * 2
        assert p.strides == (40, 16, 2)

    @each(["B", "BHNC", "BBN"])
    def test_axis_names_are_required(self, axes: str) -> None:
        with pytest.raises(AtlasError) as refusal:
            Placement.from_tensor(np.zeros((2, 3, 4)), axes=axes)
        assert refusal.value.code is Code.BAD_AXES

    def test_an_expanded_tensor_is_overlap(self) -> None:
        with pytest.raises(AtlasError) as refusal:
            Placement.from_tensor(np.broadcast_to(np.zeros((1, 4)), (3, 4)), axes="BN")
        assert refusal.value.code is Code.OVERLAP

    def test_other_things_are_not_tensors(self) -> None:
        with pytest.raises(AtlasError) as refusal:
            Placement.from_tensor([[1, 2]], axes="BN")
        assert refusal.value.code is Code.BAD_TENSOR


def test_kernel_blocks_of_a_block() -> None:
    """A block of 64 states as 4 pages of 16, each [H, n, C], is a split of the block axis."""
    small = Layout("LBHNC").place(L=2, B=5 * 4, H=2, N=16, C=8)
    block = small.split("B", into=("B", "k"), inner=4)
    for c in coordinates({"L": 2, "B": 5, "H": 2, "N": 64, "C": 2}):
        at = {**c, "k": c["N"] // 16, "N": c["N"] % 16}
        assert block(**at) == small(**{**c, "B": c["B"] * 4 + c["N"] // 16, "N": c["N"] % 16})
