"""A cache that keeps every token of every group by itself, written to be read and not to be fast.

A request is a tuple of tokens. A cell is (group, prefix): what the group keeps for the last
token of that prefix. An entry is what is evicted as one: the cells of a span in alike groups,
or a state. Nothing here knows arrays, spans of a trace, or how the simulation finds a hit.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import log2
from typing import Any

Tokens = tuple[Any, ...]


@dataclass(frozen=True)
class OracleClass:
    """Alike groups: `needs` all, window or state."""

    needs: str
    pool: int
    size: int
    window: int = 0
    chunk: int = 0

    def sees_from(self, position: int) -> int:
        """The first token that the token at `position` sees."""
        if self.needs == "all":
            return 0
        if self.chunk:
            return position - position % self.chunk
        return max(0, position - self.window + 1)


@dataclass
class Entry:
    cls: int
    prefix: Tokens
    place: int
    """The span's number along its request."""
    born: int = 0
    last: int = 0
    order: int = 0
    uses: int = 0
    next_use: int = 0
    rank: float = 0.0


@dataclass
class Oracle:
    """`serve` requests one after the other; `hits` are in tokens."""

    step: int
    classes: list[OracleClass]
    blocks: list[int]
    eviction: str
    checkpoints: str
    requests: list[Tokens]
    known: list[int]
    """Tokens of each request that lie in whole blocks of the trace."""
    identified: list[int]
    """Tokens of each request that the trace has ids for: the rest is kept by nobody."""
    in_flight: list[list[int]]
    by_group: bool = False
    entries: dict[tuple[int, Tokens], Entry] = field(default_factory=dict)
    clocks: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    small: dict[int, list[tuple[int, Tokens]]] = field(default_factory=lambda: defaultdict(list))
    main: dict[int, list[tuple[int, Tokens]]] = field(default_factory=lambda: defaultdict(list))
    ghosts: dict[int, list[tuple[int, Tokens]]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[tuple[int, Tokens], int] = field(default_factory=dict)

    def run(self) -> list[int]:
        return [self.serve(number) for number in range(len(self.requests))]

    # -- finding ------------------------------------------------------------------------

    def has(self, cls: int, tokens: Tokens, position: int) -> bool:
        """Whether a class has the cell of one token."""
        end = (position // self.step + 1) * self.step
        return self.kept_anywhere((cls, tokens[:end])) and end <= len(tokens)

    def kept_anywhere(self, name: tuple[int, Tokens]) -> bool:
        """Whether an entry can be found."""
        return name in self.entries

    def serves(self, tokens: Tokens, count: int) -> bool:
        for number, cls in enumerate(self.classes):
            if cls.needs == "state":
                if count and not self.kept_anywhere((number, tokens[:count])):
                    return False
            elif not all(self.has(number, tokens, p) for p in range(cls.sees_from(count), count)):
                return False
        return True

    def longest(self, number: int) -> int:
        """The last token is computed anyway."""
        tokens = self.requests[number]
        most = min(self.identified[number], len(tokens) - 1)
        good = [n for n in range(0, most + 1, self.step) if self.serves(tokens, n)]
        return max(good, default=0)

    def attention(self, number: int, hit: int) -> int:
        """The longest prefix that groups which keep everything have; the hit without such."""
        tokens = self.requests[number]
        whole = [n for n, cls in enumerate(self.classes) if cls.needs == "all"]
        most = min(self.identified[number], len(tokens) - 1)
        ends = range(0, most + 1, self.step)
        good = [n for n in ends if all(self.has(c, tokens, p) for c in whole for p in range(n))]
        return max(good, default=0) if whole else hit

    # -- what is kept -------------------------------------------------------------------

    def ends(self, number: int, hit: int) -> list[int]:
        tokens, known = self.requests[number], self.known[number] // self.step * self.step
        whole = self.identified[number] // self.step * self.step
        if self.checkpoints == "every-block":
            chosen = set(range(self.step, whole + 1, self.step))
        elif self.checkpoints == "prompt-end":
            chosen = {known}
        elif self.checkpoints == "branch-points":
            shared = [_common(tokens, other) for other in self.requests[:number]]
            seen = max((n // self.step * self.step for n in shared), default=0)
            chosen = {known, min(seen, known)}
        elif self.checkpoints == "vllm-default":
            last = min(known, (len(tokens) - 1) // self.step * self.step if tokens else 0)
            chosen = {last, min(self.attention(number, hit), last)}
        else:
            apart = max(int(self.checkpoints.removeprefix("every-")), self.step)
            chosen = {known}
            chosen |= {n // self.step * self.step for n in range(apart, whole + 1, apart)}
        return sorted(end for end in chosen if end > hit)

    def kept(self, number: int, ends: list[int]) -> list[list[int]]:
        """Spans of each class to keep."""
        whole = self.identified[number] // self.step
        found = []
        for cls in self.classes:
            if cls.needs == "all":
                found.append(list(range(whole)))
            elif cls.needs == "state":
                found.append(sorted({end // self.step - 1 for end in ends}))
            else:
                seen = {p // self.step for end in ends for p in range(cls.sees_from(end), end)}
                found.append(sorted(seen))
        return found

    def size(self, kept: list[list[int]], pool: int) -> int:
        pairs = zip(self.classes, kept, strict=True)
        return sum(cls.size * len(spans) for cls, spans in pairs if cls.pool == pool)

    def in_order(self, kept: list[list[int]], reusable: int, whole: int) -> list[tuple[int, int]]:
        """(class, span), the first to go first."""
        pairs = [(number, span) for number, spans in enumerate(kept) for span in spans]
        if not self.by_group:
            return sorted(pairs, key=lambda pair: (-pair[1], -pair[0]))
        passed: list[tuple[int, int]] = []
        left: list[tuple[int, int]] = []
        last: list[tuple[int, int]] = []
        for number, spans in enumerate(kept):
            cls = self.classes[number]
            state = cls.needs == "state"
            first = reusable if state else cls.sees_from(whole)
            for span in reversed(spans):
                if span >= first // self.step:
                    last.append((number, span))
                elif state and self.checkpoints != "every-block":
                    passed.append((number, span))
                else:
                    left.append((number, span))
        passed.sort(key=lambda pair: (pair[1], pair[0]))
        return passed + left + last

    # -- serving ------------------------------------------------------------------------

    def serve(self, number: int) -> int:
        tokens = self.requests[number]
        hit = self.longest(number)
        ends = self.ends(number, hit)
        while True:
            kept = self.kept(number, ([hit] if hit else []) + ends)
            held = self.in_flight[number]
            fits = all(
                self.size(kept, pool) + held[pool] <= blocks
                for pool, blocks in enumerate(self.blocks)
            )
            if fits:
                break
            if not ends:
                return 0
            ends = ends[-(len(ends) // 2) :] if len(ends) > 1 else []
        identified = self.identified[number]
        reusable = min(identified, max(len(tokens) - 1, 0))
        order = self.in_order(kept, reusable, identified // self.step * self.step)
        mine = [(cls, tokens[: (span + 1) * self.step]) for cls, span in order]
        self.come(hit, mine)
        new = [name for name in mine if name not in self.entries]
        for pool in range(len(self.blocks)):
            room = self.blocks[pool] - held[pool] - self.cost(new, pool)
            self.evict(pool, room, set(mine))
        for name, (cls, span) in zip(mine, order, strict=True):
            if name not in self.entries:
                self.entries[name] = Entry(cls, name[1], span, born=number)
        self.use(number, mine)
        return hit

    def come(self, hit: int, names: list[tuple[int, Tokens]]) -> None:
        """A request is about to use these entries."""

    def cost(self, names: list[tuple[int, Tokens]], pool: int) -> int:
        classes = [self.classes[cls] for cls, _ in names]
        return sum(cls.size for cls in classes if cls.pool == pool)

    def use(self, number: int, names: list[tuple[int, Tokens]]) -> None:
        for order, name in enumerate(names):
            entry = self.entries[name]
            entry.uses += 1
            later = [
                other
                for other in range(number + 1, len(self.requests))
                if _common(self.requests[other], name[1]) == len(name[1])
            ]
            entry.next_use = min(later, default=10**6)
            clock = self.clocks[self.classes[entry.cls].pool]
            entry.rank = clock + round(4 * log2(max(worth(entry.cls, entry.place), 1.0)))
            if self.eviction != "fifo" or entry.born == number:
                entry.last, entry.order = number, order
            self.queue(name)

    def queue(self, name: tuple[int, Tokens]) -> None:
        """S3-FIFO's queues, of the name's pool."""
        pool = self.classes[name[0]].pool
        small, main, ghosts = self.small[pool], self.main[pool], self.ghosts[pool]
        if name in small or name in main:
            self.counts[name] = min(3, self.counts[name] + 1)
            return
        (main if name in ghosts else small).append(name)
        if name in ghosts:
            ghosts.remove(name)
        self.counts[name] = 0

    def evict(self, pool: int, room: int, pinned: set[tuple[int, Tokens]]) -> None:
        """Until the entries of a pool leave `room`."""
        while self.cost(list(self.entries), pool) > room:
            if self.eviction == "s3-fifo":
                victim = self.s3_victim(pool, pinned)
            else:
                free = [
                    name
                    for name in self.entries
                    if name not in pinned and self.classes[name[0]].pool == pool
                ]
                victim = min(free, key=self.rank, default=None)
            if victim is None:
                return
            if self.eviction == "saved-compute":
                self.clocks[pool] = self.rank(victim)[0]
            del self.entries[victim]
            self.evicted(victim)

    def evicted(self, name: tuple[int, Tokens]) -> None:
        """An entry has left the pool."""

    def rank(self, name: tuple[int, Tokens]) -> tuple[float, ...]:
        one = self.entries[name]
        first: dict[str, tuple[float, ...]] = {
            "lru": (),
            "fifo": (),
            "lfu": (one.uses,),
            "optimal": (-one.next_use,),
            "saved-compute": (one.rank,),
        }
        return (*first[self.eviction], one.last, one.order)

    def s3_victim(self, pool: int, pinned: set[tuple[int, Tokens]]) -> tuple[int, Tokens] | None:
        small, main, ghosts = self.small[pool], self.main[pool], self.ghosts[pool]
        held: list[tuple[list[tuple[int, Tokens]], tuple[int, Tokens]]] = []
        found = None
        while found is None and (small or main):
            total = len(small) + len(main) + len(held)
            many = len(small) + sum(queue is small for queue, _ in held) > total / 10
            from_small = bool(small) and (many or not main)
            queue = small if from_small else main
            name = queue.pop(0)
            if name in pinned:
                held.append((queue, name))
            elif self.counts[name]:
                self.counts[name] = 0 if from_small else self.counts[name] - 1
                main.append(name)
            else:
                found = name
                if from_small:
                    ghosts.append(name)
                    del ghosts[: max(0, len(ghosts) - total)]
        for queue, name in reversed(held):
            queue.insert(0, name)
        return found


def worth(cls: int, place: int) -> float:
    """What a made-up cost model says of an entry."""
    return float((place + 1) ** (1 + cls))


def _common(one: Tokens, two: Tokens) -> int:
    count = 0
    while count < min(len(one), len(two)) and one[count] == two[count]:
        count += 1
    return count


@dataclass
class TieredOracle(Oracle):
    """The same with tiers below: what leaves one enters the next, and comes back when used."""

    capacity: list[list[int]] = field(default_factory=list)
    """Bytes of each tier: for everything, or for attention and for checkpoints."""
    sizes: list[list[int]] = field(default_factory=list)
    """Bytes of an entry, by tier and class."""
    below: list[list[tuple[int, Tokens]]] = field(default_factory=list)
    """Entries of each tier, the oldest first."""
    found: list[list[int]] = field(default_factory=list)
    """Tokens of each request by the lowest tier that they came from."""

    def run(self) -> list[int]:
        self.below = [[] for _ in self.capacity]
        return super().run()

    def kept_anywhere(self, name: tuple[int, Tokens]) -> bool:
        return name in self.entries or any(name in tier for tier in self.below)

    def serve(self, number: int) -> int:
        self.found.append([0] * (1 + len(self.below)))
        return super().serve(number)

    def come(self, hit: int, names: list[tuple[int, Tokens]]) -> None:
        lowest = [0] * hit
        for depth, tier in enumerate(self.below, 1):
            for name in [name for name in names if name in tier]:
                tier.remove(name)
                end = len(name[1])
                if end <= hit:
                    lowest[end - self.step : end] = [
                        max(depth, before) for before in lowest[end - self.step : end]
                    ]
        for depth in lowest:
            self.found[-1][depth] += 1

    def evicted(self, name: tuple[int, Tokens]) -> None:
        falling = [name]
        for depth, tier in enumerate(self.below):
            tier += falling
            falling = []
            for part, room in enumerate(self.capacity[depth]):
                while self.bytes(depth, part) > room:
                    oldest = next(one for one in tier if self.part(depth, one[0]) == part)
                    tier.remove(oldest)
                    falling.append(oldest)

    def part(self, depth: int, cls: int) -> int:
        return int(len(self.capacity[depth]) == 2 and self.classes[cls].needs != "all")

    def bytes(self, depth: int, part: int) -> int:
        mine = [cls for cls, _ in self.below[depth] if self.part(depth, cls) == part]
        return sum(self.sizes[depth][cls] for cls in mine)
