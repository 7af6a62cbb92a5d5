"""Rows in staging memory: every byte of a run arrives in its object, at its place there."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.routing.binding import Starts
from kvatlas.tier.object_header import HEADER
from kvatlas.tier.row_frames import End, RowFrame
from kvatlas.tier.row_objects import GroupObjects

BEGIN, TO, FAR = 1000, 50_000, 7
"""Where the row begins as a number, where it is staged, and where runs are at the other end."""


class CutRow(NamedTuple):
    """A row in stretches of some objects."""

    objects: GroupObjects
    frame: RowFrame
    whose: list[int]
    """The object of every byte."""
    there: list[int]
    """Where it is staged: behind its object's header, in the row's order."""


@st.composite
def cut_rows(draw: Any) -> CutRow:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    owners = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    names = sorted(set(owners))
    held: list[list[tuple[int, int]]] = [[] for _ in names]
    whose: list[int] = []
    for length, owner in zip(lengths, owners, strict=True):
        held[names.index(owner)].append((len(whose), length))
        whose += [names.index(owner)] * length
    columns = [tuple(np.array(column) for column in zip(*own, strict=True)) for own in held]
    objects = GroupObjects([(start, length) for start, length in columns])
    frame, done = RowFrame(objects), [0] * len(names)
    there = []
    for owner in whose:
        there.append(TO + frame.object(owner).start + HEADER + done[owner])
        done[owner] += 1
    return CutRow(objects, frame, whose, there)


def walked(copy: Copy) -> list[tuple[int, int]]:
    """Every byte of a copy, at either end."""
    columns = (copy.source, copy.destination, copy.length)
    runs = zip(*(np.asarray(column).tolist() for column in columns), strict=True)
    return sorted((src + n, dst + n) for src, dst, length in runs for n in range(length))


ENDS = st.sampled_from(["source", "destination"])


@given(cut_rows(), st.data(), ENDS)
def test_every_byte_of_a_run_is_moved_to_its_object(
    row: CutRow, data: st.DataObject, end: End
) -> None:
    headers = [row.frame.object(n).start for n in range(len(row.objects))]
    assert sorted(set(range(TO, TO + row.frame.nbytes)) - set(row.there)) == sorted(
        TO + start + at for start in headers for at in range(HEADER)
    )
    start = data.draw(st.integers(0, len(row.whose) - 1))
    length = data.draw(st.integers(1, len(row.whose) - start))
    inside, other = np.array([BEGIN + start]), np.array([FAR])
    ends = (inside, other) if end == "source" else (other, inside)
    pairs = [(row.there[start + n], FAR + n) for n in range(length)]
    if end == "destination":
        pairs = [(there, here) for here, there in pairs]
    moved = row.frame.moved(Copy(0, 0, *ends, np.array([length])), end, BEGIN, TO)
    assert walked(moved) == sorted(pairs)


@given(cut_rows(), st.data(), ENDS)
def test_starts_are_moved_where_no_run_leaves_its_object(
    row: CutRow, data: st.DataObject, end: End
) -> None:
    length = data.draw(st.integers(1, len(row.whose)))
    begin = data.draw(st.integers(0, len(row.whose) - length))
    firsts = st.sets(st.integers(0, len(row.whose) - length - begin), min_size=1, max_size=4)
    inside = np.array(sorted(data.draw(firsts)))
    other = np.arange(len(inside)) * 100
    starts = Starts.of(*((inside, other) if end == "source" else (other, inside)))
    framed = row.frame.starts_at(starts, end, begin, length)
    bytes_of = [range(begin + at, begin + at + length) for at in inside.tolist()]
    assert framed.objects == {row.whose[at] for run in bytes_of for at in run}
    whole = [[row.there[at] - TO for at in run] for run in bytes_of]
    in_one_piece = all(run == list(range(run[0], run[0] + length)) for run in whole)
    assert in_one_piece == (framed.starts is not None)
    if framed.starts is None:
        return
    found = framed.starts.ends if end == "source" else framed.starts.ends[::-1]
    pairs = zip(*(column.tolist() for column in found), strict=True)
    want = zip(whole, other.tolist(), strict=True)
    assert sorted(pairs) == sorted((run[0], at) for run, at in want)
    assert framed.starts.step > 0, "in the order of the destination"


def test_starts_in_no_order_are_refused() -> None:
    frame = RowFrame(GroupObjects([(np.array([0]), np.array([8]))]))
    for dst in ([4, 0], [4, 4]):
        starts = Starts.of(np.array([0, 4]), np.array(dst))
        for end in ("source", "destination"):
            with pytest.raises(AtlasError, match="must be ascending") as refusal:
                frame.starts_at(starts, end, 0, 4)
            assert refusal.value.code is Code.CONTRADICTORY
