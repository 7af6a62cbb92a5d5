"""Blocks that are computed again, the order in which blocks are evicted."""

from __future__ import annotations

from kvatlas.pool import (
    BlockEvent,
    BlockPool,
    BlockRemoved,
    BlockStored,
    HashChain,
    PrefixIdentity,
    checkpoint_policy,
)
from tests.pool.models import small_plan


class Watched:
    """A pool, the end in tokens of each block that can be found, and what was evicted in turn."""

    def __init__(self, model: str, blocks: int, *, eviction: str, checkpoints: str) -> None:
        self.plan = small_plan(model, blocks)
        kept = checkpoint_policy(checkpoints)
        self.pool = BlockPool(
            self.plan, eviction=eviction, checkpoints=kept, events=self.listen, partial_hits=False
        )
        self.ends: dict[tuple[int, object], int] = {}
        self.evicted: list[tuple[int, int]] = []
        """(group, end in tokens) of each evicted block."""

    def listen(self, events: list[BlockEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                assert event.group_idx is not None
                parent = self.ends.get((-1, event.parent_block_hash), 0)
                for number, one in enumerate(event.block_hashes, 1):
                    end = parent + number * event.block_size
                    self.ends[event.group_idx, one] = self.ends[-1, one] = end
            elif isinstance(event, BlockRemoved):
                assert event.group_idx is not None
                for one in event.block_hashes:
                    self.evicted.append((event.group_idx, self.ends[event.group_idx, one]))

    def serve(self, name: object, prompt: list[int]) -> int:
        hit = self.pool.admit(name, prompt)
        for stop in [*self.pool.stops(name, len(prompt)), len(prompt)]:
            self.pool.reserve(name, stop)
            self.pool.computed(name, stop)
        self.pool.free(name)
        return hit

    def drain(self) -> list[tuple[int, int]]:
        """Evict everything, and return (group, end in tokens) of each block in turn."""
        self.evicted.clear()
        for ids in self.pool.ids.values():
            ids.release(ids.take_many(ids.free))
        self.pool._tell()
        return self.evicted


def test_a_block_that_is_computed_again_replaces_its_cached_copy() -> None:
    """Its state is missing, so a prefix is computed again: then it was used last."""
    watched = Watched("hybrid", 80, eviction="lru", checkpoints="prompt-end")
    step = watched.plan.block_size
    (attention,) = (n for n, g in enumerate(watched.plan.groups) if g.kind != "recurrent")
    first = [*range(4 * step), 1]
    assert watched.serve(1, first) == 0
    kept = watched.pool.ids[0].kept
    watched.serve("between", [7] * (2 * step))
    again = watched.pool.ids[0].kept
    assert watched.serve(2, first[: 3 * step]) == 0
    states = len(watched.plan.groups) - 1
    assert watched.pool.ids[0].kept == again + states, "attention's three blocks are kept once"
    assert kept == 4 + states
    order = [end // step for group, end in watched.drain() if group == attention]
    assert order == [4, 2, 1, 3, 2, 1], "of the first request only the last block is still old"
    assert watched.pool.match(chain_of(watched, first)) == 0


def chain_of(watched: Watched, tokens: list[int]) -> HashChain:
    chain = HashChain(PrefixIdentity(), watched.plan.block_size)
    chain.extend(tokens)
    return chain


def test_two_requests_at_once_leave_one_copy_of_what_both_computed() -> None:
    for model in ("dense", "sliding", "hybrid"):
        watched = Watched(model, 80, eviction="lru", checkpoints="every-block")
        pool, step = watched.pool, watched.plan.block_size
        prompt = list(range(2 * step))
        for name in (1, 2):
            pool.admit(name, prompt)
            pool.reserve(name, len(prompt))
        for name in (1, 2):
            pool.computed(name, len(prompt))
        once = sum(ids.count - 1 - ids.free for ids in pool.ids.values())
        tables = {name: pool.tables(name) for name in (1, 2)}
        pool.free(1)
        pool.admit(3, [*prompt, 5])
        for group, table in pool.tables(3).items():
            mine = [block for block in table if block >= 0]
            assert mine == [b for b in tables[2][group] if b >= 0][-len(mine) :], "the newer copy"
        pool.free(2)
        pool.free(3)
        kept = sum(ids.kept for ids in pool.ids.values())
        assert kept * 2 == once, "every block was there twice, and is kept once"
