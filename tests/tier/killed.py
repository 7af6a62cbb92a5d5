"""A process that stores until it is killed, again and again, and one that looks afterwards.

Run as `python -m tests.tier.killed PATH TRIALS SEED`. It imports once and forks for
every trial. A child is killed with SIGKILL: at a random moment; or by itself just before,
in the middle of or just after a chosen write or sync, so that every step is met.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas.copying.file_runs import _system
from kvatlas.planning import Plan
from kvatlas.specs import FullAttention
from kvatlas.tier import Tier, file_map, file_pieces
from kvatlas.tier import file_writing as writing
from tests.planning.models import DELTA, model_of
from tests.tier.world import BlockTier, small, tier_plan

LAYER: Any = {"attn": FullAttention(heads=4, head_dim=64)}
MODEL = model_of("killed", *[LAYER] * 3, DELTA)
TOKENS, NAMES = 48, 40
MOST_STEPS = 150
SRC = small(MODEL, tp=2, layout="LBNHC", max_len=64, memory="1MiB")
DST = small(MODEL, max_len=64, memory="1MiB")
TABLES: dict[int, list[int]] = {
    index: [3 * index + n for n in range(3 if group.kind != "recurrent" else 1)]
    for index, group in enumerate(SRC.groups)
}


def kept() -> Plan:
    """Room for about a third of the names, so that rows are evicted all the time."""
    return tier_plan(MODEL, max_len=64, memory="2MiB", states="apart")


def pools(made: Plan, name: int) -> dict[int, Any]:
    """Each pool has one byte, which says whose it is: every byte of a row shows its origin."""
    return {p.index: np.full(p.nbytes, 1 + name, dtype=np.uint8) for p in made.pools}


def keys(name: int) -> list[bytes]:
    return [b"%d of %d" % (entry, name) for entry in range(3)]


def store(tier: BlockTier, name: int, rank: int) -> None:
    request: Any = {"blocks": TABLES, "tokens": TOKENS, "keys": keys(name)}
    tier.store(pools(SRC, name), SRC, rank=rank, **request)


def store_for_ever(path: Path, seed: int, *, durable: bool) -> None:
    rng = np.random.default_rng(seed)
    tier = Tier.open(path, durable=durable)
    while True:
        name = int(rng.integers(NAMES))
        if rng.random() < 0.1:
            tier.drop(keys(name))
        for rank in rng.permutation(2).tolist():
            store(tier, name, rank)


def die_at(step: int, how: str) -> None:
    """Make this process kill itself at its n-th write or sync."""
    count = 0

    def dying(act: Any) -> Any:
        def called(fd: int, *rest: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                if how == "torn" and rest and isinstance(rest[0], bytes):
                    act(fd, rest[0][: len(rest[0]) * 5 // 8], *rest[1:])
                elif how == "after":
                    act(fd, *rest)
                os.kill(os.getpid(), signal.SIGKILL)
            return act(fd, *rest)

        return called

    os.pwrite, os.fdatasync = dying(os.pwrite), dying(os.fdatasync)
    calls: Any = _system
    calls.pwritev = dying(calls.pwritev)  # the bytes of blocks
    file_map._into_file = dying(file_map._into_file)


FETCHED_INTO: dict[int, list[int]] = {
    index: [2 + 5 * index + n for n in range(3 if group.kind != "recurrent" else 1)]
    for index, group in enumerate(DST.groups)
}


def fetched(tier: BlockTier, name: int) -> bool:
    """Whether a name is there; then every byte of it is its own."""
    with tier.pin(keys(name), TOKENS) as hit:
        if not hit.tokens:
            return False
        got = {p.index: np.zeros(p.nbytes, dtype=np.uint8) for p in DST.pools}
        hit.fetch(got, DST, blocks=FETCHED_INTO)
        counts = np.bincount(np.concatenate(list(got.values())), minlength=256)
        moved = sum(copy.nbytes for copy in hit.copies(DST, blocks=FETCHED_INTO))
        assert hit.tokens == TOKENS, "the state is after all tokens"
        assert counts[1 + name] == moved > 0, "bytes of another block, or none"
        assert counts[0] + moved == counts.sum(), "bytes of another block"
    return True


def look(path: Path) -> tuple[int, int, int]:
    """Everything that is said to be there is what was stored.

    How many names, how many blocks, and which names, as bits.
    """
    names, bits = 0, 0
    with Tier.open(path) as tier:
        blocks = len(tier)
        for name in range(NAMES):
            if fetched(tier, name):
                names, bits = names + 1, bits | 1 << name
        assert tier.metrics.values["damaged"] == 0, "a record was written before its block"
        # It goes on working, and the next process finds that too.
        for rank in (0, 1):
            store(tier, 77, rank)
        assert tier.match(keys(77), TOKENS) == TOKENS
        assert tier.drop(keys(77)) == 3 + len(
            [g for g in tier.plan.groups if g.kind == "recurrent"]
        )
    return names, blocks, bits


def main(path: Path, trials: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with Tier.open(path, kept()) as tier:
        for name in range(NAMES):
            for rank in (0, 1):
                store(tier, name, rank)
        assert tier.evicted
    seen = []
    for trial in range(trials):
        child = os.fork()
        if not child:
            # Run by run, or gathered into stretches that are summed: every other four trials;
            # these one by one, or many by one call.
            file_pieces._LONG_STRETCH = 1 if trial % 8 < 4 else 1 << 40
            writing._MAPPED_STRETCH = 1 if trial % 16 < 8 else 1 << 40
            if trial % 2:
                die_at(
                    int(rng.integers(1, MOST_STEPS)), ("before", "torn", "after")[trial // 2 % 3]
                )
            store_for_ever(path, seed + trial, durable=trial % 4 < 2)
        if trial % 2:
            rng.integers(1, MOST_STEPS)
        else:
            time.sleep(float(rng.uniform(0.02, 0.25)))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself"
        assert os.WTERMSIG(status) == signal.SIGKILL, "the child ended by itself"
        seen.append(look(path))
    print(*("/".join(map(str, one)) for one in seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
