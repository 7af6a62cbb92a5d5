"""From strips, block tables and tokens to byte ranges: numpy all the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry.arrays import Int64s, join_pairs, refuse_too_many
from kvatlas.geometry.stretches import Spots, Stretches
from kvatlas.geometry.strips import Ends, Strip, closed, merged
from kvatlas.route.compile import Lane


@dataclass(frozen=True, eq=False)
class Copy:
    """Byte ranges of one source pool and where they go in one destination pool.

    Row i is `length[i]` bytes from offset `src[i]` to offset `dst[i]`; rows are in the
    order of their destination, none touches the next at both ends.
    """

    src_pool: int
    dst_pool: int
    src: Int64s
    dst: Int64s
    length: Int64s

    def __len__(self) -> int:
        return len(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return int(self.length.sum())

    def descriptors(
        self, *, src_base: int = 0, dst_base: int = 0, src_device: int = 0, dst_device: int = 0
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """What a transport takes: rows (address, length, device) for either end."""
        return (
            _rows(self.src, self.length, src_base, src_device),
            _rows(self.dst, self.length, dst_base, dst_device),
        )


class Family(NamedTuple):
    """Strips that differ only in where they start."""

    strip: Strip
    rows: tuple[Int64s, Int64s]
    """Where its items lie at either end, by destination, in the first state of block 0."""


class Sheet(NamedTuple):
    """The strips of a lane, ready to be bound: state by state, and for whole cells."""

    lane: Lane
    states: list[Family]
    whole: list[Family]


def sheet_of(lane: Lane, strips: Sequence[Strip]) -> Sheet:
    """Strips as families, also with the states of a cell folded in."""
    whole: list[Strip] = []
    if lane.per_state is not None and lane.src.states == lane.dst.states:
        whole = merged(closed(strip, lane.src.states) for strip in strips)
    return Sheet(lane, _families(strips), _families(whole))


def _families(strips: Sequence[Strip]) -> list[Family]:
    alike: dict[Strip, list[Strip]] = defaultdict(list)
    for strip in strips:
        alike[strip._replace(at=(0, 0))].append(strip)
    found = []
    for key, members in alike.items():
        rows = [np.concatenate([strip.rows(end) for strip in members]) for end in (0, 1)]
        order = np.argsort(rows[1], kind="stable")
        found.append(Family(key, (rows[0][order], rows[1][order])))
    return found


class Tables(NamedTuple):
    """Block ids of the stretches of a lane, at either end."""

    src: Int64s
    dst: Int64s


def ranges(sheet: Sheet, found: Stretches, ids: Tables) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
    """(source, destination, length) of every run of a lane, in groups."""
    lane = sheet.lane
    if sheet.whole:
        full = found.length == lane.src.states
        yield from _runs(sheet.whole, _pick(found, full), _pick_ids(ids, full), whole=True)
        found, ids = _pick(found, ~full), _pick_ids(ids, ~full)
    yield from _runs(sheet.states, found, ids, whole=False)


def _runs(
    families: list[Family], found: Stretches, ids: Tables, *, whole: bool
) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
    if not len(found.length):
        return
    remembered: dict[tuple[object, ...], tuple[Int64s, Int64s, Int64s]] = {}
    for strip, rows in families:
        key = (strip.block, strip.kernel, strip.state, strip.item)
        if key not in remembered:
            remembered[key] = _along_states(strip, found, ids, whole=whole)
        src, dst, length = remembered[key]
        refuse_too_many(len(rows[0]) * len(src), "descriptors")
        # The slower of the two is the one that steps further at the destination.
        outside = len(dst) > 1 and len(rows[1]) > 1 and _step(dst) > _step(rows[1])
        if outside:
            starts = [(a[:, None] + b).reshape(-1) for a, b in ((src, rows[0]), (dst, rows[1]))]
            yield starts[0], starts[1], np.repeat(length, len(rows[0]))
        else:
            starts = [(b[:, None] + a).reshape(-1) for a, b in ((src, rows[0]), (dst, rows[1]))]
            yield starts[0], starts[1], np.tile(length, len(rows[0]))


def _along_states(
    strip: Strip, found: Stretches, ids: Tables, *, whole: bool
) -> tuple[Int64s, Int64s, Int64s]:
    """Where the stretches of a strip lie, and how long each is, joined where they touch."""
    src = _offsets(strip, 0, found.src, ids.src)
    dst = _offsets(strip, 1, found.dst, ids.dst)
    count = found.length
    if whole or int(count.max()) == 1:
        length = np.full(len(count), strip.item, dtype=np.int64)
    elif strip.state == (strip.item, strip.item):
        length = count * strip.item
    else:
        # States that are apart at one end or the other go one by one.
        nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        src = np.repeat(src, count) + nth * strip.state[0]
        dst = np.repeat(dst, count) + nth * strip.state[1]
        length = np.full(len(nth), strip.item, dtype=np.int64)
    return join_pairs(src, dst, length)


def _offsets(strip: Strip, end: int, spots: Spots, ids: Int64s) -> Int64s:
    steps: list[Ends] = [strip.block, strip.kernel, strip.state]
    places = (ids, spots.kernel, spots.state)
    total = np.zeros(len(ids), dtype=np.int64)
    for step, place in zip(steps, places, strict=True):
        if step[end]:
            total += place * step[end]
    return total


def joined(
    parts: Mapping[tuple[int, int], list[tuple[Int64s, Int64s, Int64s]]],
) -> tuple[Copy, ...]:
    """Runs by (source pool, destination pool), the fewest that carry the same bytes."""
    copies = []
    for (src_pool, dst_pool), runs in sorted(parts.items()):
        src, dst, length = (
            runs[0]
            if len(runs) == 1
            else (np.concatenate(part) for part in zip(*runs, strict=True))
        )
        if len(length):
            copies.append(Copy(src_pool, dst_pool, *join_pairs(src, dst, length)))
    return tuple(copies)


def _pick(found: Stretches, mask: NDArray[np.bool_]) -> Stretches:
    if bool(mask.all()):
        return found
    return Stretches(
        Spots(*(part[mask] for part in found.src)),
        Spots(*(part[mask] for part in found.dst)),
        found.length[mask],
    )


def _pick_ids(ids: Tables, mask: NDArray[np.bool_]) -> Tables:
    return ids if bool(mask.all()) else Tables(ids.src[mask], ids.dst[mask])


def _step(places: Int64s) -> int:
    """How far the first two of ascending places are apart."""
    return int(places[1] - places[0])


def _rows(starts: Int64s, length: Int64s, base: int, device: int) -> NDArray[np.uint64]:
    rows = np.empty((len(starts), 3), dtype=np.uint64)
    rows[:, 0] = starts
    rows[:, 0] += np.uint64(base)
    rows[:, 1] = length
    rows[:, 2] = device
    return rows
