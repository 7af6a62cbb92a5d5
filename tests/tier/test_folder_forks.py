"""Forks of a process that uses a folder: the index stays right in the parent and in the child."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvatlas.tier import FolderStore
from tests.tier.test_folder_index import agrees

SOME = np.arange(100, dtype=np.uint8)


def in_child(act: Callable[[], bool], then: Callable[[], object] = lambda: None) -> None:
    """Check in a forked child that a function returns True; the parent calls `then` meanwhile."""
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(not act()))
    child.start()
    then()
    child.join(30)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == 0


def test_a_child_after_a_fork_opens_the_index_itself(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    assert store.put([("kv1/parent", [SOME])]) == [True]

    in_child(lambda: store.put([("kv1/child", [SOME])]) == [True])
    assert store.put([("kv1/after", [SOME])]) == [True]
    agrees(tmp_path)


@pytest.mark.parametrize("call", ["close", "sweep", "put"])
def test_a_fork_during_a_transaction_leaves_a_store_that_works(tmp_path: Path, call: str) -> None:
    store, begun = FolderStore(tmp_path, capacity=1000), threading.Event()

    def slow(_: sqlite3.Connection) -> None:
        begun.set()
        time.sleep(0.5)

    def close() -> bool:
        store.close()
        return True

    acts: dict[str, Callable[[], bool]] = {
        "close": close,
        "sweep": lambda: store.sweep() == 0,
        "put": lambda: store.put([("kv1/child", [SOME])]) == [True],
    }
    thread = threading.Thread(target=lambda: store._index.write(slow))
    thread.start()
    assert begun.wait(30)
    in_child(acts[call])
    thread.join(30)
    assert not thread.is_alive()
    assert store.put([("kv1/parent", [SOME])]) == [True]
    agrees(tmp_path)


def test_a_parent_that_closes_its_stores_takes_no_entry_of_its_child(tmp_path: Path) -> None:
    stores = [FolderStore(tmp_path, capacity=1000) for _ in range(2)]
    for number, store in enumerate(stores):
        assert store.put([(f"kv1/{number}", [SOME])]) == [True]
    ready, closed = (multiprocessing.get_context("fork").Event() for _ in range(2))

    def act() -> bool:
        first = stores[0].put([("kv1/before", [SOME])]) == [True]
        ready.set()
        return closed.wait(30) and first and stores[0].put([("kv1/after", [SOME])]) == [True]

    def close() -> None:
        assert ready.wait(30)
        for store in stores:
            store.close()
        closed.set()

    in_child(act, close)
    agrees(tmp_path)


def test_indexes_that_are_made_and_used_while_a_process_forks(tmp_path: Path) -> None:
    ended = threading.Event()

    def work(number: int) -> None:
        while not ended.is_set():
            store = FolderStore(tmp_path, capacity=3000)
            assert store.put([(f"kv1/{number}-{time.monotonic_ns()}", [SOME])]) == [True]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    store = FolderStore(tmp_path, capacity=3000)
    for turn in range(10):
        in_child(lambda name=f"kv1/child-{turn}": store.put([(name, [SOME])]) == [True])  # type: ignore[misc]
    ended.set()
    for thread in threads:
        thread.join(30)
    agrees(tmp_path)
