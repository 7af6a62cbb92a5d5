"""Documents with random changes, on which all readers must agree."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STRINGS = [
    "",
    "B",
    "H",
    "N",
    "C",
    "k",
    "v",
    "bf16",
    "e4m3",
    "fp32",
    "tokens",
    "state",
    "ring",
    "\ud800",
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a document."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in entries:
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from places(one, (*path, key))


def mutate(value: Any, rng: random.Random) -> None:
    """Change one value, mostly a number to another number that is nearly right."""
    path = rng.choice(list(places(value)))
    owner = value
    for key in path[:-1]:
        owner = owner[key]
    old = owner[path[-1]]
    kind = rng.random()
    if isinstance(old, int) and kind < 0.9:
        near = [old + 1, old - 1, old * 2, old // 2, old + 16, old - 16, 0, 1, 2, 8, 2**53 - 1]
        owner[path[-1]] = rng.choice(near)
    elif isinstance(old, str) and kind < 0.9:
        owner[path[-1]] = rng.choice(STRINGS)
    elif isinstance(old, list) and kind < 0.9 and old:
        match rng.randrange(3):
            case 0:
                old.reverse()
            case 1:
                old.append(copy.deepcopy(old[0]))
            case _:
                old.pop()
    elif kind < 0.95:
        owner[path[-1]] = rng.choice([None, [], {}, 0, "", True])
    elif isinstance(owner, dict):
        del owner[path[-1]]


def mutants(corpus: Path, names: list[str], count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)  # noqa: S311
    for _ in range(count):
        value = json.loads((corpus / f"{rng.choice(names)}.json").read_bytes())
        for _ in range(rng.choice([1, 1, 2, 3])):
            mutate(value, rng)
        yield json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
