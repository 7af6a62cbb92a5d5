"""`Trace`: requests, with their prompts as arrays of ids.

An id represents `block` tokens and everything before them: equal ids mean equal prefixes. An id
therefore always has the same predecessor, the same depth and the same number of tokens. If a trace
violates this, the error contains the number of the line.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code

Ints = NDArray[np.int64]

MOST_IDS = 40_000_000
"""Maximum number of ids of a trace. Sorting them takes about 1.5 GB."""
MOST_TOKENS = 1 << 40
LONGEST_LINE = 64 << 20
"""Maximum length of a line or a conversation in bytes."""
Progress = Callable[[float], None]
"""Called with the fraction that is done, from 0 to 1."""


def bad_trace(where: str, problem: str, got: object, hint: str) -> AtlasError:
    """Return the error for an invalid trace. `where` is the file and, if known, the line."""
    return AtlasError(Code.BAD_TRACE, f"{where}: {problem}", got=got, hint=hint)


def check_block(block: int, where: str) -> None:
    """Raise an error if a block size is not in 1..2**20 tokens."""
    if not 0 < block <= 1 << 20:
        raise bad_trace(
            where,
            f"the block size must be 1 to {1 << 20:,} tokens",
            f"{block} tokens",
            "Pass another block size, such as --trace-block 512",
        )


@dataclass(frozen=True)
class Unseen:
    """The information that a trace lacks because it was inferred from KV events."""

    requests: int = 0
    """Number of requests left out: their first blocks were not recorded."""
    tokens: int = 0
    """Number of tokens that the omitted requests stored."""
    gaps: int = 0
    """Number of places where batches of events are missing, including before the first."""
    ranks: int = 1
    """Number of data-parallel ranks, each with a separate cache."""

    def sentences(self) -> list[str]:
        """Return sentences that explain to the user what is missing."""
        told = [
            "Requests were inferred from the blocks that they stored. Requests that found all of "
            "their complete blocks stored none and are missing; their tokens would have been hits."
        ]
        if self.requests:
            told.append(
                f"{self.requests:,} requests, which stored {self.tokens:,} tokens, are left out: "
                "their first blocks were stored before the recording or in a gap."
            )
        if self.gaps:
            places = "1 place" if self.gaps == 1 else f"{self.gaps:,} places"
            told.append(f"Batches of events are missing at {places}.")
        if self.ranks > 1:
            told.append(
                f"{self.ranks} data-parallel ranks had separate caches; in the simulation, all "
                "requests share one."
            )
        return told


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival."""

    name: str
    block: int
    """Number of tokens per id."""
    ids: Ints
    """The ids of all prompts, concatenated and numbered from 0 in order of first occurrence."""
    starts: Ints
    """The index in `ids` of each request's first id, and finally the length of `ids`."""
    lengths: Ints
    """Number of tokens of each prompt."""
    outputs: Ints
    """Number of tokens of each answer."""
    times: NDArray[np.float64]
    """Arrival time of each request in seconds."""
    unseen: Unseen | None = None
    """The missing information, if requests were inferred from KV events; else None."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Total number of tokens of all prompts."""
        return int(self.lengths.sum())

    def repeated(self, times: int) -> Trace:
        """Return the trace repeated `times` times. Repetitions share no ids, so no prefixes."""
        distinct = int(self.ids.max(initial=-1)) + 1
        each = int(self.starts[-1])
        span = float(self.times.max(initial=0.0))
        return Trace(
            f"{self.name} x {times}",
            self.block,
            np.concatenate([self.ids + n * distinct for n in range(times)]),
            np.concatenate([[0], *(self.starts[1:] + n * each for n in range(times))]),
            np.tile(self.lengths, times),
            np.tile(self.outputs, times),
            np.concatenate([self.times + n * span for n in range(times)]),
            self.unseen,
        )


class TraceBuilder:
    """Builds a trace request by request. `finish` checks the requests against each other."""

    def __init__(
        self, name: str, block: int, unit: str = "line", *, numbered: bool = False
    ) -> None:
        self.name, self.block, self.unit = name, block, unit
        self._numbered = numbered
        """Whether errors include the number of a request, because lines contain several."""
        self._ids, self._starts = array("q"), array("q", [0])
        self._lengths, self._outputs, self._times = array("q"), array("q"), array("d")
        self._where: list[tuple[int, str]] = []
        """(number of the first request, name) of each file."""
        self._lines = array("q")

    def __len__(self) -> int:
        return len(self._lengths)

    def begin(self, file: str) -> None:
        """Begin a new file. Errors in requests that are added from now on contain its name."""
        self._where.append((len(self), file))

    def place(self, line: int, request: int | None = None) -> str:
        """Return the file and line of a request, for error messages.

        `request` is its index; it defaults to the request that is added next.
        """
        first, file = self._where[-1]
        if request is None:
            request = len(self)
        else:
            first, file = self._where[bisect_right(self._where, request, key=itemgetter(0)) - 1]
        number = f", request {request - first + 1}" if self._numbered else ""
        return f"{file}, {self.unit} {line}{number}"

    def add(self, line: int, ids: Sequence[int], length: int, output: int, time: float) -> None:
        """Add a request with `length` prompt tokens and `output` answer tokens."""
        where = self.place(line)
        if not (isfinite(time) and time >= 0):
            raise bad_trace(
                where,
                "the time of a request must be finite and at least 0",
                f"a time of {time} seconds",
                "Correct the request's time",
            )
        if not (0 <= length <= MOST_TOKENS and 0 <= output <= MOST_TOKENS):
            raise bad_trace(
                where,
                f"prompts and answers must have 0 to {MOST_TOKENS:,} tokens",
                f"a prompt of {length} tokens and an answer of {output} tokens",
                "Correct the lengths of the request's prompt and answer",
            )
        whole, begun = length // self.block, -(-length // self.block)
        if len(ids) not in (whole, begun):
            raise bad_trace(
                where,
                f"the number of ids does not match the prompt in blocks of {self.block} tokens",
                f"{len(ids)} ids for {length} tokens",
                f"Write {begun} ids, or pass the block size of the trace (--trace-block)",
            )
        if len(self._ids) + len(ids) > MOST_IDS:
            raise bad_trace(
                where,
                f"a trace can have at most {MOST_IDS:,} ids",
                f"{len(self._ids) + len(ids):,} ids",
                "Split the trace into several files, or write ids of larger blocks",
            )
        try:
            self._ids.extend(ids)
        except (OverflowError, TypeError):
            raise bad_trace(
                where,
                "an id is not a valid integer",
                f"ids {str(ids)[:60]}",
                "Use integers of at least 0 and below 2**63",
            ) from None
        self._starts.append(len(self._ids))
        self._lengths.append(length)
        self._outputs.append(output)
        self._times.append(time)
        self._lines.append(line)

    def finish(self, *, by_time: bool = False) -> Trace:
        """Check all requests and return them as a trace, with block ids renumbered from 0.

        If `by_time` is true, requests are sorted by arrival time; otherwise they stay in the order
        in which they were added. Raises an error unless block ids form a tree: an id always has the
        same predecessor.
        """
        if not len(self):
            raise bad_trace(
                self.name,
                "the trace contains no requests",
                "an empty trace",
                "Write one request per line",
            )
        raw = np.frombuffer(self._ids, np.int64) if self._ids else np.empty(0, np.int64)
        ids = _numbered(raw)
        starts = np.frombuffer(self._starts, np.int64)
        lengths = np.frombuffer(self._lengths, np.int64)
        self._check_tree(ids, starts, lengths)
        trace = Trace(
            self.name,
            self.block,
            ids,
            starts,
            lengths,
            np.frombuffer(self._outputs, np.int64),
            np.frombuffer(self._times, np.float64),
        )
        return _sorted(trace) if by_time else trace

    def _check_tree(self, ids: Ints, starts: Ints, lengths: Ints) -> None:
        """Raise an error unless each id always has the same predecessor and number of tokens."""
        begins = starts[:-1][np.diff(starts) > 0]
        # Assign in reverse order, so that the first occurrence of an id is written last.
        first = np.zeros(int(ids.max(initial=-1)) + 1, np.int32)
        first[ids[::-1]] = np.arange(len(ids), dtype=np.int32)[::-1]
        before = np.empty(len(ids), np.int32)
        before[1:] = ids[:-1]
        before[begins] = -1
        problem = "an id follows a different id than in its first occurrence"
        hint = "Use a different id for each prefix"
        self._check_alike(before, first[ids], starts, problem, hint)
        # All but the last block of a prompt are full.
        tokens = np.full(len(ids), self.block, np.int32)
        counts = np.diff(starts)
        last = lengths - (counts - 1) * self.block
        some = counts > 0
        tokens[starts[1:][some] - 1] = np.minimum(last, self.block)[some]
        problem = "an id represents a different number of tokens than in its first occurrence"
        hint = "Use a separate id for an incomplete last block"
        self._check_alike(tokens, first[ids], starts, problem, hint)

    def _check_alike(
        self, facts: NDArray[np.int32], first: NDArray[np.int32], starts: Ints, problem: str,
        hint: str,
    ) -> None:  # fmt: skip
        """Raise an error unless all occurrences of an id have equal values in `facts`.

        `first[i]` is the index of the first occurrence of the id at index i. `problem` and `hint`
        are the text of the error.
        """
        wrong = np.flatnonzero(facts != facts[first])
        if len(wrong):
            request = int(np.searchsorted(starts, wrong[0], side="right")) - 1
            raise bad_trace(
                self.place(self._lines[request], request),
                problem,
                f"the id at index {int(wrong[0] - starts[request])} of the request",
                hint,
            )


def _numbered(raw: Ints) -> Ints:
    """Renumber ids in order of first occurrence, which improves cache locality.

    >>> _numbered(np.array([7, 9, 7, 1])).tolist()
    [0, 1, 0, 2]
    """
    order = np.argsort(raw, kind="stable").astype(np.int32)
    ordered = raw[order]
    new = np.ones(len(raw), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    del ordered
    # The sort is stable, so the first of equal ids is the first occurrence.
    first = order[new]
    number = np.empty(len(first), np.int32)
    number[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    ids = np.empty(len(raw), np.int64)
    ids[order] = np.repeat(number, np.diff(np.append(np.flatnonzero(new), len(raw))))
    return ids


def _sorted(trace: Trace) -> Trace:
    """Return the trace with its requests ordered by time."""
    order = np.argsort(trace.times, kind="stable")
    counts = np.diff(trace.starts)[order]
    starts = np.concatenate([[0], np.cumsum(counts)])
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    ids = trace.ids[np.repeat(trace.starts[order], counts) + inside]
    lengths, outputs, times = trace.lengths[order], trace.outputs[order], trace.times[order]
    return Trace(trace.name, trace.block, ids, starts, lengths, outputs, times)
