"""CPU time of one operation of a store that has many objects: it must not grow with their number.

python -m benchmarks.store_scale [OBJECTS ...]      # by default 1000 10000 100000

The last column is the size of the index: for a folder the file of its database, of which SQLite
keeps at most 2 MB in memory, and for host memory what Python allocates in addition to the objects.

Each number of objects fills one folder once. TMPDIR selects its file system; without it, the folder
is in memory. A file system that is mounted with `discard` and has no journal waits for the disk
whenever a file is removed. There, removing the folder of 100,000 objects takes several minutes,
which no figure contains.
"""

from __future__ import annotations

import os
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

OBJECTS = (1_000, 10_000, 100_000)
TURNS = 200
CONTENT = np.arange(4096, dtype=np.uint64).view(np.uint8)[:4096]
IN_MEMORY = Path("/dev/shm")  # noqa: S108
Opened = Callable[[int], ObjectStore]
"""Opens the store with a capacity of a given number of objects."""
IndexSize = Callable[[int], int]
"""The bytes of the index of a store, given its number of objects."""


def row_of(number: int) -> str:
    key = blake2b(b"%d" % number, digest_size=16).hexdigest()
    return f"kv2/{'0' * 32}/{'1' * 32}/{key}/"


def name_of(number: int) -> str:
    return f"{row_of(number)}0.0-64/0"


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


def measured(objects: int, opened: Opened, index_size: IndexSize) -> dict[str, float]:
    """The cost of each operation, and the bytes of the index per object.

    The store has space for as many further objects as puts are measured, then each put evicts one.
    """
    capacity = objects + TURNS
    store, number, dropped = opened(capacity), count(objects), count(objects // 2)
    fill(store, objects)
    nbytes = index_size(objects)
    into = np.empty_like(CONTENT)

    def put() -> list[bool]:
        return store.put([(name_of(next(number)), [CONTENT])])

    costs = {"open": microseconds(lambda: opened(capacity).close(), 20)}
    costs["lookup"] = microseconds(lambda: store.exists([name_of(objects // 2)]))
    costs["get"] = microseconds(lambda: store.get([(name_of(objects // 3), [into])]))
    costs["put"] = microseconds(put)
    costs["put that evicts"] = microseconds(put)
    costs["drop"] = microseconds(lambda: store.remove_all(row_of(next(dropped))))
    store.close()
    return costs | {"index, B/object": nbytes / objects}


def database_size(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.stat().st_size


@contextmanager
def folder() -> Iterator[tuple[Opened, IndexSize]]:
    place = IN_MEMORY if IN_MEMORY.is_dir() and "TMPDIR" not in os.environ else None
    with tempfile.TemporaryDirectory(dir=place) as root:
        yield (
            lambda objects: FolderStore(Path(root), capacity=objects * CONTENT.nbytes),
            lambda _: sum(map(database_size, Path(root).glob(".index-*.db"))),
        )


def opened_host(objects: int) -> HostStore:
    return HostStore(objects * CONTENT.nbytes)


def host_index_size(objects: int) -> int:
    """What Python allocates for a second store with the same objects, without their content."""
    tracemalloc.start()
    store = opened_host(objects)
    fill(store, objects)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    store.close()
    return nbytes - objects * CONTENT.nbytes


@contextmanager
def host() -> Iterator[tuple[Opened, IndexSize]]:
    yield opened_host, host_index_size


def main(numbers: tuple[int, ...] = OBJECTS) -> None:
    for title, made in (("folder", folder), ("host", host)):
        rows = []
        for objects in numbers:
            with made() as (opened, index_size):
                costs = measured(objects, opened, index_size)
            rows.append([f"{objects:,}", *(f"{cost:,.0f}" for cost in costs.values())])
        columns = ["objects", *costs]
        show(f"{title}: CPU time of one operation, in microseconds, by objects", columns, rows)


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or OBJECTS)
