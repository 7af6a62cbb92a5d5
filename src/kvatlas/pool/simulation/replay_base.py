"""`ReplayBase`: what of a plan's pools is there while a trace goes by, and what requests find.

Entries are spans of a class: the class in the high bits, the span in the low ones. A request
finds the longest prefix that every class can serve, and brings what checkpoints want kept; how
it gets its room is for those who derive. All on arrays, so that a request costs some
microseconds, and a span some nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvatlas.pool.checkpoints import Checkpoints, EveryBlock, Prompt
from kvatlas.pool.simulation.layer_classes import PoolModel
from kvatlas.pool.simulation.prompt_spans import Spans
from kvatlas.pool.traces import Ints

Progress = Callable[[float], None]

FEW_ENDS = 4
"""Windows up to which a loop over them is quicker than arrays of them."""


@dataclass(frozen=True)
class ReplayPolicy:
    """What is kept, what goes first, and in which order a request lets go."""

    eviction: str = "lru"
    checkpoints: Checkpoints = field(default_factory=EveryBlock)
    by_group: bool = False
    """Groups let go one after the other, as in vLLM, and not all of them from the end on."""
    head_first: bool = False
    """A request's first block is the first to go among its own."""
    store: bool = False
    """A store beside an engine: requests hold nothing in it, and what is new comes in last."""


@dataclass
class Outcome:
    """What came of each request, and of the pools."""

    hits: Ints
    """Spans of each request that were found."""
    refused: int = 0
    """Requests that no empty pool had room for."""
    evictions: int = 0
    """Blocks that were evicted."""
    peak: int = 0
    """Blocks in use at most, kept ones included."""


class ReplayBase:
    """The pools' content while a trace goes by."""

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
        """By class, which of its spans are there: views."""
        self._places = np.arange(int(np.diff(spans.starts).max(initial=0)) + 1)
        self._first = [one.first(self._places, spans.step) for one in model.classes]
        """By class, the first span that is needed to go on behind so many."""
        kinds = [(one.needs, one.visibility) for one in model.classes]
        self._like = [kinds.index(kind) for kind in kinds]
        """By class, the first that keeps the same places."""
        numbers = np.arange(len(kinds))[:, None]
        self._alike_needs = [
            (self._first[place], numbers[np.array(self._like) == place] << self._bits)
            for place in sorted(set(self._like))
            if model.classes[place].needs != "all"
        ]
        """Of windows and states that keep the same places: the first span that is needed to go
        on behind so many, and [class, 1] the first entry of each."""
        self._used = [0] * len(self._blocks)
        self._starts = spans.starts.tolist()
        self._reusable, self._known = spans.reusable.tolist(), spans.known.tolist()
        self.outcome = Outcome(np.zeros(len(spans.starts) - 1, np.int64))

    def _share_out(self) -> None:
        """Where checkpoints have a share of the memory, that share is a pool of its own."""
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
        """All requests, in their order."""
        requests = len(self.spans.starts) - 1
        for request in range(requests):
            self.serve(request)
            if progress and not request % 128:
                progress(request / requests)
        return self.outcome

    def serve(self, request: int) -> int:
        """One request: the spans that it found."""
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
        """Room for a request, and its entries in it; False where it can never have room."""
        raise NotImplementedError

    def _of_request(self, request: int) -> Ints:
        return self.spans.numbers[self._starts[request] : self._starts[request + 1]]

    def _prompt(self, request: int, spans: Ints) -> Prompt:
        """What is known of a request before it is computed."""
        reusable, known = self._reusable[request], self._known[request]
        hit, attention = self.find(spans[:reusable])
        asked = self.policy.checkpoints.asks_for_seen
        seen = self._count_seen(spans, attention) if asked else 0
        return Prompt(self.spans.step, hit, seen, known, len(spans), attention, reusable)

    def _count_seen(self, spans: Ints, there: int) -> int:
        """How many of the first were asked for before: as a rule all that are there, and no more.

        Whoever asks for a span asks for all before it.
        """
        seen = self._seen
        if there and not seen[spans[there - 1]]:
            there = 0  # a chunk begins there, and needs nothing before it
        if there == len(spans) or not seen[spans[there]]:
            return there
        rest = range(there, len(spans))
        return there + bisect_left(rest, True, key=lambda place: not seen[spans[place]])

    def find(self, spans: Ints) -> tuple[int, int]:
        """The longest prefix of these spans that every class can serve, and attention alone."""
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
        """Whether windows and states are there behind so many spans: most often they are."""
        for first, bases in self._alike_needs:
            needed = spans[first[end] : end] + bases
            if np.count_nonzero(self._present[needed]) < needed.size:
                return False
        return True

    # -- what a request brings and uses -----------------------------------------------

    def _entries(self, spans: Ints, hit: int, wanted: Ints) -> list[Ints]:
        """Places along the request that each class keeps: all, or those of checkpoints."""
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
        """The places of all windows that end at these ends, each once."""
        # Ends ascend and so do begins: a window adds what lies behind the end before it.
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
    """How many of the first spans are there; most prompts are new from early on."""
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
    """How many of the first are all true."""
    if not len(flags):
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first
