"""`ReplayBase`: the content of a plan's pools during a replay, and the hits of requests.

An entry is a span of one layer class. It is represented by an integer with the class in the high
bits and the span in the low bits. A request finds the longest prefix that every class can serve,
and adds its new entries. Subclasses define which entries are evicted for new ones. All operations
work on arrays, so a request takes microseconds and a span takes nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvatlas.pool.checkpoints import Checkpoints, EveryBlock, Prompt
from kvatlas.simulate.layer_classes import PoolModel
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.traces import Ints

Progress = Callable[[float], None]

FEW_ENDS = 4
"""Maximum number of windows for which a Python loop is faster than numpy."""


@dataclass(frozen=True)
class ReplayPolicy:
    """The checkpoints, the eviction and the release order of a replay."""

    eviction: str = "lru"
    checkpoints: Checkpoints = field(default_factory=EveryBlock)
    by_group: bool = False
    """Whether groups release their blocks one after the other, as in vLLM."""
    head_first: bool = False
    """Whether the first block of a request is evicted before its other blocks."""
    store: bool = False
    """Whether the pool is an external store, in which running requests hold no blocks."""


@dataclass
class Outcome:
    """The hits of each request, and statistics of the pools."""

    hits: Ints
    """Number of spans that each request found."""
    refused: int = 0
    """Number of requests that do not fit even into empty pools."""
    evictions: int = 0
    """Number of evicted blocks."""
    peak: int = 0
    """Maximum number of blocks in use, including kept ones."""


class ReplayBase:
    """Base class of replays: the content of the pools, and the hits of requests."""

    def __init__(self, model: PoolModel, spans: Spans, policy: ReplayPolicy) -> None:
        self.model, self.spans, self.policy = model, spans, policy
        self._share_out()
        self._bits = max(spans.count - 1, 1).bit_length()
        self._present = np.zeros(len(model.classes) << self._bits, bool)
        self._seen = np.zeros(spans.count, bool)
        self._rows = [
            self._present[place << self._bits : (place + 1) << self._bits]
            for place in range(len(model.classes))
        ]
        """For each class, whether each span is cached: views of `_present`."""
        self._places = np.arange(int(np.diff(spans.starts).max(initial=0)) + 1)
        self._first = [one.first(self._places, spans.step) for one in model.classes]
        """For each class, the first span needed to continue after n spans, at index n."""
        kinds = [(one.needs, one.visibility) for one in model.classes]
        self._like = [kinds.index(kind) for kind in kinds]
        """For each class, the index of the first class that keeps the same places."""
        numbers = np.arange(len(kinds))[:, None]
        self._alike_needs = [
            (self._first[place], numbers[np.array(self._like) == place] << self._bits)
            for place in sorted(set(self._like))
            if model.classes[place].needs != "all"
        ]
        """One pair for all windows or states that keep the same places: the first span needed to
        continue after n spans, at index n; and [class, 1] the first entry of each class."""
        self._used = [0] * len(self._blocks)
        self._reusable, self._known = spans.reusable.tolist(), spans.known.tolist()
        self.outcome = Outcome(np.zeros(len(spans.starts) - 1, np.int64))

    def _share_out(self) -> None:
        """Divide a pool in two if checkpoints may take only a share of it.

        The share of the checkpoints becomes a separate pool.
        """
        share, classes = self.policy.checkpoints.share, self.model.classes
        self._blocks = list(self.model.blocks)
        self._pools = [one.pool for one in classes]
        if share is None or all(one.needs == "all" for one in classes):
            return
        for pool, blocks in enumerate(self.model.blocks):
            kinds = {one.needs == "all" for one in classes if one.pool == pool}
            if len(kinds) == 2:
                self._blocks[pool] = blocks - int(share * blocks)
                self._blocks.append(int(share * blocks))
                for place, one in enumerate(classes):
                    if one.pool == pool and one.needs != "all":
                        self._pools[place] = len(self._blocks) - 1

    def run(self, progress: Progress | None = None) -> Outcome:
        """Replay all requests in order and return their hits."""
        requests = len(self.spans.starts) - 1
        for request in range(requests):
            self.serve(request)
            if progress and not request % 128:
                progress(request / requests)
        return self.outcome

    def serve(self, request: int) -> int:
        """Replay one request and return how many of its leading spans were cached."""
        spans = self._of_request(request)
        prompt = self._prompt(request, spans)
        hit = prompt.hit
        if self.policy.checkpoints.asks_for_seen:
            self._seen[spans[prompt.seen :]] = True
        wanted = self.policy.checkpoints.positions(prompt)
        if not self._admit(request, spans, hit, wanted, self._entries(spans, hit, wanted)):
            self.outcome.refused += 1
            hit = 0
        self.outcome.hits[request] = hit
        return hit

    def _admit(self, request: int, spans: Ints, hit: int, wanted: Ints, parts: list[Ints]) -> bool:
        """Make space for a request and add its entries. Return False if it can never fit.

        `spans` are its span numbers, of which the first `hit` are cached. `wanted` are the
        checkpoints to keep. `parts` are the indices of the spans to keep in each layer class.
        """
        raise NotImplementedError

    def _of_request(self, request: int) -> Ints:
        return self.spans.of_request(request)

    def _prompt(self, request: int, spans: Ints) -> Prompt:
        """Return a request's prompt in the form that checkpoint policies take."""
        reusable, known = self._reusable[request], self._known[request]
        hit, attention = self.find(spans[:reusable])
        asked = self.policy.checkpoints.asks_for_seen
        seen = self._count_seen(spans, attention) if asked else 0
        return Prompt(self.spans.step, hit, seen, known, len(spans), attention, reusable)

    def _count_seen(self, spans: Ints, there: int) -> int:
        """Return how many leading spans of a request were part of an earlier request.

        The search starts at `there`, the number of cached leading spans, which is usually the
        result.
        """
        seen = self._seen
        if there and not seen[spans[there - 1]]:
            there = 0  # cached, but not seen: the start of a chunk, which needs no earlier span
        if there == len(spans) or not seen[spans[there]]:
            return there
        rest = range(there, len(spans))
        return there + bisect_left(rest, True, key=lambda place: not seen[spans[place]])

    def find(self, spans: Ints) -> tuple[int, int]:
        """Return the number of leading spans after which a request can continue.

        The second result is the number of leading spans that full attention has cached.
        """
        longest, others = len(spans), []
        for place, one in enumerate(self.model.classes):
            if one.needs == "all":
                longest = _leading_there(self._rows[place], spans[:longest])
            else:
                others.append((place, one))
        if not longest or self._can_serve(spans, longest):
            return longest, longest
        good = np.ones(longest + 1, bool)
        for place, one in others:
            here = self._rows[place][spans[:longest]]
            if one.needs == "state":
                good[1:] &= here
            elif np.count_nonzero(here) < longest:
                missing = np.zeros(longest + 1, np.int32)
                (~here).cumsum(out=missing[1:])
                good &= missing == missing[self._first[place][: longest + 1]]
        hit = longest - int(good[::-1].argmax())
        return hit, longest if len(others) < len(self.model.classes) else hit

    def _can_serve(self, spans: Ints, end: int) -> bool:
        """Return whether all windows and states needed to continue after `end` spans are cached."""
        for first, bases in self._alike_needs:
            needed = spans[first[end] : end] + bases
            if np.count_nonzero(self._present[needed]) < needed.size:
                return False
        return True

    # -- entries of a request ---------------------------------------------------------

    def _entries(self, spans: Ints, hit: int, wanted: Ints) -> list[Ints]:
        """Return the indices of the spans that each class keeps for a request.

        Full attention keeps all spans. Windows and recurrent layers keep the spans that are needed
        to continue after the first `hit` spans and after each checkpoint in `wanted`.
        """
        ends = np.concatenate([self._places[hit : hit + 1], wanted]) if hit else wanted
        parts: list[Ints] = []
        for one, first, like in zip(self.model.classes, self._first, self._like, strict=True):
            if like < len(parts):
                parts.append(parts[like])
            elif one.needs == "all":
                parts.append(self._places[: len(spans)])
            elif one.needs == "state":
                parts.append(ends - 1)
            else:
                parts.append(self._windows(ends, first))
        return parts

    def _windows(self, ends: Ints, first: Ints) -> Ints:
        """Return the indices of all spans in the windows that end at `ends`, without duplicates.

        The window that ends after n spans consists of spans first[n] .. n - 1.
        """
        # Ends and begins ascend, so a window adds only the places after the previous end.
        if len(ends) <= FEW_ENDS:
            pieces, before = [self._places[:0]], 0
            for end in ends.tolist():
                pieces.append(self._places[max(int(first[end]), before) : end])
                before = end
            return np.concatenate(pieces)
        begins = first[ends]
        np.maximum(begins[1:], ends[:-1], out=begins[1:])
        counts = ends - begins
        behind = counts.cumsum()
        total = int(behind[-1])
        if total == ends[-1] - begins[0]:
            return self._places[begins[0] : ends[-1]]
        places: Ints = (begins - behind + counts).repeat(counts) + self._places[:total]
        return places


def _leading_there(there: NDArray[np.bool_], spans: Ints) -> int:
    """Return how many leading elements of `spans` are cached; `there` has a flag for each span."""
    start, count = 0, 64
    while start < len(spans):
        part = there[spans[start : start + count]]
        found = leading(part)
        start += found
        if found < len(part):
            break
        count *= 4
    return start


def leading(flags: NDArray[np.bool_]) -> int:
    """Return the number of leading true values."""
    if not len(flags):
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first
