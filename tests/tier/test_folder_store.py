"""A folder of objects that several processes share, and in which others leave other things."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.tier import FolderStore, HostStore, ObjectStore
from kvatlas.tier.stores import folder_index

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
    assert list(store.names()) == []
    assert store.capacity().objects == 0
    assert not into.any()


@pytest.mark.parametrize("capacity", [0, 1000])
def test_a_pipe_or_link_in_the_place_of_an_object_is_replaced(
    tmp_path: Path, capacity: int
) -> None:
    store, into = FolderStore(tmp_path, capacity), np.zeros(100, np.uint8)
    (tmp_path / "kv2").mkdir()
    os.mkfifo(tmp_path / "kv2/fifo")
    (tmp_path / "target").write_bytes(b"of another program")
    (tmp_path / "kv2/link").symlink_to(tmp_path / "target")
    (tmp_path / "kv2/folder").mkdir()
    for name in ("kv2/fifo", "kv2/link", "kv2/folder"):
        assert store.put([(name, [SOME])]) == [True]
        assert store.get([(name, [into])]) == [100]
        assert np.array_equal(into, SOME)
    assert (tmp_path / "target").read_bytes() == b"of another program"
    assert not list(tmp_path.rglob("*.new"))
    (tmp_path / "kv2/full").mkdir()
    (tmp_path / "kv2/full/file").touch()
    assert store.put([("kv2/full", [SOME])]) == [False]


def test_links_to_other_folders_are_not_followed(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "row").mkdir(parents=True)
    (outside / "row/0").write_bytes(SOME.tobytes())
    store, into = FolderStore(root, capacity=1000), np.zeros(100, np.uint8)
    (root / "kv2").mkdir()
    (root / "kv2/tenant").symlink_to(outside)
    name = "kv2/tenant/row/0"
    assert store.exists([name]) == [False]
    assert store.get([(name, [into])]) == [-1]
    assert store.ranges(name, [(0, into)]) == store.size(name) == -1
    assert list(store.names()) == list(store.names("kv2/tenant/")) == []
    assert store.put([(name, [SOME]), ("kv2/tenant/row/1", [SOME])]) == [False, False]
    assert store.remove([name]) == store.remove_all("kv2/tenant/") == 0
    assert [path.name for path in outside.rglob("*")] == ["row", "0"]
    assert (outside / "row/0").read_bytes() == SOME.tobytes()


READ_ONLY = """
import sys, numpy as np
from kvatlas.tier import FolderStore
store, into = FolderStore(sys.argv[1], capacity=1000, quota=500), np.zeros(100, np.uint8)
assert store.get([("kv2/t/a", [into])]) == [100] and into[99] == 99
assert store.exists(["kv2/t/a"]) == [True]
assert store.put([("kv2/t/b", [into])]) == [False]
print("read")
"""


def test_a_folder_on_a_read_only_mount_can_be_read(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    assert store.put([("kv2/t/a", [SOME])]) == [True]
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec "$2" -c "$3" "$1"'
    enter = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*enter, "true"], check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    done = subprocess.run(
        [*enter, mount, "sh", str(tmp_path), sys.executable, READ_ONLY],
        check=False, capture_output=True, text=True, env={**os.environ},
    )  # fmt: skip
    if "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "read\n", done.stderr


def test_a_folder_never_flushes_to_disk_and_documents_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    for call in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, call, flushed.append)
    assert FolderStore(tmp_path, 1000, 1000).put([("kv2/t/a", [SOME])]) == [True]
    assert not flushed
    assert "not flushed to disk" in " ".join(str(FolderStore.__doc__).split())


def test_a_disk_that_does_not_answer_is_not_one_without_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    assert store.put([("kv1/a", [SOME])]) == [True]
    monkeypatch.setattr(Path, "lstat", lambda _: (_ for _ in ()).throw(OSError("stale")))
    with pytest.raises(AtlasError) as refusal:
        store.exists(["kv1/a"])
    assert refusal.value.code is Code.UNREADABLE


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


def test_files_of_other_programs_are_no_objects(tmp_path: Path) -> None:
    """They are neither counted nor evicted, and an index that contains them is built again."""
    (tmp_path / "kv1").mkdir()
    (tmp_path / "Folder").mkdir()
    names = [b"README.md", b"kv1/Notes", b"kv1/\xff.bin", b"Folder/object"]
    strange = [tmp_path / os.fsdecode(name) for name in names]
    for path in strange:
        path.write_bytes(bytes(850))
        os.utime(path, (10**9, 10**9))
    store = FolderStore(tmp_path, capacity=1000)
    for number in range(30):
        assert store.put([(f"kv1/{number}", [SOME])]) == [True]
        if number == 20:  # as an older release would have built the index
            store._index.write(
                lambda database: database.execute(
                    "INSERT INTO objects VALUES ('README.md', '', 850, 1, 0)"
                )
            )
    assert store.capacity() == (1000, 1000, 10)
    assert len(list(store.names())) == store.remove_all("") == 10
    assert all(path.exists() for path in strange)


@pytest.mark.parametrize("folder", ["lost+found", "kv1/of-another-user"])
@pytest.mark.parametrize("capacity", [0, 1000])
def test_folders_that_may_not_be_read_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, capacity: int
) -> None:
    (tmp_path / folder).mkdir(mode=0o700, parents=True)
    scandir = os.scandir

    def refused(path: Path) -> object:
        if Path(path) == tmp_path / folder:
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    store = FolderStore(tmp_path, capacity=capacity)
    for number in range(12):
        assert store.put([(f"kv1/{number}", [SOME])]) == [True]
    assert store.capacity().objects == (10 if capacity else 12)
    assert store.sweep() == 0
    assert len(list(store.names())) == (10 if capacity else 12)


def test_a_root_that_may_not_be_read_is_not_one_without_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    refusal = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(os, "scandir", lambda _: (_ for _ in ()).throw(refusal))
    with pytest.raises(AtlasError):
        store.capacity()


@pytest.mark.parametrize("used", [-(10**10), 0, 10**10])
def test_files_with_times_that_no_clock_shows_are_objects(tmp_path: Path, used: int) -> None:
    """10^10 seconds are more nanoseconds than 64 bits hold."""
    store = FolderStore(tmp_path)
    assert all(store.put([(f"kv1/{number}", [SOME]) for number in range(3)]))
    os.utime(tmp_path / "kv1/1", (used, used))
    bounded = FolderStore(tmp_path, capacity=300)
    assert bounded.capacity() == (300, 300, 3)
    for number in range(3):
        assert bounded.put([(f"kv1/new-{number}", [SOME])]) == [True]
    assert bounded.capacity() == (300, 300, 3)
    assert (tmp_path / "kv1/1").exists() == (used > 0)


def test_an_index_that_cannot_be_built_is_an_error_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    monkeypatch.setattr(folder_index, "_SCHEMA", "CREATE no table")
    with pytest.raises(AtlasError) as refusal:
        store.sweep()
    assert refusal.value.code is Code.UNREADABLE
    monkeypatch.undo()
    store.sweep()
    assert store.put([("kv1/a", [SOME])]) == [True]
