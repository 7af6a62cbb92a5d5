"""What is in a store can be listed, verified, cleaned up and carried elsewhere."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.tier import FolderStore, HostStore, MooncakeStore
from kvatlas.tier.namespaces import LEVELS, row_digest
from kvatlas.tier.object_header import ObjectPlace, checksum, header
from kvatlas.tier.store_inspection import (
    collect_garbage,
    export_objects,
    import_objects,
    summaries,
    verify,
)
from kvatlas.tier.stores import Parts
from tests.cli.helpers import kvatlas, said
from tests.tier.test_store_topologies import tier_in
from tests.tier.test_topologies import MODELS
from tests.tier.world import World, small

MODEL = MODELS["sliding"]


@pytest.fixture(scope="module")
def world() -> World:
    return World(MODEL, 75)


def filled(path: Path, world: World) -> FolderStore:
    with tier_in(FolderStore(path), MODEL) as tier:
        world.store(tier, small(MODEL, tp=2))
    return FolderStore(path)


def test_the_command_line_lists_verifies_and_cleans_up(tmp_path: Path, world: World) -> None:
    store, where = filled(tmp_path / "store", world), f"folder://{tmp_path}/store"
    [listed] = said("tier", "ls", where)["namespaces"]
    assert (listed["model"], listed["incomplete"]) == ("sliding", 0)
    assert listed["objects"] == 4 * listed["rows"] > 0
    stat = said("tier", "stat", where)
    assert stat["objects"] == listed["objects"] + 5  # and the marks
    assert said("tier", "verify", where) == {"sound": stat["objects"], "damaged": []}
    assert said("tier", "gc", where) == {"objects": 0, "left_bytes": 0}
    archive = str(tmp_path / "all.tar")
    assert said("tier", "export", where, archive)["objects"] == stat["objects"]
    other = f"folder://{tmp_path}/other"
    assert said("tier", "import", other, archive)["refused"] == []
    with tier_in(FolderStore(tmp_path / "other"), MODEL) as tier:
        world.check(tier, small(MODEL))
    assert said("tier", "gc", where, "--tenant", listed["tenant"])["objects"] > 0
    assert store.capacity().objects == 0


def test_a_flipped_byte_is_found_wherever_it_is(tmp_path: Path, world: World) -> None:
    store = filled(tmp_path, world)
    names = sorted(store.names())
    for place, name in enumerate(names[::7]):
        path = tmp_path / name
        content = bytearray(path.read_bytes())
        content[place * 31 % len(content)] ^= 16
        path.write_bytes(content)
        assert verify(store).damaged == [name]
        assert verify(store, remove=True).damaged == [name]
        assert verify(store).damaged == []


def test_an_object_under_another_name_is_damaged(world: World) -> None:
    store = HostStore()
    with tier_in(store, MODEL) as tier:
        world.store(tier, small(MODEL))
        one, two = sorted(name for name in store.names() if "marks" not in name)[:2]
        content = np.zeros(store.size(one), np.uint8)
        store.get([(one, [content])])
        store.remove([two])
        store.put([(two, [content])])
        assert verify(store).damaged == [two]


def test_rows_that_lack_objects_and_files_of_dead_writers_are_removed(
    tmp_path: Path, world: World
) -> None:
    store = filled(tmp_path, world)
    name = next(name for name in store.names() if name.endswith("/2"))
    store.remove([name])
    assert [one.incomplete for one in summaries(store)] == [1]
    left = (tmp_path / name).with_name("0.abc.new")
    left.write_bytes(bytes(100))
    os.utime(left, (time.time() - 3600, time.time() - 3600))
    assert collect_garbage(store) == (3, 100)
    assert [one.incomplete for one in summaries(store)] == [0]


def test_an_archive_from_a_stranger_brings_nothing_that_is_not_sound(
    tmp_path: Path, world: World
) -> None:
    store = filled(tmp_path / "store", world)
    export_objects(store, tmp_path / "good.tar")
    with tarfile.open(tmp_path / "good.tar") as good:
        [first, *_] = [one for one in good if "marks" not in one.name]
        content = good.extractfile(first)
        assert content is not None
        text = content.read()
    hostile = {
        "../../outside": text,
        "kv2/x": text,
        first.name.replace("/0.", "/1."): text,
        first.name + "0": text,
        first.name: text[:-1] + b"!" + text[-1:],
    }
    with tarfile.open(tmp_path / "bad.tar", "w", format=tarfile.PAX_FORMAT) as bad:
        for name, content_of in hostile.items():
            about = tarfile.TarInfo(name)
            about.size = len(content_of)
            bad.addfile(about, io.BytesIO(content_of))
        link = tarfile.TarInfo("kv2/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        bad.addfile(link)
        sparse = tarfile.TarInfo("kv2/sparse")
        sparse.pax_headers = {"GNU.sparse.size": str(1 << 31), "GNU.sparse.numblocks": "0"}
        bad.addfile(sparse)
    empty = FolderStore(tmp_path / "empty")
    assert import_objects(empty, tmp_path / "bad.tar").damaged == [
        *hostile,
        "kv2/link",
        "kv2/sparse",
    ]
    assert empty.capacity().objects == 0
    (tmp_path / "no.tar").write_bytes(b"no archive")
    with pytest.raises(AtlasError):
        import_objects(empty, tmp_path / "no.tar")


class FailingStore(HostStore):
    """A store that is gone."""

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        raise AtlasError(Code.WIRE_FAILED, got=len(objects), hint="Start it again")


def mark(tenant: str, says: bytes) -> tuple[str, list[Any]]:
    """A mark as whoever may write to a store can make it: its sums are right."""
    digest, payload = "ab" * 16, np.frombuffer(says, np.uint8)
    place = ObjectPlace(bytes.fromhex(digest), row_digest("mark"), len(LEVELS) - 1)
    first = header(place, payload.nbytes, checksum([payload]))
    return f"kv2/{tenant}/marks/{digest}", [first, payload]


def test_a_mark_without_end_is_as_good_as_none() -> None:
    deep = b"[" * 200_000 + b"]" * 200_000
    says = b'{"level":"format","model":"m","objects":' + deep + b"}"
    store, tenant = HostStore(), "cd" * 16
    row = f"kv2/{tenant}/{'ab' * 16}/{'00' * 16}/0.0-64/0"
    store.put([mark(tenant, says), (row, [np.zeros(100, np.uint8)])])
    assert [one.model for one in summaries(store)] == [""]
    assert collect_garbage(store) == (0, 0)


def test_marks_of_nobody_and_numbers_that_are_none_are_not_imported(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "marks.tar", "w") as archive:
        for tenant in ("..", "not a digest", "cd" * 16):
            name, parts = mark(tenant, b"{}")
            about = tarfile.TarInfo(name)
            about.size = sum(part.nbytes for part in parts)
            archive.addfile(about, io.BytesIO(np.concatenate(parts).tobytes()))
    for store in (HostStore(), FolderStore(tmp_path / "store")):
        assert len(import_objects(store, tmp_path / "marks.tar").damaged) == 2
        assert list(store.names()) == [mark("cd" * 16, b"{}")[0]]
    with pytest.raises(AtlasError) as refusal:
        import_objects(FailingStore(), tmp_path / "marks.tar")
    assert refusal.value.code is Code.WIRE_FAILED, "the store failed, and not the archive"
    with tarfile.open(tmp_path / "sparse.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        about = tarfile.TarInfo("kv2/sparse")
        about.pax_headers = {"GNU.sparse.map": "no,numbers"}
        archive.addfile(about)
    with pytest.raises(AtlasError) as refusal:
        import_objects(HostStore(), tmp_path / "sparse.tar")
    assert refusal.value.code is Code.UNREADABLE


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 63, 1 << 80])
def test_a_name_that_is_longer_than_memory_is_no_archive(tmp_path: Path, nbytes: int) -> None:
    about = tarfile.TarInfo("kv2/long")
    about.type, about.size = tarfile.GNUTYPE_LONGNAME, nbytes
    (tmp_path / "long.tar").write_bytes(about.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(AtlasError) as refusal:
        import_objects(HostStore(), tmp_path / "long.tar")
    assert refusal.value.code is Code.UNREADABLE


def test_figures_of_a_master_that_are_no_numbers_are_left_out() -> None:
    store: Any = MooncakeStore.__new__(MooncakeStore)
    store._http_get = lambda _: (
        "master_key_count 1.2.3\nmaster_allocated_bytes 1e999\nmaster_total_capacity_bytes 6e+01\n"
    )
    assert store.capacity() == (0, 60, 0)


def test_names_lead_to_no_place_outside_a_folder(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    for name in ("../x", "/etc/passwd", "a/../../x", "a//b", ".new", "a\0b", "A", ""):
        with pytest.raises(AtlasError):
            store.put([(name, [np.zeros(1, np.uint8)])])
        with pytest.raises(AtlasError):
            store.exists([name])


def test_a_folder_of_limited_size_keeps_to_it(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, capacity=1000)
    for number in range(50):
        assert store.put([(f"kv2/{number}", [np.zeros(100, np.uint8)])]) == [True]
        assert store.capacity().used <= 1000
    assert store.exists(["kv2/49", "kv2/0"]) == [True, False]
    assert store.put([("kv2/large", [np.zeros(2000, np.uint8)])]) == [False]


def test_a_member_whose_name_is_not_utf8_is_refused_with_a_printable_name(tmp_path: Path) -> None:
    form: dict[str, Any] = {"format": tarfile.GNU_FORMAT, "encoding": "latin-1"}
    with tarfile.open(tmp_path / "bytes.tar", "w", **form) as archive:
        about = tarfile.TarInfo("kv2/\xff\xfe")
        about.size = 4
        archive.addfile(about, io.BytesIO(b"four"))
    verdict = import_objects(HostStore(), tmp_path / "bytes.tar")
    assert verdict == (0, ["kv2/\\xff\\xfe"])
    where = f"folder://{tmp_path}/store"
    done = kvatlas("tier", "import", where, str(tmp_path / "bytes.tar"), "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {"stored": 0, "refused": ["kv2/\\xff\\xfe"]}
