"""Apply the block tables and tokens of a request to compiled runs, to get byte ranges.

A run is a contiguous range of bytes to copy. A strip (`StridedRuns`) is a family of runs with
constant strides, without block ids. This module adds the block ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import StateSpans, StridedRuns, merge_runs
from kvatlas.geometry.address_arrays import Int64s, join_copies, refuse_too_many
from kvatlas.geometry.integers import INT64_MAX, natural
from kvatlas.geometry.state_spans import SpanStarts
from kvatlas.geometry.strided_runs import fold_states
from kvatlas.routing.compiler import GroupPair
from kvatlas.routing.request import BoundStates
from kvatlas.specs.cell_formats import ElementCast

_MOST_STARTS = 1 << 15
"""Maximum number of starts that `RepeatedRuns.in_states` caches for one number of states."""


class Starts(msgspec.Struct, frozen=True, eq=False):
    """Pairs of a source and a destination offset at which runs start, sorted by destination.

    Starts are compared by identity, so that callers can use them as keys of a dict.
    """

    source: Int64s
    destination: Int64s
    step: int
    """Smallest distance between two destination offsets; `INT64_MAX` for a single offset."""
    scales: Int64s | None = None
    """Index of each run's scale in `ElementCast.scales`; None if all runs use the first scale."""

    @classmethod
    def of(cls, source: Int64s, destination: Int64s, scales: Int64s | None = None) -> Starts:
        """Create starts from source and destination offsets; `destination` must ascend."""
        return cls(
            source,
            destination,
            int(np.diff(destination).min()) if len(destination) > 1 else INT64_MAX,
            scales,
        )

    @property
    def ends(self) -> tuple[Int64s, Int64s]:
        """Source offsets and destination offsets."""
        return self.source, self.destination

    def at(self, end: int) -> Int64s:
        """Return the source offsets if `end` is 0, the destination offsets if it is 1."""
        return self.destination if end else self.source

    def touch(self, near: int, far: int) -> bool:
        """Return whether any two successive starts have both of the given distances, in bytes.

        `near` is their distance in the destination, `far` their distance in the source.
        """
        return bool(((np.diff(self.destination) == near) & (np.diff(self.source) == far)).any())


ORIGIN = Starts.of(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
"""A single start at offset 0. A copy with this start has one run per span."""


@dataclass(frozen=True, eq=False)
class Copy:
    """Runs to copy from one source pool to one destination pool.

    There is one run for every pair of a start and a span. Span i copies `length[i]` bytes from
    offset `source[i]` to offset `destination[i]`, and a start adds one offset to `source` and one
    to `destination`. With the single start `ORIGIN`, the spans are the runs. A thousand starts and
    a thousand spans describe a million runs, and a kernel that adds them needs only two thousand
    numbers.

    >>> starts = Starts.of(np.array([0, 40]), np.array([0, 8]))
    >>> copy = Copy(0, 0, np.array([100, 200]), np.array([0, 4]), np.array([4, 4]), starts=starts)
    >>> [column.tolist() for column in copy.runs()]
    [[100, 140, 200, 240], [0, 8, 4, 12], [4, 4, 4, 4]]
    """

    source_pool: int
    destination_pool: int
    source: Int64s
    destination: Int64s
    length: Int64s
    """`source`, `destination` and `length` describe the spans. No length is 0."""
    _: KW_ONLY
    starts: Starts = ORIGIN
    """The starts. They depend only on the route, so all its requests share one object."""
    cast: ElementCast | None = None
    """Element conversion during the copy. If set, offsets and lengths count elements."""

    def __len__(self) -> int:
        return len(self.starts.source) * len(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes written at the destination."""
        count = len(self.starts.source) * int(self.length.sum())
        return count if self.cast is None else count * self.cast.target.item

    def runs(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return (source offsets, destination offsets, lengths) of all runs, span by span.

        Raises an error if the copy casts elements, because the elements then have different sizes
        at the two ends.
        """
        if self.cast is not None:
            problem = "A copy that casts elements cannot be expressed as runs of bytes"
            hint = "Pass the copy to DeviceQueue.post, which casts elements"
            raise AtlasError(Code.CONTRADICTORY, problem, got=f"cast {self.cast}", hint=hint)
        if self.starts is ORIGIN:
            return self.source, self.destination, self.length
        ends = zip((self.source, self.destination), self.starts.ends, strict=True)
        source, destination = ((spans[:, None] + starts).reshape(-1) for spans, starts in ends)
        return source, destination, np.repeat(self.length, len(self.starts.source))

    def expanded(self) -> Copy:
        """Return the same runs in another form: one span for each run, and one start, `ORIGIN`."""
        if self.starts is ORIGIN and self.cast is None:
            return self
        return Copy(self.source_pool, self.destination_pool, *self.runs())

    def reversed(self) -> Copy:
        """Return a `Copy` of the runs from destination to source; its only start is `ORIGIN`."""
        source, destination, length = self.runs()
        return Copy(self.destination_pool, self.source_pool, destination, source, length)

    def descriptors(
        self,
        *,
        source_base: int = 0,
        destination_base: int = 0,
        source_device: int = 0,
        destination_device: int = 0,
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return (source rows, destination rows); a row is (address, length, device) of one run."""
        source, destination, length = self.runs()
        return (
            _rows(source, length, source_base, source_device),
            _rows(destination, length, destination_base, destination_device),
        )


class RepeatedRuns(NamedTuple):
    """The same family of runs at many offsets.

    The family is a strip (`StridedRuns`): runs with constant strides along blocks and states.
    """

    strip: StridedRuns
    starts: Starts
    """Offsets of the items in the first state of block 0, sorted by destination."""
    kept: dict[object, Any]
    """Cache of derived values: the results of `in_states` and `part`, and spans of requests."""

    def in_states(self, count: int) -> Starts | None:
        """Return the starts of the runs that copy `count` consecutive states.

        Returns None if there would be too many starts.

        Repeated calls return the same object, so that a device can cache it.
        """
        if count * len(self.starts.source) > _MOST_STARTS:
            return None
        if count not in self.kept:
            nth = np.arange(count)
            steps = zip(self.starts.ends, self.strip.state_strides, strict=True)
            source, destination = ((at[:, None] + nth * step).reshape(-1) for at, step in steps)
            order = np.argsort(destination, kind="stable")
            scales = self.starts.scales
            scales = None if scales is None else np.repeat(scales, count)[order]
            self.kept.setdefault(count, Starts.of(source[order], destination[order], scales))
        made: Starts = self.kept[count]
        return made

    def part(self, first: int, stop: int) -> RepeatedRuns:
        """Return the runs at starts `first .. stop - 1`; the result is cached."""
        key = range(first, stop)
        if key not in self.kept:
            starts, some = self.starts, slice(first, stop)
            scales = None if starts.scales is None else starts.scales[some]
            part = Starts.of(starts.source[some], starts.destination[some], scales)
            self.kept.setdefault(key, RepeatedRuns(self.strip, part, {}))
        made: RepeatedRuns = self.kept[key]
        return made


class CompiledPair(NamedTuple):
    """The runs that copy the states of a source group to a destination group, for any block ids.

    `states` are the runs that copy one state, usually a token. `whole` are the longer runs that
    copy a cell: all states of one or several contiguous kernel blocks. `whole` is empty if the
    cells of the two ends have different numbers of states.
    """

    pair: GroupPair
    states: list[RepeatedRuns]
    whole: list[RepeatedRuns]


def compile_pair(
    pair: GroupPair, strips: Sequence[StridedRuns], unused: Sequence[StridedRuns] = ()
) -> CompiledPair:
    """Compile the runs between two groups, given as strips (`StridedRuns`).

    The result has runs for single states and, if possible, for cells. A cell is a kernel block, or
    several contiguous kernel blocks. `unused` are runs of unused bytes to copy with each whole
    cell.
    """
    source, destination = pair.cells
    if pair.per_state is None:  # The state of a recurrent layer is a whole block.
        return CompiledPair(pair, repeated(merge_runs([*strips, *unused])), [])
    if source.states != destination.states:
        return CompiledPair(pair, repeated(strips), [])
    whole = fold_states(strips, source.states, unused)
    return CompiledPair(pair, repeated(strips), repeated(whole))


def repeated(
    strips: Sequence[StridedRuns], scales: Sequence[int] | None = None
) -> list[RepeatedRuns]:
    """Return one `RepeatedRuns` for each set of strips that differ only in their offsets.

    `scales` contains, for each strip, the index of its scale in `ElementCast.scales`.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for number, strip in enumerate(strips):
        alike[strip[:5], strip.item].append(number)
    runs = []
    for members in alike.values():
        strip = strips[members[0]]._replace(offsets=(0, 0))
        at = np.array([strips[member].offsets for member in members], dtype=np.int64)
        source, destination = (
            (at[:, end, None] + strip.item_offsets(end)).reshape(-1) for end in (0, 1)
        )
        order = np.argsort(destination, kind="stable")
        which = None
        if scales is not None:
            own = np.array([scales[member] for member in members], dtype=np.int64)
            which = np.repeat(own, len(source) // len(members))[order]
        runs.append(RepeatedRuns(strip, Starts.of(source[order], destination[order], which), {}))
    return runs


class Runs(NamedTuple):
    """Runs of bytes: source offsets, destination offsets and lengths.

    `fewest` is true only if the runs are sorted and no two of them can be joined. It may be false
    if this has not been determined.
    """

    source: Int64s
    destination: Int64s
    length: Int64s
    fewest: bool


def ranges(compiled: CompiledPair, bound: BoundStates) -> Iterator[Runs]:
    """Yield the runs that copy the states `bound` from a source group to a destination group."""
    for runs, part, whole in _folded(compiled, bound):
        stretches = _ByteRanges(part, whole=whole)
        for strip, starts, _ in runs:
            yield _all_sums(starts, *stretches.of(strip))


def count_ranges(compiled: CompiledPair, bound: BoundStates, cuts: int) -> int:
    """Return an upper bound on the number of runs that copy `bound`.

    The caller may cut spans of states in two, at most `cuts` times, and each cut adds runs.
    Adjacent runs of different strips (`StridedRuns`) count separately.
    """
    count = 0
    for runs, part, whole in _folded(compiled, bound):
        stretches, length = _ByteRanges(part, whole=whole), part.states.length
        for strip, starts, _ in runs:
            if whole or strip.gapless:
                joined = len(stretches.of(strip)[0])
                each = joined + min(cuts, len(length) - joined)
            else:
                each = int(length.sum())
            count += each * len(starts.source)
    return count


def _folded(
    compiled: CompiledPair, bound: BoundStates
) -> Iterator[tuple[list[RepeatedRuns], BoundStates, bool]]:
    """Divide bound states into states that fill whole cells and other states.

    A cell is a kernel block, or several contiguous kernel blocks. Yield (runs, states, True) for
    whole cells, which have longer runs, and (runs, states, False) for the rest.
    """
    if compiled.whole:
        full = bound.states.length == compiled.pair.cells[0].states
        if full.all():
            yield compiled.whole, bound, True
            return
        if full.any():
            yield compiled.whole, _pick(bound, full), True
        bound = _pick(bound, ~full)
    yield compiled.states, bound, False


class _ByteRanges:
    """Computes byte ranges of bound states, once for all strips with equal strides and run length.

    Strips with equal strides and run length differ only in their offsets.
    """

    def __init__(self, bound: BoundStates, *, whole: bool) -> None:
        self._bound, self._whole = bound, whole
        self._computed: dict[tuple[object, ...], tuple[Int64s, Int64s, Int64s]] = {}

    def of(self, strip: StridedRuns) -> tuple[Int64s, Int64s, Int64s]:
        """Return (source, destination, length) of a strip's ranges, without `item_offsets`."""
        key = (strip.block_strides, strip.kernel_strides, strip.state_strides, strip.item)
        if key not in self._computed:
            states, ids = self._bound
            self._computed[key] = strip.byte_ranges(states, ids, whole=self._whole)
        return self._computed[key]


def _all_sums(starts: Starts, source: Int64s, destination: Int64s, length: Int64s) -> Runs:
    """Return one run for every pair of a start and a byte range, at the sum of their offsets.

    The outer loop is over the ranges or over the starts, whichever are further apart, so that most
    sums ascend.
    """
    many, most = len(starts.source), int(length.max())
    count = many * len(source)
    refuse_too_many(count, "descriptors")
    stretches = Starts.of(source, destination)
    slow = stretches.step > starts.step
    outer, inner = (stretches, starts) if slow else (starts, stretches)
    sums = np.empty((2, len(outer.source), len(inner.source)), dtype=np.int64)
    np.add(outer.source[:, None], inner.source, out=sums[0])
    np.add(outer.destination[:, None], inner.destination, out=sums[1])
    to_source, to_destination = sums.reshape(2, count)
    if most == int(length.min()):
        # One length for all runs: a broadcast view saves a third of the writes.
        same = np.broadcast_to(np.int64(most), count)
        return Runs(to_source, to_destination, same, _apart(outer, inner, most))
    lengths = np.repeat(length, many) if slow else np.tile(length, many)
    return Runs(to_source, to_destination, lengths, fewest=False)


def _apart(outer: Starts, inner: Starts, item: int) -> bool:
    """Return whether these runs are sorted by destination and no two of them can be joined.

    There is one run of `item` bytes for each pair of an outer and an inner start, at the sum of
    their offsets. Inner starts vary fastest.
    """
    span = int(inner.destination[-1] - inner.destination[0]) + item
    reach = int(inner.source[-1] - inner.source[0]) + item
    for starts, near, far in ((inner, item, item), (outer, span, reach)):
        if starts.step < near or (starts.step == near and starts.touch(near, far)):
            return False
    return True


def joined(runs_by_pools: Mapping[tuple[int, int], list[Runs]]) -> tuple[Copy, ...]:
    """Return one `Copy` per pair (source pool, destination pool), with adjacent runs joined."""
    copies = []
    for pools, runs in sorted(runs_by_pools.items()):
        if not runs:
            continue
        source, destination, length, fewest = runs[0]
        if len(runs) > 1:
            source, destination, length = (np.concatenate([r[n] for r in runs]) for n in range(3))
        if len(runs) > 1 or not fewest:
            source, destination, length = join_copies(source, destination, length)
        copies.append(Copy(*pools, source, destination, length))
    return tuple(copies)


def pick_spans(spans: StateSpans, chosen: NDArray[np.bool_]) -> StateSpans:
    """Return the spans where `chosen` is true."""
    source, destination = (SpanStarts(*(array[chosen] for array in end)) for end in spans[:2])
    return StateSpans(source, destination, spans.length[chosen])


def _pick(bound: BoundStates, chosen: NDArray[np.bool_]) -> BoundStates:
    ids = bound.ids[0][chosen], bound.ids[1][chosen]
    return BoundStates(pick_spans(bound.states, chosen), ids)


def _rows(starts: Int64s, length: Int64s, base: int, device: int) -> NDArray[np.uint64]:
    base, device = natural(base, "the base address"), natural(device, "the device id")
    last = base + int((starts + length).max(initial=0))
    if last > INT64_MAX:
        got = f"a base address of {base} and a last byte at {last - 1}"
        raise AtlasError(
            Code.OVERFLOW, got=got, hint="Pass a smaller source_base or destination_base"
        )
    rows = np.empty((len(starts), 3), dtype=np.uint64)
    rows[:, 0] = starts
    rows[:, 0] += np.uint64(base)
    rows[:, 1] = length
    rows[:, 2] = device
    return rows
