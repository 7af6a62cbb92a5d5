"""`TraceBuilder`: build a trace request by request.

Ids are numbered in chunks. A trace takes 4 bytes per id, about 30 bytes per distinct prefix and 40
bytes per request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from math import isfinite
from typing import NamedTuple

import numpy as np

from kvatlas.errors import AtlasError
from kvatlas.simulate.traces.prefix_numbers import (
    MOST_DISTINCT,
    Hashes,
    PrefixNumbers,
    mixed,
    prefix_hashes,
)
from kvatlas.simulate.traces.trace import MOST_TOKENS, Trace, bad_trace

_SINCE_1970 = 1e8
"""Larger times, in seconds, count from 1970. `finish` makes them relative to the first request."""
CHUNK = 1 << 20
"""Number of ids that are collected before they are numbered."""


class TraceRequest(NamedTuple):
    """One request of a trace, as read from a file."""

    length: int
    """Number of tokens of the prompt."""
    ids: Sequence[int | str] | None
    """One id for each block of the prompt, or None if the content is unknown."""
    output: int = 0
    """Number of tokens of the answer."""
    time: float | None = None
    """Arrival time in seconds, or None if it is unknown."""
    scope: int = 0
    """Equal ids with different scopes, such as different conversations, are different ids."""


class TraceBuilder:
    """Builds a trace request by request."""

    def __init__(self, name: str, block: int) -> None:
        self.name, self.block = name, block
        self._raw, self._of_prompts = array("Q"), array("q")
        """The ids of requests that are not numbered yet; and of each of these requests the number
        of ids, the number of tokens in an incomplete last block, and the scope."""
        self._numbers = PrefixNumbers()
        self._ids = array("i")
        self._starts = array("q", [0])
        self._lengths, self._outputs, self._times = array("q"), array("q"), array("d")
        self._unknown = self._untimed = 0
        """Number of requests without ids, and without a time."""

    def __len__(self) -> int:
        return len(self._lengths)

    def _check(self, where: str, request: TraceRequest) -> None:
        """Raise an error if a request is invalid. `where` is its file and line."""
        length, ids, output, time, _ = request
        if time is not None and not (isfinite(time) and time >= 0):
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
        if ids is not None and len(ids) not in (whole, begun):
            raise bad_trace(
                where,
                f"the prompt must have one id for each block of {self.block} tokens",
                f"{len(ids)} ids for a prompt of {length} tokens",
                f"Write {begun} ids, or pass the block size of the trace (--trace-block)",
            )

    def add(self, where: str, request: TraceRequest) -> None:
        """Add a request, or raise an error if it is invalid. `where` is its file and line."""
        self.add_all([(where, request)])

    def add_all(self, requests: Sequence[tuple[str, TraceRequest]]) -> None:
        """Add several requests, each with its file and line. If one is invalid, none is added."""
        before = len(self._raw)
        try:
            for where, request in requests:
                self._check(where, request)
                self._add_ids(where, request.ids or ())
        except AtlasError:
            del self._raw[before:]
            raise
        for _, (length, ids, output, time, scope) in requests:
            count = len(ids or ())
            partial = length % self.block if count * self.block > length else 0
            self._of_prompts.extend((count, partial, scope))
            self._starts.append(self._starts[-1] + count)
            self._lengths.append(length)
            self._outputs.append(output)
            self._times.append(time or 0.0)
            self._unknown += ids is None
            self._untimed += time is None
        if len(self._raw) >= CHUNK or len(self._of_prompts) >= CHUNK:
            self._number()

    def _add_ids(self, where: str, ids: Sequence[int | str]) -> None:
        before = len(self._raw)
        try:
            self._raw.extend(ids)  # type: ignore[arg-type]  # fast path: integers from 0 to 2**64
        except (OverflowError, TypeError):
            del self._raw[before:]
            self._raw.extend(_as_hashes(where, ids))

    def _number(self) -> None:
        """Number the ids of the requests that were added since the last call."""
        raw: Hashes = np.array(self._raw, np.uint64)
        counts, partial, scopes = np.array(self._of_prompts, np.int64).reshape(-1, 3).T
        self._raw, self._of_prompts = array("Q"), array("q")
        if len(self._numbers) + len(raw) > MOST_DISTINCT:
            raise bad_trace(
                self.name,
                f"a trace can have at most {MOST_DISTINCT:,} distinct ids",
                f"up to {len(self._numbers) + len(raw):,} ids",
                "Split the trace into several files, or write ids of larger blocks",
            )
        if len(raw):
            if scopes.any():
                raw ^= np.repeat(mixed(scopes.astype(np.uint64)), counts)
            hashes = prefix_hashes(raw, counts, partial)
            self._ids.frombytes(self._numbers.number(hashes, raw).tobytes())

    def finish(self, remarks: Sequence[str] = ()) -> Trace:
        """Return all requests, ordered by time, as a trace with these `remarks`."""
        if not len(self):
            raise bad_trace(
                self.name,
                "the trace contains no requests",
                "an empty trace",
                "Write one request per line",
            )
        self._number()
        times = np.frombuffer(self._times, np.float64)
        if times.min() > _SINCE_1970:
            times = times - times.min()
        trace = Trace(
            self.name,
            self.block,
            np.frombuffer(self._ids, np.int32) if self._ids else np.empty(0, np.int32),
            np.frombuffer(self._starts, np.int64),
            np.frombuffer(self._lengths, np.int64),
            np.frombuffer(self._outputs, np.int64),
            times,
            remarks=(*remarks, *self._remarks()),
            content_known=self._unknown < len(self),
        )
        late = np.flatnonzero(np.diff(times) < 0)
        return trace.chosen(np.argsort(times, kind="stable")) if len(late) else trace

    def _remarks(self) -> list[str]:
        """Return sentences for the user about unusual ids, missing ids and missing times."""
        told = []
        if repeated := self._numbers.repeated_ids():
            told.append(
                f"{repeated:,} ids follow different ids, or have another length, than in an "
                "earlier request. Ids are read as the content of single blocks: prompts share "
                "their first equal ids."
            )
        if 0 < self._unknown < len(self):
            told.append(
                f"{self._unknown:,} requests have no ids; they share no prefix with others."
            )
        if self._untimed == len(self):
            told.append("The trace has no arrival times: requests run in the order of the file.")
        elif self._untimed:
            told.append(f"{self._untimed:,} requests without a time count as arriving at 0 s.")
        return told


def _as_hashes(where: str, ids: Sequence[int | str]) -> list[int]:
    """Return ids as unsigned 64-bit integers: negative ones wrap around, strings are hashed.

    >>> _as_hashes("a.jsonl, line 1", [-1, 5]), _as_hashes("a.jsonl, line 1", ["x"]) == ["x"]
    ([18446744073709551615, 5], False)
    """
    found = []
    for one in ids:
        if isinstance(one, str):
            one = int.from_bytes(blake2b(one.encode(), digest_size=8).digest())
        if not -(1 << 63) <= one < 1 << 64:
            raise bad_trace(
                where,
                "an id has more than 64 bits",
                f"id {str(one)[:60]}",
                "Use integers of at most 64 bits, or strings",
            )
        found.append(one % (1 << 64))
    return found
