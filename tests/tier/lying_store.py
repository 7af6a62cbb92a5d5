"""A store that lies, loses, stalls and fails, on demand; and what must hold all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvatlas import AtlasError, Code
from kvatlas.copying.run_bounds import Bytes
from kvatlas.planning import Plan
from kvatlas.routing import scattered
from kvatlas.tier import HostStore, ObjectStore, StoreTier
from kvatlas.tier.hit import check_all_there
from kvatlas.tier.stores import Parts, StoreRoom
from tests.tier.world import GUARD, World, pools

MISSES = {
    Code.MISSING_BLOCKS,
    Code.CHECKSUM,
    Code.DEADLINE,
    Code.WIRE_FAILED,
    Code.UNREADABLE,
}


class LyingStore(ObjectStore):
    """A store in memory of which one fault is switched on at a time."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.honest = HostStore(capacity)
        self.fault = ""
        self.random = np.random.default_rng(1)
        self.stalled = threading.Event()
        self.asked = 0

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        if self.fault == "put says yes":
            return [True for _ in objects]
        if self.fault == "put says no":
            return [False for _ in objects]
        if self.fault == "put dies":
            self.honest.put(objects[: self._some(len(objects) + 1)])
            raise ConnectionResetError
        self._stall("put stalls")
        return self._answers(self.honest.put(objects), "put answers too few")

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        if self.fault == "get raises":
            raise ConnectionResetError
        self._stall("get stalls")
        if self.fault == "evicted before get":
            self.honest.remove([objects[self._some(len(objects))][0]])
        if self.fault == "another object":
            objects = list(zip(self._others(objects), (p for _, p in objects), strict=True))
        if self.fault == "nothing is read":
            return [sum(part.nbytes for part in parts) for _, parts in objects]
        sizes = self.honest.get(objects)
        at = self._some(len(objects))
        if self.fault == "bytes flipped":
            parts = objects[at][1]
            part = parts[self._some(len(parts))]
            part[self._some(part.nbytes)] ^= 1 << self._some(8)
        if self.fault == "another size":
            sizes[at] += (-1, 1, 1 << 40)[self._some(3)]
        return self._answers(sizes, "get answers too few")

    def exists(self, names: Sequence[str]) -> list[bool]:
        self.asked += len(names)
        if self.fault == "exists raises":
            raise ConnectionResetError
        self._stall("exists stalls")
        if self.fault == "exists says yes":
            return [True for _ in names]
        return self._answers(self.honest.exists(names), "exists answers too few")

    def _some(self, below: int) -> int:
        return int(self.random.integers(below))

    def _stall(self, fault: str) -> None:
        if self.fault == fault:
            self.stalled.wait(30)

    def _answers(self, answers: list[Any], fault: str) -> list[Any]:
        return answers[1:] if self.fault == fault else answers

    def _others(self, objects: Sequence[tuple[str, Parts]]) -> list[str]:
        """The names of other objects, of the same size where there are some."""
        known = [name for name in self.honest.names() if "marks" not in name]
        some = self.random.integers(len(known) - 1, size=len(objects))
        return [
            [one for one in known if one != name][place]
            for (name, _), place in zip(objects, some, strict=True)
        ]

    def ranges(self, name: str, wanted: Sequence[tuple[int, Bytes]]) -> int:
        return self.honest.ranges(name, wanted)

    def remove(self, names: Sequence[str]) -> int:
        return self.honest.remove(names)

    def remove_all(self, prefix: str) -> int:
        return self.honest.remove_all(prefix)

    def names(self, prefix: str = "") -> Iterator[str]:
        return self.honest.names(prefix)

    def size(self, name: str) -> int:
        return self.honest.size(name)

    def sweep(self) -> int:
        return self.honest.sweep()

    def capacity(self) -> StoreRoom:
        return self.honest.capacity()

    def register(self, memory: Bytes) -> None:
        self.honest.register(memory)

    def close(self) -> None:
        self.honest.close()


def fetched(
    world: World, tier: StoreTier, made: Plan, between: Callable[[], object] = lambda: None
) -> bool:
    """Whether all ranks got all tokens; every byte is right, or as it was, either way.

    Something may happen between what a rank finds and what it loads.
    """
    for rank in range(made.ranks):
        tables = scattered(made, world.tokens)
        got, right = pools(made, rank, 7), pools(made, rank, 7)
        before = pools(made, rank, 7)
        world.put(made, rank, right, tables)
        try:
            with tier.pin(world.keys(tier), world.tokens) as hit:
                check_all_there(hit.tokens, world.tokens)
                between()
                mine = {i: pool[:-GUARD] for i, pool in got.items()}
                hit.fetch(mine, made, rank=rank, blocks=tables)
        except AtlasError as refusal:
            assert refusal.code in MISSES
            assert all(((got[i] == right[i]) | (got[i] == before[i])).all() for i in got)
            return False
        assert all(np.array_equal(got[i], right[i]) for i in got)
    return True


def until(there: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for something that other threads bring about."""
    pause = threading.Event()
    for _ in range(int(seconds * 100)):
        if there():
            return True
        pause.wait(0.01)
    return there()
