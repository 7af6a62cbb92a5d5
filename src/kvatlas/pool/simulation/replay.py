"""`Replay`: a trace's requests through the pools of a plan, one after the other.

Entries are spans of a class: the class in the high bits, the span in the low ones. For each
request: the longest prefix that every class can serve; room for what is new; what was used is
ranked. All on arrays, so that a request costs some microseconds, and a span some nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvatlas.geometry import ceil_div
from kvatlas.pool.checkpoints import Checkpoints, EveryBlock, Prompt
from kvatlas.pool.eviction import EVICTIONS, Use
from kvatlas.pool.simulation.layer_classes import LayerClass, PoolModel
from kvatlas.pool.simulation.release_order import along_the_request, by_group
from kvatlas.pool.simulation.spans import Spans
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


class Replay:
    """The pools' content while a trace goes by."""

    def __init__(
        self,
        model: PoolModel,
        spans: Spans,
        policy: ReplayPolicy,
        *,
        in_flight: Ints | None = None,
        saved: Callable[[LayerClass, Ints], NDArray[np.float64]] | None = None,
    ) -> None:
        self.model, self.spans, self.policy = model, spans, policy
        self._share_out()
        self._bits = max(spans.count - 1, 1).bit_length()
        entries = len(model.classes) << self._bits
        self._present = np.zeros(entries, bool)
        self._pinned = np.zeros(entries, bool)
        self._seen = np.zeros(spans.count, bool)
        self._rows = [
            self._present[place << self._bits : (place + 1) << self._bits]
            for place in range(len(model.classes))
        ]
        """By class, which of its spans are there: views."""
        self._in_parts = not isinstance(policy.checkpoints, EveryBlock)
        self._sizes = np.array([one.blocks for one in model.classes], np.int64)
        self._alike = len(set(self._sizes.tolist())) == 1
        """Whether all entries are equally large."""
        self._places = np.arange(int(np.diff(spans.starts).max(initial=0)) + 1)
        self._first = [one.first(self._places, spans.step) for one in model.classes]
        """By class, the first span that is needed to go on behind so many."""
        kinds = [(one.needs, one.visibility) for one in model.classes]
        self._like = [kinds.index(kind) for kind in kinds]
        """By class, the first that keeps the same places."""
        kind = EVICTIONS[policy.eviction]
        sized = None if self._alike else self._size
        self._evictions = [kind(entries, sized) for _ in self._blocks]
        self._next = spans.next_uses() if "next_use" in kind.needs else None
        self._saved = saved if "saved" in kind.needs else None
        self._used = [0] * len(self._blocks)
        requests = len(spans.starts) - 1
        self._in_flight = np.zeros((len(self._blocks), requests), np.int64)
        if in_flight is not None and not policy.store:
            self._in_flight[: len(in_flight)] = in_flight
        self._starts = spans.starts.tolist()
        self._reusable, self._known = spans.reusable.tolist(), spans.known.tolist()
        self.outcome = Outcome(np.zeros(requests, np.int64))

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
        parts = self._entries(spans, hit, wanted)
        if self.policy.store:
            self._store(request, parts)
        elif not self._admit(request, spans, hit, wanted, parts):
            self.outcome.refused += 1
            hit = 0
        self.outcome.hits[request] = hit
        return hit

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
        longest = len(spans)
        others = []
        for place, one in enumerate(self.model.classes):
            if one.needs == "all":
                longest = _leading_there(self._rows[place], spans[:longest])
            else:
                others.append(place)
        if not longest or self._can_serve(others, spans, longest):
            return longest, longest
        good = np.ones(longest + 1, bool)
        for place in others:
            here = self._rows[place][spans[:longest]]
            if self.model.classes[place].needs == "state":
                good[1:] &= here
            elif np.count_nonzero(here) < longest:
                missing = np.zeros(longest + 1, np.int32)
                (~here).cumsum(out=missing[1:])
                good &= missing == missing[self._first[place][: longest + 1]]
        hit = longest - int(good[::-1].argmax())
        return hit, longest if len(others) < len(self.model.classes) else hit

    def _can_serve(self, classes: list[int], spans: Ints, end: int) -> bool:
        """Whether windows and states are there behind so many spans: most often they are."""
        for place in classes:
            needed = spans[self._first[place][end] : end]
            if np.count_nonzero(self._rows[place][needed]) < len(needed):
                return False
        return True

    # -- what a request brings and uses -----------------------------------------------

    def _entries(self, spans: Ints, hit: int, wanted: Ints) -> list[Ints]:
        """Places along the request that each class keeps: all, or those of checkpoints."""
        ends = np.concatenate([[hit], wanted]) if hit else wanted
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

    def _admit(self, request: int, spans: Ints, hit: int, wanted: Ints, parts: list[Ints]) -> bool:
        """Room for a request, and its entries in it; False where it can never have room."""
        fitting = self._fitting(request, spans, hit, wanted, parts)
        if fitting is None:
            return False
        entries, places = self._in_order(request, fitting)
        here = self._present[entries]
        new = entries[~here]
        for pool in range(len(self._evictions)):
            need = self._room(self._of_pool(new, pool))
            held = int(self._in_flight[pool, request])
            self._evict(pool, self._used[pool] + need + held - self._blocks[pool], entries[here])
            self._used[pool] += need
            self.outcome.peak = max(self.outcome.peak, sum(self._used) + held)
        self._present[new] = True
        self._rank(request, entries, places)
        return True

    def _fitting(
        self, request: int, spans: Ints, hit: int, wanted: Ints, parts: list[Ints]
    ) -> list[Ints] | None:
        """What of a request has room in an empty pool: the last of its checkpoints, if not all."""
        while self._too_much(request, parts):
            if not len(wanted):
                return None
            wanted = wanted[-(len(wanted) // 2) :] if len(wanted) > 1 else wanted[:0]
            parts = self._entries(spans, hit, wanted)
        return parts

    def _too_much(self, request: int, parts: list[Ints]) -> bool:
        needs = self._in_flight[:, request].tolist()
        for one, pool, part in zip(self.model.classes, self._pools, parts, strict=True):
            needs[pool] += one.blocks * len(part)
            if needs[pool] > self._blocks[pool]:
                return True
        return False

    def _store(self, request: int, parts: list[Ints]) -> None:
        """Entries come in, and then whatever goes first leaves, be it one of them.

        Head first they come in one after the other: what was there may be gone, and have to
        come in again, when its turn comes.
        """
        entries, places = self._in_order(request, parts)
        while len(entries):
            here = self._present[entries]
            count = len(entries)
            if self.policy.head_first:
                count = int(np.argmax(here != here[0])) or count
            self._bring(request, entries[:count], places[:count])
            entries, places = entries[count:], places[count:]
        self.outcome.peak = max(self.outcome.peak, sum(self._used))

    def _bring(self, request: int, entries: Ints, places: Ints) -> None:
        new = entries[~self._present[entries]]
        self._present[new] = True
        self._rank(request, entries, places)
        for pool in range(len(self._evictions)):
            self._used[pool] += self._room(self._of_pool(new, pool))
            self._evict(pool, self._used[pool] - self._blocks[pool])

    def _in_order(self, request: int, parts: list[Ints]) -> tuple[Ints, Ints]:
        """(entries, their places along the request), the first to go first."""
        spans = self._of_request(request)
        entries = []
        for number, (one, part) in enumerate(zip(self.model.classes, parts, strict=True)):
            mine = spans if one.needs == "all" else spans[part]
            entries.append(mine + (number << self._bits))
        if not self.policy.by_group:
            return along_the_request(entries, parts, head_first=self.policy.head_first)
        needs = [
            self._reusable[request] if one.needs == "state" else first[len(spans)]
            for one, first in zip(self.model.classes, self._first, strict=True)
        ]
        return by_group(self.model.classes, needs, entries, parts, in_parts=self._in_parts)

    def _rank(self, request: int, entries: Ints, places: Ints) -> None:
        later = saved = None
        if self._next is not None:
            later = self._next[self.spans.starts[request] + places]
        if self._saved is not None:
            saved = np.empty(len(entries))
            kinds = entries >> self._bits
            for place, one in enumerate(self.model.classes):
                mine = kinds == place
                saved[mine] = self._saved(one, places[mine])
        use = Use(request + 1, saved, later)
        for pool, eviction in enumerate(self._evictions):
            if len(self._evictions) == 1:
                eviction.used(entries, use)
            else:
                mine = self._pool_of(entries) == pool
                eviction.used(entries[mine], use.part(mine))

    def _size(self, entries: Ints) -> Ints:
        """Blocks of each entry."""
        sizes: Ints = self._sizes[entries >> self._bits]
        return sizes

    def _room(self, entries: Ints) -> int:
        """Blocks of all these entries."""
        if self._alike:
            return len(entries) * int(self._sizes[0])
        return int(self._size(entries).sum())

    def _of_pool(self, entries: Ints, pool: int) -> Ints:
        return entries if len(self._evictions) == 1 else entries[self._pool_of(entries) == pool]

    def _pool_of(self, entries: Ints) -> Ints:
        pools: Ints = np.array(self._pools)[entries >> self._bits]
        return pools

    def _evict(self, pool: int, blocks: int, needed: Ints | None = None) -> None:
        """Free so many blocks of a pool, none of them those of entries that are needed."""
        if blocks <= 0:
            return
        if needed is not None:
            self._pinned[needed] = True
        each = int(self._sizes[0]) if self._alike else 1
        victims = self._victims(pool, ceil_div(blocks, each))
        if needed is not None:
            self._pinned[needed] = False
        freed = self._room(victims)
        self._gone(victims)
        self._used[pool] -= freed
        self.outcome.evictions += freed

    def _victims(self, pool: int, blocks: int) -> Ints:
        return self._evictions[pool].victims(blocks, self._pinned)

    def _gone(self, victims: Ints) -> None:
        """Entries that are evicted are not there any more."""
        self._present[victims] = False


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
