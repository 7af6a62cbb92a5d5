"""From strips, block tables and tokens to byte ranges: numpy all the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from kvatlas.routing.compiler import GroupPair
from kvatlas.routing.request import BoundStates
from kvatlas.specs import ElementCast

_MOST_STARTS = 1 << 15
"""Starts that are kept with their states."""


@dataclass(frozen=True, eq=False, slots=True)
class Starts:
    """Offsets at the source and at the destination, ascending there.

    Equal only to itself: what is found out about it may be kept by whoever has it again.
    """

    src: Int64s
    dst: Int64s
    step: int
    """The least that they are apart at the destination; more than anything where there is one."""
    scales: Int64s | None = None
    """Which of a cast's scales each has, where there are several."""

    @classmethod
    def of(cls, src: Int64s, dst: Int64s, scales: Int64s | None = None) -> Starts:
        """Offsets at either end, with their step."""
        return cls(src, dst, int(np.diff(dst).min()) if len(dst) > 1 else INT64_MAX, scales)

    @property
    def ends(self) -> tuple[Int64s, Int64s]:
        """Offsets at either end."""
        return self.src, self.dst

    def at(self, end: int) -> Int64s:
        """Offsets at one end."""
        return self.dst if end else self.src

    def touch(self, near: int, far: int) -> bool:
        """Whether one is `near` behind another at the destination, and `far` at the source."""
        return bool(((np.diff(self.dst) == near) & (np.diff(self.src) == far)).any())


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


@dataclass(frozen=True, eq=False)
class RunGrid:
    """Runs of two pools at every sum of a start and a span, before the sums are written out.

    A thousand starts and a thousand spans are a million runs: what can add for itself, such
    as a kernel, is told of two thousand numbers.
    """

    src_pool: int
    dst_pool: int
    starts: Starts
    """Known to the route; the same object for every request."""
    src: Int64s
    dst: Int64s
    length: Int64s
    """Where the spans of one request lie, and how long each is; none is empty."""
    cast: ElementCast | None = None
    """How elements change on the way; all of the above is then counted in elements."""

    def __len__(self) -> int:
        return len(self.starts.src) * len(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes that arrive."""
        count = len(self.starts.src) * int(self.length.sum())
        return count if self.cast is None else count * self.cast.target.item

    def runs(self) -> tuple[Int64s, Int64s, Int64s]:
        """The sums, span by span: where runs are at the source and the destination, how long.

        Refused for a grid whose elements are cast: they have not as many bytes at either end.

        >>> starts = Starts.of(np.array([0, 40]), np.array([0, 8]))
        >>> grid = RunGrid(0, 0, starts, np.array([100, 200]), np.array([0, 4]), np.array([4, 4]))
        >>> [column.tolist() for column in grid.runs()]
        [[100, 140, 200, 240], [0, 8, 4, 12], [4, 4, 4, 4]]
        """
        if self.cast is not None:
            problem, hint = "Elements that are cast are no runs of bytes", "Carry out the cast"
            raise AtlasError(Code.CONTRADICTORY, problem, got="runs of a cast", hint=hint)
        ends = zip((self.src, self.dst), self.starts.ends, strict=True)
        src, dst = ((spans[:, None] + starts).reshape(-1) for spans, starts in ends)
        return src, dst, np.repeat(self.length, len(self.starts.src))


class RepeatedRuns(NamedTuple):
    """Strips that differ only in where they start: one of them, and all starts."""

    strip: StridedRuns
    starts: Starts
    """Where items lie at either end, by destination, in the first state of block 0."""
    kept: dict[object, Any]
    """What was made of it and is asked for again: starts with states, parts, spans of requests."""

    def in_states(self, count: int) -> Starts | None:
        """Where items lie in the first `count` states; None where those are too many to keep.

        The same object whenever it is asked for, so that a device can keep it.
        """
        if count * len(self.starts.src) > _MOST_STARTS:
            return None
        if count not in self.kept:
            nth = np.arange(count)
            steps = zip(self.starts.ends, self.strip.state_strides, strict=True)
            src, dst = ((at[:, None] + nth * step).reshape(-1) for at, step in steps)
            order = np.argsort(dst, kind="stable")
            scales = self.starts.scales
            scales = None if scales is None else np.repeat(scales, count)[order]
            self.kept.setdefault(count, Starts.of(src[order], dst[order], scales))
        made: Starts = self.kept[count]
        return made

    def part(self, first: int, stop: int) -> RepeatedRuns:
        """Some of the starts alone; the same whenever they are asked for, with what they keep."""
        key = range(first, stop)
        if key not in self.kept:
            starts, some = self.starts, slice(first, stop)
            scales = None if starts.scales is None else starts.scales[some]
            part = Starts.of(starts.src[some], starts.dst[some], scales)
            self.kept.setdefault(key, RepeatedRuns(self.strip, part, {}))
        made: RepeatedRuns = self.kept[key]
        return made


class CompiledPair(NamedTuple):
    """What moves between two groups, ready to be bound: state by state, and for whole cells."""

    pair: GroupPair
    states: list[RepeatedRuns]
    whole: list[RepeatedRuns]


def compile_pair(pair: GroupPair, strips: Sequence[StridedRuns]) -> CompiledPair:
    """Strips as repeated runs, also with the states of a cell folded in where both ends agree."""
    src, dst = pair.cells
    fold = pair.per_state is not None and src.states == dst.states
    return CompiledPair(
        pair, repeated(strips), repeated(fold_states(strips, src.states) if fold else ())
    )


def repeated(
    strips: Sequence[StridedRuns], scales: Sequence[int] | None = None
) -> list[RepeatedRuns]:
    """Strips that differ only in where they start, together; `scales` are those of a cast."""
    alike: dict[object, list[int]] = defaultdict(list)
    for number, strip in enumerate(strips):
        alike[strip[:5], strip.item].append(number)
    runs = []
    for members in alike.values():
        strip = strips[members[0]]._replace(offsets=(0, 0))
        at = np.array([strips[member].offsets for member in members], dtype=np.int64)
        src, dst = ((at[:, end, None] + strip.item_offsets(end)).reshape(-1) for end in (0, 1))
        order = np.argsort(dst, kind="stable")
        which = None
        if scales is not None:
            own = np.array([scales[member] for member in members], dtype=np.int64)
            which = np.repeat(own, len(src) // len(members))[order]
        runs.append(RepeatedRuns(strip, Starts.of(src[order], dst[order], which), {}))
    return runs


class Runs(NamedTuple):
    """Byte ranges at either end; `fewest` where they are in order and none touches the next."""

    src: Int64s
    dst: Int64s
    length: Int64s
    fewest: bool


def ranges(compiled: CompiledPair, bound: BoundStates) -> Iterator[Runs]:
    """Every run that moves between two groups, in arrays."""
    for runs, part, whole in _folded(compiled, bound):
        stretches = _Stretches(part, whole=whole)
        for strip, starts, _ in runs:
            yield _all_sums(starts, *stretches.of(strip))


def count_ranges(compiled: CompiledPair, bound: BoundStates, cuts: int) -> int:
    """How many runs there are between two groups at most, where spans are cut so many times.

    Unlike strips that happen to touch are counted apart.
    """
    count = 0
    for runs, part, whole in _folded(compiled, bound):
        stretches, length = _Stretches(part, whole=whole), part.states.length
        for strip, starts, _ in runs:
            if whole or strip.gapless:
                joined = len(stretches.of(strip)[0])
                each = joined + min(cuts, len(length) - joined)
            else:
                each = int(length.sum())
            count += each * len(starts.src)
    return count


def _folded(
    compiled: CompiledPair, bound: BoundStates
) -> Iterator[tuple[list[RepeatedRuns], BoundStates, bool]]:
    """Whole cells, where their states are folded in, and the other states."""
    if compiled.whole:
        full = bound.states.length == compiled.pair.cells[0].states
        if full.all():
            yield compiled.whole, bound, True
            return
        if full.any():
            yield compiled.whole, _pick(bound, full), True
        bound = _pick(bound, ~full)
    yield compiled.states, bound, False


class _Stretches:
    """Where states lie in the pools; strips of one kind share what was computed."""

    def __init__(self, bound: BoundStates, *, whole: bool) -> None:
        self._bound, self._whole = bound, whole
        self._computed: dict[tuple[object, ...], tuple[Int64s, Int64s, Int64s]] = {}

    def of(self, strip: StridedRuns) -> tuple[Int64s, Int64s, Int64s]:
        """Starts at either end, and lengths, of an item that lies at offset 0 of block 0."""
        key = (strip.block_strides, strip.kernel_strides, strip.state_strides, strip.item)
        if key not in self._computed:
            states, ids = self._bound
            self._computed[key] = strip.byte_ranges(states, ids, whole=self._whole)
        return self._computed[key]


def _all_sums(starts: Starts, src: Int64s, dst: Int64s, length: Int64s) -> Runs:
    """Every start with every stretch, the one that steps further slowest."""
    many, most = len(starts.src), int(length.max())
    count = many * len(src)
    refuse_too_many(count, "descriptors")
    stretches = Starts.of(src, dst)
    slow = stretches.step > starts.step
    outer, inner = (stretches, starts) if slow else (starts, stretches)
    sums = np.empty((2, len(outer.src), len(inner.src)), dtype=np.int64)
    np.add(outer.src[:, None], inner.src, out=sums[0])
    np.add(outer.dst[:, None], inner.dst, out=sums[1])
    to_src, to_dst = sums.reshape(2, count)
    if most == int(length.min()):
        # Seen everywhere and kept once: a third less to write.
        same = np.broadcast_to(np.int64(most), count)
        return Runs(to_src, to_dst, same, _apart(outer, inner, most))
    lengths = np.repeat(length, many) if slow else np.tile(length, many)
    return Runs(to_src, to_dst, lengths, fewest=False)


def _apart(outer: Starts, inner: Starts, item: int) -> bool:
    """Whether all sums are in order at the destination and none touches the next at both ends."""
    span = int(inner.dst[-1] - inner.dst[0]) + item
    reach = int(inner.src[-1] - inner.src[0]) + item
    for starts, near, far in ((inner, item, item), (outer, span, reach)):
        if starts.step < near or (starts.step == near and starts.touch(near, far)):
            return False
    return True


def joined(runs_by_pools: Mapping[tuple[int, int], list[Runs]]) -> tuple[Copy, ...]:
    """Runs by (source pool, destination pool), the fewest that carry the same bytes."""
    copies = []
    for pools, runs in sorted(runs_by_pools.items()):
        if not runs:
            continue
        src, dst, length, fewest = runs[0]
        if len(runs) > 1:
            src, dst, length = (np.concatenate([r[n] for r in runs]) for n in range(3))
        if len(runs) > 1 or not fewest:
            src, dst, length = join_copies(src, dst, length)
        copies.append(Copy(*pools, src, dst, length))
    return tuple(copies)


def _pick(bound: BoundStates, mask: NDArray[np.bool_]) -> BoundStates:
    src, dst = (SpanStarts(*(array[mask] for array in end)) for end in bound.states[:2])
    states = StateSpans(src, dst, bound.states.length[mask])
    return BoundStates(states, (bound.ids[0][mask], bound.ids[1][mask]))


def _rows(starts: Int64s, length: Int64s, base: int, device: int) -> NDArray[np.uint64]:
    base, device = natural(base, "the base address"), natural(device, "the device id")
    last = base + int((starts + length).max(initial=0))
    if max(last, device) > INT64_MAX:
        got = f"a last byte at {last - 1} on device {device}"
        raise AtlasError(Code.OVERFLOW, got=got, hint="Check the base address")
    rows = np.empty((len(starts), 3), dtype=np.uint64)
    rows[:, 0] = starts
    rows[:, 0] += np.uint64(base)
    rows[:, 1] = length
    rows[:, 2] = device
    return rows
