"""The most spans that any policy can find, by exhaustive search over the content of one pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

Path = tuple[int, ...]
"""A prompt as the branches that it takes; every prefix of it is a span."""
Entry = tuple[str, Path]
"""A kind of layer, and the prefix that ends with the entry's span."""


@dataclass(frozen=True)
class TinyCache:
    """One pool of `blocks` blocks, and the blocks of an entry of each kind."""

    blocks: int
    attention: int
    state: int
    window: int
    width: int
    """Number of spans that a window sees."""

    def best(self, requests: list[Path]) -> int:
        """Return the most spans that the requests can find, with the future known."""

        @cache
        def rest(number: int, there: frozenset[Entry]) -> int:
            if number == len(requests):
                return 0
            path = requests[number]
            later = {entry for other in requests[number + 1 :] for entry in self._uses(other)}
            found = 0
            for hit in range(len(path)):
                if not self._needs(path, hit) <= there:
                    continue
                for kept in self._kept(path, hit, there, later):
                    found = max(found, hit + rest(number + 1, kept))
            return found

        return rest(0, frozenset())

    def size(self, entries: frozenset[Entry] | set[Entry]) -> int:
        sizes = {"attention": self.attention, "state": self.state, "window": self.window}
        return sum(sizes[kind] for kind, _ in entries)

    def _needs(self, path: Path, hit: int) -> set[Entry]:
        """Return the entries without which a request cannot continue after `hit` spans."""
        needs: set[Entry] = set()
        if self.attention:
            needs |= {("attention", path[: n + 1]) for n in range(hit)}
        if self.state and hit:
            needs.add(("state", path[:hit]))
        if self.window:
            needs |= {("window", path[: n + 1]) for n in range(max(hit - self.width, 0), hit)}
        return needs

    def _uses(self, path: Path) -> set[Entry]:
        return {entry for hit in range(len(path)) for entry in self._needs(path, hit)}

    def _kept(
        self, path: Path, hit: int, there: frozenset[Entry], later: set[Entry]
    ) -> Iterator[frozenset[Entry]]:
        """Yield every content that the pool can have after a request, without useless entries."""
        own = {("attention", path[: n + 1]) for n in range(len(path))} if self.attention else set()
        running = self.size(own) + self.state
        if running > self.blocks:  # the request is refused
            yield from ([there] if not hit else [])
            return
        new = {(kind, path[: n + 1]) for kind in ("state", "window") for n in range(hit, len(path))
               if getattr(self, kind)}  # fmt: skip
        useful = sorted((there | own | new) & later)
        largest: list[frozenset[Entry]] = []
        for count in range(len(useful), -1, -1):
            for chosen in combinations(useful, count):
                kept = frozenset(chosen)
                # The last state is that of the running request, and takes no room beside it.
                beside = self.size(kept - own - {("state", path)})
                fits = running + beside <= self.blocks and self.size(kept) <= self.blocks
                if fits and not any(kept < other for other in largest):
                    largest.append(kept)  # whatever it lacks can be evicted later as well
                    yield kept
