"""Rows in staging memory: every byte of a run arrives in its object, at its place there."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.routing import Copy, Starts
from kvatlas.tier.object_header import HEADER
from kvatlas.tier.row_frames import End, RowFrame
from kvatlas.tier.row_objects import GroupObjects

BEGIN, TO, FAR = 1000, 50_000, 7
"""Where the row begins as a number, where it is staged, and where runs are at the other end."""


@st.composite
def cuts(draw: Any) -> tuple[GroupObjects, list[int]]:
    """A row in stretches of some objects, and the object of every byte."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    owners = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    names = sorted(set(owners))
    held: list[list[tuple[int, int]]] = [[] for _ in names]
    whose: list[int] = []
    for length, owner in zip(lengths, owners, strict=True):
        held[names.index(owner)].append((len(whose), length))
        whose += [names.index(owner)] * length
    columns = [tuple(np.array(column) for column in zip(*own, strict=True)) for own in held]
    return GroupObjects([(start, length) for start, length in columns]), whose


def places(frame: RowFrame, whose: list[int]) -> list[int]:
    """Where every byte of a row is staged: behind its object's header, in the row's order."""
    done: dict[int, int] = {}
    found = []
    for owner in whose:
        found.append(TO + frame.object(owner).start + HEADER + done.get(owner, 0))
        done[owner] = done.get(owner, 0) + 1
    return found


def walked(copy: Copy) -> list[tuple[int, int]]:
    """Every byte of a copy, at either end."""
    columns = (copy.src, copy.dst, copy.length)
    runs = zip(*(np.asarray(column).tolist() for column in columns), strict=True)
    return sorted((src + n, dst + n) for src, dst, length in runs for n in range(length))


@given(cuts(), st.data(), st.sampled_from(["src", "dst"]))
def test_every_byte_of_a_run_is_moved_to_its_object(
    cut: tuple[GroupObjects, list[int]], data: st.DataObject, end: End
) -> None:
    objects, whose = cut
    frame = RowFrame(objects)
    there = places(frame, whose)
    assert sorted(set(range(TO, TO + frame.nbytes)) - set(there)) == sorted(
        TO + frame.object(n).start + at for n in range(len(objects)) for at in range(HEADER)
    )
    start = data.draw(st.integers(0, len(whose) - 1))
    length = data.draw(st.integers(1, len(whose) - start))
    row, other = np.array([BEGIN + start]), np.array([FAR])
    ends = (row, other) if end == "src" else (other, row)
    moved = frame.moved(Copy(0, 0, *ends, np.array([length])), end, BEGIN, TO)
    pairs = [(there[start + n], FAR + n) for n in range(length)]
    assert walked(moved) == sorted(pairs if end == "src" else [(b, a) for a, b in pairs])


@given(cuts(), st.data(), st.sampled_from(["src", "dst"]))
def test_starts_are_moved_where_no_run_leaves_its_object(
    cut: tuple[GroupObjects, list[int]], data: st.DataObject, end: End
) -> None:
    objects, whose = cut
    frame = RowFrame(objects)
    there = places(frame, whose)
    length = data.draw(st.integers(1, len(whose)))
    begin = data.draw(st.integers(0, len(whose) - length))
    firsts = st.sets(st.integers(0, len(whose) - length - begin), min_size=1, max_size=4)
    row = np.array(sorted(data.draw(firsts)))
    other = np.arange(len(row)) * 100
    starts = Starts.of(*((row, other) if end == "src" else (other, row)))
    framed = frame.starts_at(starts, end, begin, length)
    bytes_of = [range(begin + at, begin + at + length) for at in row.tolist()]
    assert framed.objects == {whose[at] for run in bytes_of for at in run}
    whole = [[there[at] - TO for at in run] for run in bytes_of]
    if framed.starts is None:
        assert any(run != list(range(run[0], run[0] + length)) for run in whole)
    else:
        found = framed.starts.src if end == "src" else framed.starts.dst
        assert [list(range(at, at + length)) for at in found.tolist()] == whole
