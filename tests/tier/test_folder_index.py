"""The index of a folder: shared by processes, built again, and never wrong about the room left."""

from __future__ import annotations

import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.tier import FolderStore
from kvatlas.tier.stores import folder_files, folder_index, folder_space

SOME = np.arange(100, dtype=np.uint8)


def bytes_in(root: Path) -> int:
    """The bytes of all objects, by the file system alone."""
    return sum(path.stat().st_size for path in objects_in(root))


def objects_in(root: Path) -> list[Path]:
    found = [path for path in root.rglob("*") if path.is_file()]
    return [path for path in found if not path.relative_to(root).parts[0].startswith(".")]


def database_of(root: Path) -> Path:
    return root / (root / ".index").readlink()


def entries(root: Path) -> dict[str, int]:
    with closing(sqlite3.connect(database_of(root))) as database:
        return dict(database.execute("SELECT name, size FROM objects"))


def agrees(root: Path) -> None:
    """Every object has an entry with its size, no entry lacks its object, and sums are right."""
    files = {path.relative_to(root).as_posix(): path.stat().st_size for path in objects_in(root)}
    assert entries(root) == files
    with closing(sqlite3.connect(database_of(root))) as database:
        usage = dict(database.execute("SELECT tenant, nbytes FROM usage"))
        assert database.execute("SELECT count(*) FROM objects WHERE writing").fetchone() == (0,)
    assert usage.pop("*", 0) == sum(files.values()) == sum(usage.values())


def test_all_processes_that_share_a_folder_count_its_bytes_together(tmp_path: Path) -> None:
    stores = [FolderStore(tmp_path, capacity=1000) for _ in range(2)]
    for number in range(40):
        assert stores[number % 2].put([(f"kv1/{number}", [SOME])]) == [True]
        assert bytes_in(tmp_path) <= 1000
    there = stores[1].exists([f"kv1/{number}" for number in range(40)])
    assert there == [False] * 30 + [True] * 10
    assert stores[0].capacity() == (1000, 1000, 10)
    assert stores[0].remove_all("kv1/") == 10
    assert stores[1].put([(f"kv1/again-{n}", [SOME]) for n in range(10)]) == [True] * 10
    agrees(tmp_path)


def test_the_least_recently_used_objects_are_evicted(tmp_path: Path) -> None:
    store, into = FolderStore(tmp_path, capacity=1000), np.zeros(100, np.uint8)
    names = [f"kv1/{number}" for number in range(10)]
    assert all(store.put([(name, [SOME]) for name in names]))
    assert store.get([(names[0], [into])]) == [100]
    assert store.ranges(names[1], [(5, into[:10])]) == 10
    assert store.put([(names[2], [SOME])]) == [True]  # it exists, and this is a use as well
    assert store.put([("kv1/new", [SOME])]) == [True]
    assert store.exists(names) == [True, True, True, False, *[True] * 6]
    assert store.put([("kv1/large", [SOME, SOME, SOME])]) == [True]
    assert store.exists(names) == [True, True, True, *[False] * 4, *[True] * 3]


def test_eviction_equals_that_of_an_ordered_dictionary(tmp_path: Path) -> None:
    """Random puts, gets and removals of two tenants, against a model in plain Python."""
    chance = random.Random(7)  # noqa: S311
    store = FolderStore(tmp_path, capacity=2000, quota=1300)
    known: dict[str, int] = {}  # least recently used first
    for turn in range(600):
        name = f"kv1/{chance.choice('ab')}/{chance.randrange(30)}"
        match chance.randrange(6):
            case 0:
                assert store.remove([name]) == (known.pop(name, None) is not None), turn
            case 1 | 2:
                size = known.get(name, 10)
                assert store.get([(name, [np.zeros(size, np.uint8)])]) == [known.get(name, -1)]
                if name in known:
                    known[name] = known.pop(name)
            case _:
                size = known.pop(name, 0) or chance.randrange(1, 400)
                own = [one for one in known if one.startswith(name[:5])]
                while sum(known[one] for one in own) + size > 1300:
                    del known[own.pop(0)]
                while sum(known.values()) + size > 2000:
                    del known[next(iter(known))]
                known[name] = size
                assert store.put([(name, [np.zeros(size, np.uint8)])]) == [True]
        assert sorted(store.names()) == sorted(known), turn
    agrees(tmp_path)


def test_an_object_that_was_used_is_kept_though_many_were_used_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If more objects were used than are considered in one call, the oldest of those is evicted."""
    monkeypatch.setattr(folder_space, "_MOST", 8)
    store, names = FolderStore(tmp_path, capacity=3000), [f"kv1/{n}" for n in range(30)]
    assert all(store.put([(name, [SOME]) for name in names]))
    for name in names[::-1]:
        store.put([(name, [SOME])])
    assert store.put([("kv1/new", [SOME])]) == [True]
    assert store.exists(names) == [True] * 7 + [False] + [True] * 22


def test_a_put_that_fails_releases_its_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    with monkeypatch.context() as patch:
        patch.setattr(folder_files, "_write", lambda *_: (_ for _ in ()).throw(OSError("full")))
        assert store.put([(f"kv1/{number}", [SOME]) for number in range(30)]) == [False] * 30
    agrees(tmp_path)
    assert store.put([(f"kv1/{number}", [SOME]) for number in range(10)]) == [True] * 10
    assert list(tmp_path.rglob("*.new")) == []
    agrees(tmp_path)


def test_unfinished_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    assert store.put([("kv1/a", [SOME])]) == [True]
    old = [tmp_path / ".writing/0.new", tmp_path / "kv1/of another program.new"]
    for path in (*old, tmp_path / ".writing/1.new"):
        path.write_bytes(bytes(300))
    for path in old:
        os.utime(path, (10**9, 10**9))
    FolderStore(tmp_path, capacity=1000)
    assert [path.exists() for path in old] == [False, True]
    assert store.sweep() == 300
    assert [path.name for path in tmp_path.rglob("*.new")] == ["1.new"]


def test_an_object_that_is_being_written_is_not_evicted(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, capacity=300)
    assert store._space.reserve([("kv1/slow", 200)]) == [True]
    for number in range(5):
        assert store.put([(f"kv1/{number}", [SOME])]) == [True]
    assert store.put([("kv1/large", [SOME, SOME])]) == [False]
    assert (entries(tmp_path)["kv1/slow"], bytes_in(tmp_path)) == (200, 0)
    with closing(sqlite3.connect(database_of(tmp_path))) as database:
        database.execute("UPDATE objects SET writing = 1 WHERE name = 'kv1/slow'")
        database.commit()
    assert store.put([("kv1/large", [SOME, SOME])]) == [True]  # the writer counts as dead
    agrees(tmp_path)


def test_writers_in_parallel_keep_to_the_capacity(tmp_path: Path) -> None:
    def act(number: int) -> None:
        store = FolderStore(tmp_path, capacity=2000)
        for turn in range(30):
            store.put([(f"kv1/{turn}", [SOME]), (f"kv1/{number}-{turn}", [SOME])])

    threads = [threading.Thread(target=act, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1900 <= bytes_in(tmp_path) <= 2000
    agrees(tmp_path)


WRITER = """
import sys, random, numpy as np
from kvatlas.tier import FolderStore
chance, store = random.Random(int(sys.argv[2])), FolderStore(sys.argv[1], capacity=3000, quota=2000)
print("open", flush=True)
for turn in range(int(sys.argv[3])):
    name = f"kv1/{chance.choice('ab')}/{chance.randrange(40)}"
    if chance.random() < 0.2:
        store.remove([name])
    else:
        store.put([(name, [np.zeros(chance.randrange(1, 300), np.uint8)])])
print("done")
"""


def writer(root: Path, seed: int, turns: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(root), str(seed), str(turns)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_in_parallel_keep_the_index_in_agreement_with_the_files(tmp_path: Path) -> None:
    writers = [writer(tmp_path, seed, 200) for seed in range(3)]
    assert [one.communicate(timeout=120)[0] for one in writers] == ["open\ndone\n"] * 3
    assert 1000 < bytes_in(tmp_path) <= 3000
    agrees(tmp_path)


def test_killed_writers_leave_at_most_entries_without_files(tmp_path: Path) -> None:
    for seed in range(4):
        process = writer(tmp_path, seed, 10**6)
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(0.05 + 0.05 * seed)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        files = {path.relative_to(tmp_path).as_posix() for path in objects_in(tmp_path)}
        assert files <= set(entries(tmp_path))
        assert bytes_in(tmp_path) <= 3000
    with closing(sqlite3.connect(database_of(tmp_path))) as database:
        database.execute("UPDATE objects SET writing = 1 WHERE writing")
        database.commit()
    store = FolderStore(tmp_path, capacity=3000)
    assert all(store.put([(f"kv1/c/{n}", [SOME]) for n in range(30)]))
    agrees(tmp_path)
    assert bytes_in(tmp_path) == 3000


def damages() -> dict[str, Callable[[Path], object]]:
    def statement(text: str) -> Callable[[Path], None]:
        def act(root: Path) -> None:
            with closing(sqlite3.connect(database_of(root))) as database:
                database.executescript(text)

        return act

    def replaced(root: Path, target: str) -> None:
        (root / ".index").unlink()
        (root / ".index").symlink_to(target)

    def pipe(root: Path) -> None:
        path = database_of(root)
        path.unlink()
        os.mkfifo(path)

    return {
        "no link": lambda root: (root / ".index").unlink(),
        "a link elsewhere": lambda root: replaced(root, "/etc/hostname"),
        "no database": lambda root: database_of(root).unlink(),
        "an empty database": lambda root: os.truncate(database_of(root), 0),
        "half a database": lambda root: os.truncate(database_of(root), 5000),
        "other bytes": lambda root: database_of(root).write_bytes(b"?" * 30_000),
        "a pipe": pipe,
        "no tables": statement("DROP TABLE objects"),
        "another version": statement("PRAGMA user_version = 99"),
        "text for a number": statement("UPDATE usage SET nbytes = 'many'"),
        "a name that leads out": statement(
            "UPDATE objects SET name = '../outside', used = 0 WHERE name = 'kv1/3'"
        ),
    }


@pytest.mark.parametrize("damage", damages())
def test_an_index_that_is_missing_or_damaged_is_built_again(tmp_path: Path, damage: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.write_bytes(b"of another program")
    store = FolderStore(root, capacity=1000)
    assert all(store.put([(f"kv1/{number}", [SOME]) for number in range(10)]))
    store.close()
    damages()[damage](root)
    again = FolderStore(root, capacity=1000)
    assert again.capacity() == (1000, 1000, 10)
    assert store.put([("kv1/more", [SOME])]) == [True]
    assert again.put([("kv1/last", [SOME])]) == [True]
    assert bytes_in(root) == 1000
    assert outside.read_bytes() == b"of another program"
    agrees(root)
    assert len(list(root.glob(".index-*.db"))) == 1


def test_processes_notice_that_another_one_has_replaced_the_index(tmp_path: Path) -> None:
    first, second = (FolderStore(tmp_path, capacity=1000) for _ in range(2))
    for turn in range(5):
        assert first.put([(f"kv1/{turn}-first", [SOME])]) == [True]
        second.sweep()
        assert second.put([(f"kv1/{turn}-second", [SOME])]) == [True]
    assert first.put([("kv1/last", [SOME])]) == [True]
    assert bytes_in(tmp_path) == 1000
    agrees(tmp_path)


def test_an_index_whose_builder_died_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(FolderStore(tmp_path).put([(f"kv1/{n}", [SOME]) for n in range(10)]))
    with monkeypatch.context() as patch:
        patch.setattr(folder_index, "objects_below", lambda *_: (_ for _ in ()).throw(OSError("?")))
        with pytest.raises(AtlasError):
            FolderStore(tmp_path, capacity=1000)
    assert FolderStore(tmp_path, capacity=1000).put([("kv1/new", [SOME])]) == [True]
    assert bytes_in(tmp_path) == 1000
    agrees(tmp_path)


def test_a_suspended_process_that_locks_the_index_delays_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_index, "LOCK_TIMEOUT", 0.05)
    store = FolderStore(tmp_path, capacity=1000)
    assert store.put([("kv1/a", [SOME])]) == [True]
    with closing(sqlite3.connect(database_of(tmp_path), isolation_level=None)) as suspended:
        suspended.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        assert store.put([("kv1/x", [SOME])]) == [False]
        assert store.exists(["kv1/a"]) == [True]
        other = FolderStore(tmp_path, capacity=1000)  # can read
        assert other.get([("kv1/a", [np.zeros(100, np.uint8)])]) == [100]
        with pytest.raises(AtlasError) as refusal:
            store.remove(["kv1/a"])
        assert refusal.value.code is Code.UNREADABLE
        assert time.monotonic() - begun < 5
    assert store.put([("kv1/x", [SOME])]) == [True]


def test_entries_of_files_that_somebody_removed_take_no_space(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    assert all(store.put([(f"kv1/{number}", [SOME]) for number in range(10)]))
    for path in objects_in(tmp_path):
        path.unlink()
    assert all(store.put([(f"kv1/new-{number}", [SOME]) for number in range(10)]))
    assert bytes_in(tmp_path) == 1000
    agrees(tmp_path)


def test_files_of_other_programs_count_after_a_sweep(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    assert store.put([("kv1/a", [SOME])]) == [True]
    (tmp_path / "kv1/b").write_bytes(bytes(850))
    assert store.sweep() == 0
    assert store.capacity().used == 950
    assert store.put([("kv1/c", [SOME])]) == [True]
    assert bytes_in(tmp_path) <= 1000
    agrees(tmp_path)


def test_folders_go_with_their_last_object_and_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    for number in range(100):  # each makes room for the next
        assert store.put([(f"kv1/row-{number}/0", [SOME])]) == [True]
    assert len(list((tmp_path / "kv1").iterdir())) == 10
    mkdir, removed = Path.mkdir, threading.Event()

    def then_removed(
        path: Path, mode: int = 0o777, *, parents: bool = False, exist_ok: bool = False
    ) -> None:
        mkdir(path, mode, parents, exist_ok)
        if path.name == "row-new" and not removed.is_set():
            path.rmdir()
            removed.set()

    monkeypatch.setattr(Path, "mkdir", then_removed)
    assert store.put([("kv1/row-new/0", [SOME])]) == [True]
    assert removed.is_set()
    store.remove_all("kv1/")
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())


def test_files_in_which_older_releases_counted_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".used").write_bytes(bytes(8))
    (tmp_path / ".used-0f").write_bytes(bytes(8))
    FolderStore(tmp_path, capacity=1000)
    assert not list(tmp_path.glob(".used*"))


MOUNTS = """22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
40 22 0:40 / /mnt/shared\\040folder rw - nfs4 10.0.0.1:/export rw,vers=4.2
41 22 0:41 / {root} rw - {kind} source rw
"""


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "ceph"]
)
def test_a_capacity_on_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mounts, root = tmp_path / "mountinfo", tmp_path / "root"
    mounts.write_text(MOUNTS.format(root=root, kind=kind))
    monkeypatch.setattr(folder_files, "MOUNTS", mounts)
    for capacity, quota in ((1000, 0), (0, 1000)):
        with pytest.raises(AtlasError) as refusal:
            FolderStore(root, capacity, quota)
        assert refusal.value.code is Code.CONTRADICTORY
        assert kind in str(refusal.value)
    store = FolderStore(root)
    assert store.put([("kv1/a", [SOME])]) == [True]
    assert sorted(path.name for path in root.iterdir()) == [".writing", "kv1"]  # no index
    monkeypatch.undo()
    assert folder_files.network_file_system(Path("/proc")) == ""
    assert FolderStore(root, capacity=1000).capacity().used == 100


def test_a_full_disk_or_index_leaves_objects_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    full = OSError(errno.ENOSPC, "full")
    with monkeypatch.context() as patch:
        patch.setattr(folder_space.FolderSpace, "reserve", lambda *_: (_ for _ in ()).throw(full))
        assert store.put([("kv1/a", [SOME])]) == [False]
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda *_: (_ for _ in ()).throw(full))
        assert store.put([(f"kv1/{number}", [SOME]) for number in range(5)]) == [False] * 5
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
    agrees(tmp_path)
