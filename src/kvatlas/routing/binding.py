"""From strips, block tables and tokens to byte ranges: numpy all the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import (
    INT64_MAX,
    Int64s,
    SpanStarts,
    StateSpans,
    StridedRuns,
    fold_states,
    join_copies,
    natural,
    refuse_too_many,
)
from kvatlas.routing.compiler import Lane
from kvatlas.routing.request import Placed


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

    strip: StridedRuns
    rows: tuple[Int64s, Int64s]
    """Where its items lie at either end, by destination, in the first state of block 0."""


class Sheet(NamedTuple):
    """The strips of a lane, ready to be bound: state by state, and for whole cells."""

    lane: Lane
    states: list[Family]
    whole: list[Family]


def sheet_of(lane: Lane, strips: Sequence[StridedRuns]) -> Sheet:
    """Strips as families, also with the states of a cell folded in."""
    whole: list[StridedRuns] = []
    if lane.per_state is not None and lane.src.states == lane.dst.states:
        whole = fold_states(strips, lane.src.states)
    return Sheet(lane, families(strips), families(whole))


def families(strips: Sequence[StridedRuns]) -> list[Family]:
    """Strips that differ only in where they start, together."""
    alike: dict[object, list[StridedRuns]] = defaultdict(list)
    for strip in strips:
        alike[strip[:5], strip.item].append(strip)
    found = []
    for members in alike.values():
        key = members[0]._replace(offsets=(0, 0))
        starts = np.array([strip.offsets for strip in members], dtype=np.int64)
        rows = [(starts[:, end, None] + key.item_offsets(end)).reshape(-1) for end in (0, 1)]
        order = np.argsort(rows[1], kind="stable")
        found.append(Family(key, (rows[0][order], rows[1][order])))
    return found


class Runs(NamedTuple):
    """Byte ranges at either end; `fewest` where they are in order and none touches the next."""

    src: Int64s
    dst: Int64s
    length: Int64s
    fewest: bool


def ranges(sheet: Sheet, place: Placed) -> Iterator[Runs]:
    """Every run of a lane, in groups."""
    if sheet.whole:
        full = place.found.length == sheet.lane.src.states
        yield from _runs(sheet.whole, _pick(place, full), whole=True)
        place = _pick(place, ~full)
    yield from _runs(sheet.states, place, whole=False)


def _runs(families: list[Family], place: Placed, *, whole: bool) -> Iterator[Runs]:
    if not len(place.found.length):
        return
    remembered: dict[tuple[object, ...], tuple[Int64s, Int64s, Int64s]] = {}
    for strip, rows in families:
        key = (strip.block_strides, strip.kernel_strides, strip.state_strides, strip.item)
        if key not in remembered:
            remembered[key] = strip.byte_ranges(place.found, (place.src, place.dst), whole=whole)
        yield _all_sums(rows, remembered[key])


def _all_sums(rows: tuple[Int64s, Int64s], along: tuple[Int64s, Int64s, Int64s]) -> Runs:
    """Every row of a family with every stretch, the one that steps further slowest."""
    src, dst, length = along
    count, most = len(rows[0]) * len(src), int(length.max())
    refuse_too_many(count, "descriptors")
    alike = most == int(length.min())
    slow = _step(dst) > _step(rows[1])
    outer, inner = ((src, dst), rows) if slow else (rows, (src, dst))
    starts = [(one[:, None] + two).reshape(-1) for one, two in zip(outer, inner, strict=True)]
    if alike:
        # Seen everywhere and kept once: a third less to write.
        same = np.broadcast_to(np.int64(most), count)
        return Runs(starts[0], starts[1], same, _apart(outer, inner, most))
    many = len(rows[0])
    lengths = np.repeat(length, many) if slow else np.tile(length, many)
    return Runs(starts[0], starts[1], lengths, fewest=False)


def _apart(outer: tuple[Int64s, Int64s], inner: tuple[Int64s, Int64s], item: int) -> bool:
    """Whether all sums are in order at the destination and none touches the next at both ends."""
    span = int(inner[1][-1] - inner[1][0]) + item
    reach = int(inner[0][-1] - inner[0][0]) + item
    for (src, dst), near, far in ((inner, item, item), (outer, span, reach)):
        ahead = np.diff(dst)
        if len(ahead) and (ahead.min() < near or ((ahead == near) & (np.diff(src) == far)).any()):
            return False
    return True


def joined(parts: Mapping[tuple[int, int], list[Runs]]) -> tuple[Copy, ...]:
    """Runs by (source pool, destination pool), the fewest that carry the same bytes."""
    copies = []
    for (src_pool, dst_pool), runs in sorted(parts.items()):
        if not runs:
            continue
        src, dst, length = (
            runs[0][:3]
            if len(runs) == 1
            else (np.concatenate([r[place] for r in runs]) for place in range(3))
        )
        if len(runs) > 1 or not runs[0].fewest:
            src, dst, length = join_copies(src, dst, length)
        copies.append(Copy(src_pool, dst_pool, src, dst, length))
    return tuple(copies)


def _pick(place: Placed, mask: NDArray[np.bool_]) -> Placed:
    if bool(mask.all()):
        return place
    src, dst, length = place.found
    found = StateSpans(
        SpanStarts(*(part[mask] for part in src)),
        SpanStarts(*(part[mask] for part in dst)),
        length[mask],
    )
    return Placed(found, place.src[mask], place.dst[mask])


def _step(places: Int64s) -> int:
    """The least that ascending places are apart; more than anything where there is one."""
    return int(np.diff(places).min()) if len(places) > 1 else INT64_MAX


def _rows(starts: Int64s, length: Int64s, base: int, device: int) -> NDArray[np.uint64]:
    base, device = natural(base, "the base address"), natural(device, "the device id")
    last = base + int((starts + length).max(initial=0))
    if last > INT64_MAX or device > INT64_MAX:
        raise AtlasError(
            Code.OVERFLOW,
            "Every address stays below 2**63",
            got=f"a last byte at {last - 1} on device {device}",
            hint="Check the base address",
        )
    rows = np.empty((len(starts), 3), dtype=np.uint64)
    rows[:, 0] = starts
    rows[:, 0] += np.uint64(base)
    rows[:, 1] = length
    rows[:, 2] = device
    return rows
