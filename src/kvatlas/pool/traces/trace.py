"""`Trace`: requests as arrays of hashes that stand for their prompts, block by block.

A hash stands for `block` tokens and everything before them: equal ids mean equal prefixes. So
an id has one predecessor, one depth, and one number of tokens. A trace that says otherwise is
refused with the line that says it.
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
"""Ids of a trace that are read: about 1.5 GB while they are put in order."""
MOST_TOKENS = 1 << 40
LONGEST_LINE = 64 << 20
"""Bytes of a line, or of a conversation."""
Progress = Callable[[float], None]
"""Told the part that is done, from 0 to 1."""


def bad_trace(where: str, problem: str, got: object, hint: str) -> AtlasError:
    """The refusal of a trace, with the file and the line."""
    return AtlasError(Code.BAD_TRACE, f"{where}: {problem}", got=got, hint=hint)


def check_block(block: int, where: str) -> None:
    """Refuse tokens of an id that nobody can mean."""
    if not 0 < block <= 1 << 20:
        raise bad_trace(where, "no such block size", block, "Use a size such as 512")


@dataclass(frozen=True)
class Unseen:
    """What a trace that was inferred from stored blocks does not have."""

    requests: int = 0
    """Requests that are left out: what they begin with was stored before the recording."""
    tokens: int = 0
    """Tokens that these stored."""
    gaps: int = 0
    """Places where batches of events are missing, before the first included."""
    ranks: int = 1
    """Data-parallel ranks, each of which had a cache of its own."""

    def sentences(self) -> list[str]:
        """What to know before its hit rates are believed."""
        told = [
            "Requests were inferred from the blocks that they stored. One that found all its "
            "whole blocks stored none and is not here: its tokens would have been found."
        ]
        if self.requests:
            told.append(
                f"{self.requests:,} requests, which stored {self.tokens:,} tokens, are left out: "
                "they begin with blocks that were stored before the recording, or in a gap."
            )
        if self.gaps:
            places = "1 place" if self.gaps == 1 else f"{self.gaps:,} places"
            told.append(f"Batches of events are missing at {places}.")
        if self.ranks > 1:
            told.append(
                f"{self.ranks} data-parallel ranks had a cache each; here all requests share one."
            )
        return told


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order in which they came."""

    name: str
    block: int
    """Tokens that an id stands for."""
    ids: Ints
    """Of all prompts behind each other, numbered from 0 in the order of their coming."""
    starts: Ints
    """Where each request's ids begin, and where the last's end."""
    lengths: Ints
    """Tokens of each prompt."""
    outputs: Ints
    """Tokens of each answer."""
    times: NDArray[np.float64]
    """Seconds at which each request came."""
    unseen: Unseen | None = None
    """Where requests were inferred, and not logged: what is missing."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self.lengths.sum())

    def repeated(self, times: int) -> Trace:
        """The trace so often behind itself, each time with new ids."""
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
    """Requests one by one, each checked by itself; `finish` checks them against each other."""

    def __init__(
        self, name: str, block: int, unit: str = "line", *, numbered: bool = False
    ) -> None:
        self.name, self.block, self.unit = name, block, unit
        self._numbered = numbered
        """Whether a line has many requests, so that their numbers are said too."""
        self._ids, self._starts = array("q"), array("q", [0])
        self._lengths, self._outputs, self._times = array("q"), array("q"), array("d")
        self._where: list[tuple[int, str]] = []
        """(first request, file) of each file."""
        self._lines = array("q")

    def __len__(self) -> int:
        return len(self._lengths)

    def begin(self, file: str) -> None:
        """What follows is from this file."""
        self._where.append((len(self), file))

    def place(self, line: int, request: int | None = None) -> str:
        """Where a request is, or the next one."""
        first, file = self._where[-1]
        if request is None:
            request = len(self)
        else:
            first, file = self._where[bisect_right(self._where, request, key=itemgetter(0)) - 1]
        number = f", request {request - first + 1}" if self._numbered else ""
        return f"{file}, {self.unit} {line}{number}"

    def add(self, line: int, ids: Sequence[int], length: int, output: int, time: float) -> None:
        """One request, as its line says."""
        where = self.place(line)
        if not (isfinite(time) and time >= 0):
            raise bad_trace(where, "a request comes at a time from 0 on", time, "Correct the time")
        if not (0 <= length <= MOST_TOKENS and 0 <= output <= MOST_TOKENS):
            got = f"{length} and {output} tokens"
            raise bad_trace(where, "lengths are from 0 on", got, "Correct the lengths")
        whole, begun = length // self.block, -(-length // self.block)
        if len(ids) not in (whole, begun):
            problem = f"the ids are not those of the prompt's blocks of {self.block} tokens"
            got = f"{len(ids)} ids for {length} tokens"
            raise bad_trace(where, problem, got, f"Give {whole} or {begun} ids, or the block size")
        if len(self._ids) + len(ids) > MOST_IDS:
            problem = f"a trace has at most {MOST_IDS:,} ids"
            raise bad_trace(where, problem, "more", "Split it, or use longer blocks")
        try:
            self._ids.extend(ids)
        except (OverflowError, TypeError):
            hint = "Ids are whole numbers below 2^63"
            raise bad_trace(where, "an id is none", str(ids)[:60], hint) from None
        self._starts.append(len(self._ids))
        self._lengths.append(length)
        self._outputs.append(output)
        self._times.append(time)
        self._lines.append(line)

    def finish(self, *, by_time: bool = False) -> Trace:
        """The trace, its ids numbered anew and held to be a tree."""
        if not len(self):
            hint = "A trace has one request a line"
            raise bad_trace(self.name, "there is no request", "nothing", hint)
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
        """Every id behind one other, and of one number of tokens."""
        begins = starts[:-1][np.diff(starts) > 0]
        # Ids are numbered as they come, so each one's first is where a new maximum is.
        first = np.zeros(int(ids.max(initial=-1)) + 1, np.int32)
        first[ids[::-1]] = np.arange(len(ids), dtype=np.int32)[::-1]
        before = np.empty(len(ids), np.int32)
        before[1:] = ids[:-1]
        before[begins] = -1
        problem, hint = "an id follows another id than before", "Ids stand for whole prefixes"
        self._check_alike(before, first[ids], starts, problem, hint)
        # All but the last block of a prompt are full.
        tokens = np.full(len(ids), self.block, np.int32)
        counts = np.diff(starts)
        last = lengths - (counts - 1) * self.block
        some = counts > 0
        tokens[starts[1:][some] - 1] = np.minimum(last, self.block)[some]
        problem = "an id stands for another number of tokens than before"
        hint = "The last block of a prompt has an id of its own while it is not full"
        self._check_alike(tokens, first[ids], starts, problem, hint)

    def _check_alike(
        self, facts: NDArray[np.int32], first: NDArray[np.int32], starts: Ints, problem: str,
        hint: str,
    ) -> None:  # fmt: skip
        """Refuse the first entry of which something else is said than where its id came first."""
        wrong = np.flatnonzero(facts != facts[first])
        if len(wrong):
            request = int(np.searchsorted(starts, wrong[0], side="right")) - 1
            got = f"entry {int(wrong[0] - starts[request])} of its ids"
            raise bad_trace(self.place(self._lines[request], request), problem, got, hint)


def _numbered(raw: Ints) -> Ints:
    """Ids numbered in the order of their coming, which is kind to caches.

    >>> _numbered(np.array([7, 9, 7, 1])).tolist()
    [0, 1, 0, 2]
    """
    order = np.argsort(raw, kind="stable").astype(np.int32)
    ordered = raw[order]
    new = np.ones(len(raw), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    del ordered
    # Stable, so the first of equals is where an id came first.
    first = order[new]
    number = np.empty(len(first), np.int32)
    number[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    ids = np.empty(len(raw), np.int64)
    ids[order] = np.repeat(number, np.diff(np.append(np.flatnonzero(new), len(raw))))
    return ids


def _sorted(trace: Trace) -> Trace:
    """The same requests in the order of their times."""
    order = np.argsort(trace.times, kind="stable")
    counts = np.diff(trace.starts)[order]
    starts = np.concatenate([[0], np.cumsum(counts)])
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    ids = trace.ids[np.repeat(trace.starts[order], counts) + inside]
    lengths, outputs, times = trace.lengths[order], trace.outputs[order], trace.times[order]
    return Trace(trace.name, trace.block, ids, starts, lengths, outputs, times)
