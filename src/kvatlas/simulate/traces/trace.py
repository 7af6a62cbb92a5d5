"""`Trace`: requests, with their prompts as arrays of ids.

An id represents `block` tokens and everything before them: equal ids mean equal prefixes. An id
therefore always has the same predecessor, the same depth and the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code

Ints = NDArray[np.int64]

MOST_TOKENS = 1 << 40
PIECE = 1 << 22
"""Maximum number of ids that are processed at once."""
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
    ids: NDArray[np.int32] | Ints
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
    remarks: tuple[str, ...] = ()
    """Sentences about the file, such as estimated lengths or fields that were ignored."""
    content_known: bool = True
    """False if the trace has lengths only. Its hit rates are then unknown."""
    set_aside: int = 0
    """Number of requests that `within` left out."""
    limit: int | None = None
    """The limit that was passed to `within`, in tokens."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Total number of tokens of all prompts."""
        return int(self.lengths.sum())

    @property
    def distinct(self) -> int:
        """Number of distinct ids."""
        return int(self.ids.max(initial=-1)) + 1

    def pieces(self) -> Iterator[tuple[slice, NDArray[np.int32] | Ints]]:
        """Yield ranges of requests, each with its ids, so that temporary arrays stay small.

        A range has at most `PIECE` ids, or a single request.
        """
        begin = 0
        while begin < len(self):
            most = int(self.starts[begin]) + PIECE
            end = max(int(np.searchsorted(self.starts, most, side="right")) - 1, begin + 1)
            yield slice(begin, end), self.ids[self.starts[begin] : self.starts[end]]
            begin = end

    def notes(self) -> list[str]:
        """Return sentences that a report of this trace should contain."""
        told = [] if self.unseen is None else self.unseen.sentences()
        told += self.remarks
        if not self.content_known:
            told.append(
                "Hit rates are unknown: the trace contains the lengths of prompts, but not which "
                "prefixes they share."
            )
        if self.set_aside:
            told.append(
                f"{self.set_aside:,} requests are set aside and not replayed: prompt and first "
                f"output token exceed the limit of {self.limit:,} tokens."
            )
        return told

    def within(self, limit: int | None) -> Trace:
        """Return the trace without the requests that exceed a model's limit of tokens.

        A request is kept if its prompt and one output token fit; its output is cut at the limit.
        `set_aside` counts the requests that are left out. None means no limit.
        """
        return self if limit is None else _within(self, limit)

    def repeated(self, times: int) -> Trace:
        """Return the trace repeated `times` times. Repetitions share neither ids nor prefixes."""
        each = int(self.starts[-1])
        span = float(self.times.max(initial=0.0))
        ids = [self.ids.astype(np.int64) + n * self.distinct for n in range(times)]
        return replace(
            self,
            name=f"{self.name} x {times}",
            ids=np.concatenate(ids),
            starts=np.concatenate([[0], *(self.starts[1:] + n * each for n in range(times))]),
            lengths=np.tile(self.lengths, times),
            outputs=np.tile(self.outputs, times),
            times=np.concatenate([self.times + n * span for n in range(times)]),
            set_aside=self.set_aside * times,
        )

    def chosen(self, requests: Ints) -> Trace:
        """Return the trace with only these requests, in this order. Ids stay as they are."""
        counts = np.diff(self.starts)[requests]
        starts = np.concatenate([[0], np.cumsum(counts)])
        ids = np.empty(int(starts[-1]), self.ids.dtype)
        for place, request in enumerate(requests.tolist() if len(ids) else ()):
            mine = self.ids[self.starts[request] : self.starts[request + 1]]
            ids[starts[place] : starts[place + 1]] = mine
        return replace(
            self,
            ids=ids,
            starts=starts,
            lengths=self.lengths[requests],
            outputs=self.outputs[requests],
            times=self.times[requests],
        )


@lru_cache(maxsize=4)
def _within(trace: Trace, limit: int) -> Trace:
    """Return `trace.within(limit)`. Results are cached, because comparisons repeat calls."""
    fits = trace.lengths < limit
    found = trace if fits.all() else trace.chosen(np.flatnonzero(fits))
    outputs = np.minimum(found.outputs, limit - found.lengths)
    aside = trace.set_aside + len(trace) - len(found)
    return replace(found, outputs=outputs, set_aside=aside, limit=limit)
