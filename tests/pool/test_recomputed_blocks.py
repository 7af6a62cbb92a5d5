"""Blocks that are computed again, the order in which blocks are evicted."""

from __future__ import annotations

from copy import deepcopy

import pytest

from kvatlas.pool import (
    BlockEvent,
    BlockPool,
    BlockRemoved,
    HashChain,
    PrefixIdentity,
    checkpoint_policy,
)
from kvatlas.pool.eviction import S3Fifo
from kvatlas.pool.group_needs import hash_grain, keeps_all
from tests.pool.models import small_plan


class Watched:
    """A pool, the end in tokens of each block that can be found, and what was evicted in turn."""

    def __init__(self, model: str, blocks: int, *, eviction: str, checkpoints: str) -> None:
        self.plan = small_plan(model, blocks)
        kept = checkpoint_policy(checkpoints)
        self.pool = BlockPool(
            self.plan, eviction=eviction, checkpoints=kept, events=self.listen, partial_hits=False
        )
        self.ends: dict[object, int] = {}
        self.evicted: list[tuple[int, int]] = []
        """(group, end in tokens) of each evicted block."""

    def listen(self, events: list[BlockEvent]) -> None:
        for event in events:
            if isinstance(event, BlockRemoved):
                assert event.group_idx is not None
                self.evicted += [(event.group_idx, self.ends[one]) for one in event.block_hashes]

    def know(self, prompt: list[int]) -> None:
        """Remember where the hashes of a prompt's prefixes end."""
        grain = hash_grain(self.plan)
        chain = HashChain(PrefixIdentity(), grain)
        chain.extend(prompt)
        for end in range(grain, len(prompt) + 1, grain):
            self.ends[int.from_bytes(chain.at(end)[-8:], "big")] = end

    def serve(self, name: object, prompt: list[int]) -> int:
        self.know(prompt)
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
            taken = []
            while ids.free:
                taken.append(ids.take())
                self.pool._tell()
            ids.release(taken)
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


@pytest.mark.parametrize("model", ["hybrid", "sliding", "mixed", "chunked"])
def test_the_end_of_a_request_is_evicted_before_its_beginning_in_all_groups(model: str) -> None:
    watched = Watched(model, 200, eviction="lru", checkpoints="prompt-end")
    watched.serve(1, [*range(5 * watched.plan.block_size), 1])
    ends = [end for _, end in watched.drain()]
    assert len({group for group, _ in watched.evicted}) == len(watched.plan.groups)
    assert ends == sorted(ends, reverse=True)
    whole = {n for n, group in enumerate(watched.plan.groups) if keeps_all(group)}
    last = [group for group, end in watched.evicted if end == ends[0]]
    assert whole == set(last[-len(whole) :]) != set(), "full attention's block goes last"


def test_blocks_that_leave_a_window_are_released_by_position() -> None:
    """Several groups with windows: a window without its last block in one group is useless."""
    watched = Watched("sliding", 200, eviction="lru", checkpoints="every-block")
    windows = [n for n, one in enumerate(watched.plan.groups) if not keeps_all(one)]
    pool, step = watched.pool, watched.plan.block_size
    watched.know(list(range(8 * step)))
    pool.admit(1, range(8 * step))
    pool.reserve(1, 7 * step)
    pool.computed(1, 7 * step)
    pool.reserve(1, 8 * step)  # most blocks have left their windows
    released = sum(ids.kept for ids in pool.ids.values())
    assert released > len(windows)
    ends = [end for _, end in watched.drain()][:released]
    assert ends == sorted(ends, reverse=True)


def test_a_block_of_a_window_counts_as_used_once_by_each_request() -> None:
    watched = Watched("sliding", 200, eviction="lfu", checkpoints="every-block")
    step = watched.plan.block_size
    prompt = [*range(8 * step), 1]
    for name in range(3):
        watched.serve(name, prompt)
    for pool, ids in watched.pool.ids.items():
        uses = ids._eviction._uses  # type: ignore[union-attr]
        blocks = [block for g in watched.pool._index.groups for block in g.blocks.values()
                  if g.group.pool == pool]  # fmt: skip
        assert max(uses[blocks]) == 3
        assert set(uses[blocks].tolist()) <= {1, 3}, "of windows only the last is used again"


def test_s3_fifo_remembers_contents_not_block_ids() -> None:
    """Content that comes back enters the main queue; other content in its old block does not."""
    watched = Watched("dense", 8, eviction="s3-fifo", checkpoints="every-block")
    step = watched.plan.block_size
    prompts = {name: [name] * step for name in range(40)}
    for name in range(20):
        watched.serve(name, prompts[name])
    (queue,) = (ids._eviction for ids in watched.pool.ids.values())
    assert isinstance(queue, S3Fifo)
    assert not queue._main, "every content was new, and none was used twice"
    assert len(queue._ghosts) == watched.pool.ids[0].kept
    evicted = watched.evicted[-1:]
    assert evicted
    gone = watched.pool.ids[0].kept + 1
    watched.serve("again", prompts[20 - gone])
    assert len(queue._main) == 1


def test_a_copied_pool_evicts_from_its_own_index() -> None:
    pool = BlockPool(small_plan("dense", 8), eviction="s3-fifo")
    other = deepcopy(pool)
    for name in range(30):
        other.admit(name, [name] * 16)
        other.reserve(name, 16)
        other.computed(name, 16)
        other.free(name)
    assert len(other._index.groups[0].blocks) == other.ids[0].kept == 7
