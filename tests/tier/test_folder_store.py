"""A folder of objects that several processes share, and in which others leave other things."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.tier import FolderStore, HostStore, ObjectStore
from kvatlas.tier.stores import folder as folder_
from kvatlas.tier.stores import folder_ledger

SOME = np.arange(100, dtype=np.uint8)


def test_what_is_no_file_under_a_key_hangs_nobody_and_is_absent(tmp_path: Path) -> None:
    store, into = FolderStore(tmp_path), np.zeros(100, np.uint8)
    (tmp_path / "kv1").mkdir()
    os.mkfifo(tmp_path / "kv1/fifo")
    (tmp_path / "kv1/link").symlink_to("/dev/zero")
    (tmp_path / "kv1/folder").mkdir()
    for name in ("kv1/fifo", "kv1/link", "kv1/folder"):
        assert store.get([(name, [into])]) == [-1]
        assert store.ranges(name, [(0, into)]) == store.size(name) == -1
        assert store.exists([name]) == [False]
        assert store.put([(name, [SOME])]) == [False]
    assert list(store.names()) == []
    assert store.capacity().objects == 0
    store.remove(["kv1/fifo", "kv1/link"])
    assert store.put([("kv1/fifo", [SOME]), ("kv1/link", [SOME])]) == [True, True]
    assert not into.any()


def test_all_who_share_a_folder_count_what_is_in_it_together(tmp_path: Path) -> None:
    stores = [FolderStore(tmp_path, capacity=1000) for _ in range(2)]
    for number in range(40):
        assert stores[number % 2].put([(f"kv1/{number}", [SOME])]) == [True]
        assert stores[0].capacity().used <= 1000
    there = stores[1].exists([f"kv1/{number}" for number in range(40)])
    assert 5 <= sum(there) <= 10
    assert there[-1]
    assert stores[0].remove_all("kv1/") == sum(there)
    assert stores[1].put([(f"kv1/again-{number}", [SOME]) for number in range(10)]) == [True] * 10
    assert stores[0].exists([f"kv1/again-{number}" for number in range(10)]) == [True] * 10
    # Somebody who died has left the count wrong: it is made anew, when there is no room or
    # when the folder is opened.
    with stores[0]._room.ledger.held() as ledger:
        ledger.used = 10**9
    assert stores[0].put([("kv1/last", [SOME])]) == [True]
    with stores[0]._room.ledger.held() as ledger:
        ledger.used = 0
    with FolderStore(tmp_path, capacity=1000)._room.ledger.held() as ledger:
        assert ledger.used == stores[0].capacity().used > 0


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    store, into = FolderStore(tmp_path, capacity=1000), np.zeros(100, np.uint8)
    names = [f"kv1/{number}" for number in range(10)]
    assert all(store.put([(name, [SOME]) for name in names]))
    for age, name in enumerate(names):
        os.utime(tmp_path / name, (10**9 + age, 10**9 + age))
    assert store.get([(names[0], [into])]) == [100]
    assert store.ranges(names[1], [(5, into[:10])]) == 10
    assert store.put([(names[2], [SOME])]) == [True]  # is there: that is a use as well
    assert store.put([("kv1/new", [SOME])]) == [True]
    assert store.exists(names) == [True, True, True, False, False, *[True] * 5]


def test_a_put_that_fails_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    with monkeypatch.context() as patch:
        patch.setattr(folder_, "_write", lambda *_: (_ for _ in ()).throw(OSError("full")))
        assert store.put([(f"kv1/{number}", [SOME]) for number in range(30)]) == [False] * 30
    assert store.put([(f"kv1/{number}", [SOME]) for number in range(10)]) == [True] * 10
    assert list(tmp_path.rglob("*.new")) == []
    left = tmp_path / "kv1/of somebody who died.new"
    left.write_bytes(bytes(300))
    os.utime(left, (10**9, 10**9))
    assert store.remove(["kv1/0", "kv1/1", "kv1/2"]) == 3
    FolderStore(tmp_path, capacity=1000)  # counts that too
    assert store.sweep() == 300
    with store._room.ledger.held() as ledger:
        assert ledger.used == 700
    (tmp_path / ".used").unlink()
    os.mkfifo(tmp_path / ".used")
    assert store.put([("kv1/x", [SOME])]) == [False]
    with pytest.raises(AtlasError) as refusal:
        FolderStore(tmp_path, capacity=1000)
    assert refusal.value.code is Code.UNREADABLE


def test_writers_at_once_keep_to_the_room_that_there_is(tmp_path: Path) -> None:
    def act(number: int) -> None:
        store = FolderStore(tmp_path, capacity=2000)
        for turn in range(30):
            store.put([(f"kv1/{turn}", [SOME]), (f"kv1/{number}-{turn}", [SOME])])

    threads = [threading.Thread(target=act, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = FolderStore(tmp_path).capacity().used
    assert 1000 <= used <= 2000
    with FolderStore(tmp_path, capacity=2000)._room.ledger.held() as ledger:
        assert ledger.used == used


def test_a_count_that_is_made_while_objects_are_removed_is_right_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [FolderStore(tmp_path, capacity=5000) for _ in range(2)]
    names = [f"kv1/{number}/0" for number in range(40)]
    stores[0].put([(name, [SOME]) for name in names])
    opened, unlink = threading.Event(), Path.unlink

    def count() -> None:
        FolderStore(tmp_path, capacity=5000)
        opened.set()

    def then_counted(path: Path, *, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        if path == tmp_path / names[5]:
            threading.Thread(target=count).start()
            opened.wait(0.1)

    monkeypatch.setattr(Path, "unlink", then_counted)
    assert stores[1].remove(names[:30]) == 30
    assert opened.wait(20)
    with stores[0]._room.ledger.held() as ledger:
        assert ledger.used == stores[0].capacity().used == 1000


def test_folders_go_with_their_last_object_and_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    for number in range(100):  # each makes room for the next
        assert store.put([(f"kv1/row-{number}/0", [SOME])]) == [True]
    assert len(list((tmp_path / "kv1").iterdir())) <= 10
    mkdir, removed = Path.mkdir, threading.Event()

    def then_removed(path: Path, mode: int, *, parents: bool, exist_ok: bool) -> None:
        mkdir(path, mode, parents, exist_ok)
        if path.name == "row-new" and not removed.is_set():
            path.rmdir()
            removed.set()

    monkeypatch.setattr(Path, "mkdir", then_removed)
    assert store.put([("kv1/row-new/0", [SOME])]) == [True]
    assert removed.is_set()
    store.remove_all("kv1/")
    assert [path.name for path in tmp_path.iterdir()] == [".used"]


def test_a_disk_that_does_not_answer_is_not_one_without_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    assert store.put([("kv1/a", [SOME])]) == [True]
    monkeypatch.setattr(Path, "lstat", lambda _: (_ for _ in ()).throw(OSError("stale")))
    with pytest.raises(AtlasError) as refusal:
        store.exists(["kv1/a"])
    assert refusal.value.code is Code.UNREADABLE


def test_who_stands_still_with_the_count_hangs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_ledger, "_LOCK_TIMEOUT", 0.05)
    store, put = FolderStore(tmp_path, capacity=1000), list[list[bool]]()
    with (tmp_path / ".used").open("r+b") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        act = lambda: put.append(store.put([("kv1/x", [SOME])]))  # noqa: E731
        putting = threading.Thread(target=act, daemon=True)
        putting.start()
        putting.join(5)
        assert put == [[False]]
        with pytest.raises(AtlasError) as refusal:
            FolderStore(tmp_path, capacity=1000)
        assert refusal.value.code is Code.UNREADABLE
    assert store.put([("kv1/x", [SOME])]) == [True]


def test_a_count_that_is_lost_is_made_anew_and_not_taken_for_nothing(tmp_path: Path) -> None:
    store, ledger = FolderStore(tmp_path, capacity=1000), tmp_path / ".used"
    losses: list[Callable[[], object]] = [
        ledger.unlink, lambda: os.truncate(ledger, 0), lambda: ledger.write_bytes(b"?"),
    ]  # fmt: skip
    for turn, lose in enumerate(losses):
        store.put([(f"kv1/{turn}-{number}", [SOME]) for number in range(9)])
        lose()
        assert store.put([("kv1/last", [SOME])]) == [True]
        store.put([(f"kv1/{turn}-more-{number}", [SOME]) for number in range(9)])
        assert store.capacity().used <= 1000
        store.remove_all("kv1/")


def test_a_count_that_cannot_be_written_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError("full")))
        assert store.put([(f"kv1/{number}", [SOME]) for number in range(5)]) == [False] * 5
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert list(tmp_path.rglob("*.new")) == []


def test_a_tenant_makes_room_among_its_own_objects(tmp_path: Path) -> None:
    stores: list[ObjectStore] = [
        FolderStore(tmp_path, capacity=2000, quota=500), HostStore(2000, quota=500),
        FolderStore(tmp_path / "quota alone", quota=500),
    ]  # fmt: skip
    for store in stores:
        assert store.put([("kv1/quiet/a/0", [SOME])]) == [True]
        for number in range(30):
            assert store.put([(f"kv1/busy/{number}/0", [SOME])]) == [True]
            assert sum(map(store.size, store.names("kv1/busy/"))) <= 500
        assert store.exists(["kv1/quiet/a/0", "kv1/busy/29/0", "kv1/busy/0/0"]) == [
            True, True, False,
        ]  # fmt: skip
        assert store.put([("kv1/busy/large/0", [SOME] * 6)]) == [False]
        assert store.remove_all("kv1/busy/") >= 3  # nothing made room for what cannot fit
        assert store.put([(f"kv1/busy/{n}/0", [SOME]) for n in range(5)]) == [True] * 5
        assert all(store.exists([f"kv1/busy/{n}/0" for n in range(5)]))


def test_tenants_that_have_nothing_any_more_are_forgotten() -> None:
    store = HostStore(capacity=300, quota=200)
    for tenant in range(50):
        assert store.put([(f"kv1/{tenant}/a/0", [SOME]), (f"kv1/{tenant}/b/0", [SOME])])
    assert len(store._tenants) <= 2
    assert store.capacity() == (300, 300, 3)


def test_what_the_whole_folder_lost_does_not_shrink_a_tenants_quota(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, capacity=1000, quota=800)
    for turn in range(3):
        for tenant in ("a", "b"):
            names = [f"kv1/{tenant}/{turn}-{n}/0" for n in range(8)]
            assert store.put([(name, [SOME]) for name in names]) == [True] * 8
            assert sum(store.exists(names)) >= 7
            assert store.capacity().used <= 1000


def test_what_was_written_without_a_quota_counts_for_the_next_who_has_one(tmp_path: Path) -> None:
    names = [f"kv1/t/{n}/0" for n in range(20)]
    assert all(FolderStore(tmp_path, quota=500).put([(names[0], [SOME])]))
    assert all(FolderStore(tmp_path).put([(name, [SOME]) for name in names]))
    assert FolderStore(tmp_path, quota=500).put([("kv1/t/new/0", [SOME])]) == [True]
    assert FolderStore(tmp_path).capacity().used <= 500


def test_the_count_of_a_tenant_goes_with_its_last_object(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, capacity=1000, quota=500)
    names = [f"kv1/t{number}/row/0" for number in range(20)]

    def counts() -> list[str]:
        return sorted(path.name for path in tmp_path.glob(".used-*"))

    assert all(store.put([(name, [SOME]) for name in names[:3]]))
    assert counts() == [".used-t0", ".used-t1", ".used-t2"]
    assert store.remove(names[:2]) == 2
    assert counts() == [".used-t2"]
    assert all(store.put([(name, [SOME]) for name in names]))  # most make room for the last
    assert len(counts()) == 20
    left = {f".used-t{number}" for number, there in enumerate(store.exists(names)) if there}
    assert store.sweep() == 0
    assert set(counts()) == left
    (tmp_path / ".used-t99").write_bytes(bytes(8))
    FolderStore(tmp_path, quota=500)
    assert set(counts()) == left


def test_a_count_that_is_removed_while_others_wait_for_it_is_not_theirs(tmp_path: Path) -> None:
    ledger, waiting = folder_ledger.FolderLedger(tmp_path / "used"), threading.Event()

    def count() -> None:
        waiting.set()
        with ledger.held() as held:
            held.used = (held.used or 0) + 1

    with ledger.held():
        threads = [threading.Thread(target=count) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert waiting.wait(10)
        (tmp_path / "used").unlink()
    for thread in threads:
        thread.join(20)
    with ledger.held() as held:
        assert held.used == 3
