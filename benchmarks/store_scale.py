"""CPU time of one operation of a store that has many objects: it must not grow with their number.

python -m benchmarks.store_scale [OBJECTS ...]      # 1000 10000; 100000 takes minutes

The last column is the size of the index: for a folder the file of its database, of which SQLite
keeps at most 2 MB in memory, and for host memory what Python allocates in addition to the objects.
TMPDIR selects the file system of the folder.
"""

from __future__ import annotations

import sqlite3
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from hashlib import blake2b
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.timing import show
from kvatlas.tier import FolderStore, HostStore, ObjectStore

OBJECTS = (1_000, 10_000)
TURNS = 200
CONTENT = np.arange(4096, dtype=np.uint64).view(np.uint8)[:4096]
Opened = Callable[[int], ObjectStore]
IndexSize = Callable[[int], int]
"""The bytes of the index of a store, given its number of objects."""


def name_of(number: int) -> str:
    key = blake2b(b"%d" % number, digest_size=16).hexdigest()
    return f"kv2/{'0' * 32}/{'1' * 32}/{key}/0.0-64/0"


def fill(store: ObjectStore, objects: int) -> None:
    for first in range(0, objects, 1000):
        names = map(name_of, range(first, min(objects, first + 1000)))
        assert all(store.put([(name, [CONTENT]) for name in names]))  # noqa: S101


def microseconds(act: Callable[[], object], turns: int = TURNS) -> float:
    """The median CPU time of a call, of this process with all of its threads."""
    taken = []
    for _ in range(turns):
        start = time.process_time()
        act()
        taken.append(time.process_time() - start)
    return statistics.median(taken) * 1e6


def measured(objects: int, opened: Opened) -> dict[str, float]:
    """The cost of each operation. `opened(n)` opens the store with a capacity of n objects."""
    store, number = opened(2 * objects), count(objects)
    fill(store, objects)
    into = np.empty_like(CONTENT)
    costs = {"open": microseconds(lambda: opened(2 * objects).close(), 20)}
    costs["lookup"] = microseconds(lambda: store.exists([name_of(objects // 2)]))
    costs["get"] = microseconds(lambda: store.get([(name_of(objects // 3), [into])]))
    costs["put"] = microseconds(lambda: store.put([(name_of(next(number)), [CONTENT])]))
    drop = (name_of(n).rpartition("/0.0-64/0")[0] + "/" for n in count(objects // 2))
    costs["drop"] = microseconds(lambda: store.remove_all(next(drop)))
    store.close()
    return costs


def evicting(objects: int, opened: Opened, index_size: IndexSize) -> dict[str, float]:
    """The cost of a put that evicts another object, and the bytes of the index per object."""
    tracemalloc.start()
    store, number = opened(objects), count(objects)
    fill(store, objects)
    nbytes = index_size(objects)
    tracemalloc.stop()
    cost = microseconds(lambda: store.put([(name_of(next(number)), [CONTENT])]))
    store.close()
    return {"put that evicts": cost, "index, B/object": nbytes / objects}


def database_size(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.stat().st_size


@contextmanager
def folder() -> Iterator[tuple[Opened, IndexSize]]:
    with tempfile.TemporaryDirectory() as root:
        yield (
            lambda objects: FolderStore(Path(root), capacity=objects * CONTENT.nbytes),
            lambda _: sum(map(database_size, Path(root).glob(".index-*.db"))),
        )


@contextmanager
def host() -> Iterator[tuple[Opened, IndexSize]]:
    yield (
        lambda objects: HostStore(objects * CONTENT.nbytes),
        lambda objects: tracemalloc.get_traced_memory()[0] - objects * CONTENT.nbytes,
    )


def main(numbers: tuple[int, ...] = OBJECTS) -> None:
    for title, made in (("folder", folder), ("host", host)):
        rows = []
        for objects in numbers:
            with made() as (opened, _):
                costs = measured(objects, opened)
            with made() as (opened, index_size):
                costs |= evicting(objects, opened, index_size)
            rows.append([f"{objects:,}", *(f"{cost:,.0f}" for cost in costs.values())])
        columns = ["objects", *costs]
        show(f"{title}: CPU time of one operation, in microseconds, by objects", columns, rows)


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or OBJECTS)
