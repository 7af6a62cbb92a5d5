"""A million random operations on a pool, each checked: `make test-pool`.

Requests are admitted, forked, decoded, preempted and freed in small pools of every kind of
group under several policies, so that blocks are found, copied and evicted all the time. After
each operation no block has two owners, none is lost, what can be found is what a listener to
the pool's events knows, and memory holds what every request needs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from random import Random

from tests.pool.engine import PIECES, POLICIES, Engine
from tests.pool.models import MODELS

OPERATIONS = {"admit": 6, "decode": 6, "fork": 2, "free": 4, "preempt": 2, "clear": 0.05}
"""How often each is drawn."""
LIFE = 2_000
"""Operations on one pool before the next is begun."""


def operate(engine: Engine, dice: Random) -> str:
    """One operation, drawn; its name."""
    (name,) = dice.choices(list(OPERATIONS), list(OPERATIONS.values()))
    if name != "clear" and not engine.requests:
        name = "admit"
    request = dice.choice(list(engine.requests)) if engine.requests else 0
    if name == "admit":
        pieces = [token for _ in range(dice.randint(0, 4)) for token in dice.choice(PIECES)]
        tail = list(range(900, 900 + dice.randint(0, 20)))
        engine.admit(pieces + tail, dice.choice([b"", b"s"]), dice.choice([0, dice.randint(1, 70)]))
    elif name == "decode":
        engine.decode(request, dice.randint(1, 20))
    elif name == "clear":
        engine.pool.clear()
    else:
        getattr(engine, name)(request)
    return name


def run(operations: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """So many operations over all models and policies; how many of each, and what came of them."""
    dice, done, counts = Random(seed), Counter[str](), Counter[str]()  # noqa: S311
    kinds = [(name, *policy) for name in MODELS for policy in POLICIES]
    while done.total() < operations:
        name, checkpoints, eviction = kinds[done.total() // LIFE % len(kinds)]
        engine = Engine(name, checkpoints, eviction)
        for _ in range(min(LIFE, operations - done.total())):
            done[operate(engine, dice)] += 1
            engine.check()
        counts += engine.counts
        if done.total() % (50 * LIFE) == 0:
            print(f"{done.total():,} operations so far", flush=True)
    return done, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    start = time.monotonic()
    done, counts = run(asked.operations, asked.seed)
    each = ", ".join(f"{count:,} {name}" for name, count in (done + counts).most_common())
    print(f"{done.total():,} operations held in {time.monotonic() - start:.0f} s: {each}")


if __name__ == "__main__":
    main()
