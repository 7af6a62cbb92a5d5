"""A store of spans with every eviction policy, written to be read and not to be fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2


@dataclass
class Entry:
    place: int
    """The span's number along its request."""
    last: int = 0
    order: int = 0
    uses: int = 0
    next_use: int = 0
    rank: float = 0.0


def worth(place: int) -> float:
    """What a made-up cost model says of a span."""
    return float((place + 1) ** 2)


@dataclass
class PlainStore:
    """`run` returns the leading spans that each request finds."""

    room: int
    eviction: str
    requests: list[list[int]]
    entries: dict[int, Entry] = field(default_factory=dict)
    clock: float = 0.0
    small: list[int] = field(default_factory=list)
    main: list[int] = field(default_factory=list)
    ghosts: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)

    def run(self) -> list[int]:
        return [self.serve(number) for number in range(len(self.requests))]

    def serve(self, number: int) -> int:
        mine = self.requests[number]
        hit = next((n for n, one in enumerate(mine) if one not in self.entries), len(mine))
        for order, place in enumerate(reversed(range(len(mine)))):
            self.use(number, order, place, mine[place])
        while len(self.entries) > self.room:
            victim = self.s3_victim() if self.eviction == "s3-fifo" else self.first()
            if self.eviction == "saved-compute":
                self.clock = self.rank(victim)[0]
            del self.entries[victim]
        return hit

    def use(self, number: int, order: int, place: int, name: int) -> None:
        new = name not in self.entries
        one = self.entries.setdefault(name, Entry(place))
        one.uses += 1
        later = [n for n in range(number + 1, len(self.requests)) if name in self.requests[n]]
        one.next_use = min(later, default=10**6)
        one.rank = self.clock + round(4 * log2(max(worth(place), 1.0)))
        if self.eviction != "fifo" or new:
            one.last, one.order = number, order
        if name in self.small or name in self.main:
            self.counts[name] = min(3, self.counts[name] + 1)
            return
        (self.main if name in self.ghosts else self.small).append(name)
        if name in self.ghosts:
            self.ghosts.remove(name)
        self.counts[name] = 0

    def first(self) -> int:
        return min(self.entries, key=self.rank)

    def rank(self, name: int) -> tuple[float, ...]:
        one = self.entries[name]
        first: dict[str, tuple[float, ...]] = {
            "lru": (),
            "fifo": (),
            "lfu": (one.uses,),
            "optimal": (-one.next_use,),
            "saved-compute": (one.rank,),
        }
        return (*first[self.eviction], one.last, one.order)

    def s3_victim(self) -> int:
        while True:
            total = len(self.small) + len(self.main)
            from_small = bool(self.small) and (len(self.small) > total / 10 or not self.main)
            name = (self.small if from_small else self.main).pop(0)
            if self.counts[name]:
                self.counts[name] = 0 if from_small else self.counts[name] - 1
                self.main.append(name)
                continue
            if from_small:
                self.ghosts.append(name)
                del self.ghosts[: max(0, len(self.ghosts) - total)]
            return name
