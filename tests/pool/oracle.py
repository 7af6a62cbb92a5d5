"""A cache that keeps every token of every group by itself, written to be read and not to be fast.

A request is a tuple of tokens. An entry is what is evicted as one: what a group keeps for a block
of tokens, named by the group and the prefix that ends with the block. Nothing here knows arrays,
spans of a trace, or how the simulation finds a hit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Tokens = tuple[Any, ...]
Name = tuple[int, Tokens]
"""A class of groups, and the prefix that ends with the entry."""


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
class TieredOracle:
    """Groups with full attention and the tiers below: what leaves one enters the next.

    What is used comes back. Everything is evicted in LRU order, the end of a request first.
    """

    step: int
    classes: list[OracleClass]
    blocks: list[int]
    requests: list[Tokens]
    identified: list[int]
    """Tokens of each request that the trace has ids for: the rest is kept by nobody."""
    in_flight: list[list[int]]
    """Blocks of each pool that a request holds beside those that it keeps."""
    capacity: list[list[int]]
    """Bytes of each tier: for everything, or for attention and for checkpoints."""
    sizes: list[list[int]]
    """Bytes of an entry, by tier and class."""
    entries: list[Name] = field(default_factory=list)
    """The entries on the GPU, the oldest first."""
    below: list[list[Name]] = field(default_factory=list)
    """Entries of each tier, the oldest first."""
    found: list[list[int]] = field(default_factory=list)
    """Tokens of each request by the lowest tier that they came from."""

    def run(self) -> list[int]:
        self.below = [[] for _ in self.capacity]
        return [self.serve(number) for number in range(len(self.requests))]

    def serve(self, number: int) -> int:
        tokens, held = self.requests[number], self.in_flight[number]
        hit = self.longest(number)
        whole = range(self.step, self.identified[number] + 1, self.step)
        mine = [
            (cls, tokens[:end])
            for end in reversed(whole)
            for cls in reversed(range(len(self.classes)))
        ]
        used = [name for name in mine if len(name[1]) <= hit]
        computed = [name for name in mine if len(name[1]) > hit]
        loaded = [name for name in used if name not in self.entries]
        self.come(hit, used)
        for pool, blocks in enumerate(self.blocks):
            self.evict(pool, blocks - self.cost(loaded, pool), set(used))
        self.entries += loaded
        for pool, blocks in enumerate(self.blocks):
            self.evict(pool, blocks - held[pool] - self.cost(computed, pool), set(used))
        # What is computed again replaces its older copy, which was there until now.
        for tier in self.below:
            tier[:] = [name for name in tier if name not in computed]
        self.entries = [name for name in self.entries if name not in mine] + mine
        return hit

    def longest(self, number: int) -> int:
        """The last token is computed anyway."""
        tokens = self.requests[number]
        most = min(self.identified[number], len(tokens) - 1)
        good = 0
        while good + self.step <= most and self.is_kept(tokens[: good + self.step]):
            good += self.step
        return good

    def is_kept(self, prefix: Tokens) -> bool:
        places = [self.entries, *self.below]
        return all(
            any((cls, prefix) in place for place in places) for cls in range(len(self.classes))
        )

    def come(self, hit: int, names: list[Name]) -> None:
        """A request is about to use these entries, which are those of its hit."""
        lowest = [0] * hit
        for depth, tier in enumerate(self.below, 1):
            for name in [name for name in names if name in tier]:
                tier.remove(name)
                end = len(name[1])
                lowest[end - self.step : end] = [
                    max(depth, before) for before in lowest[end - self.step : end]
                ]
        self.found.append([lowest.count(depth) for depth in range(1 + len(self.below))])

    def cost(self, names: list[Name], pool: int) -> int:
        classes = [self.classes[cls] for cls, _ in names]
        return sum(cls.size for cls in classes if cls.pool == pool)

    def evict(self, pool: int, room: int, pinned: set[Name]) -> None:
        """Until the entries of a pool leave `room`."""
        while self.cost(self.entries, pool) > room:
            victim = next(
                name
                for name in self.entries
                if name not in pinned and self.classes[name[0]].pool == pool
            )
            self.entries.remove(victim)
            self.evicted(victim)

    def evicted(self, name: Name) -> None:
        """An entry has left the pool."""
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
