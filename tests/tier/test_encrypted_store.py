"""Rows that are encrypted at rest: the same with the key of a tenant, unreadable without it."""

from __future__ import annotations

import os
import stat
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from kvatlas import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.tier import EncryptedStore, FolderStore, HostStore, KeyFolder, StoreTier, open_store
from kvatlas.tier.store_inspection import export_objects, verify
from kvatlas.tier.stores.encrypted import OVERHEAD
from tests.cli.helpers import said
from tests.tier.test_topologies import MODELS
from tests.tier.world import World, small, tier_plan

MODEL = MODELS["sliding"]
TOKENS = 75


def tier_of(store: Any, tenant: str = "acme") -> StoreTier:
    who = CacheIdentity(weights="w", tenant=tenant)
    return StoreTier(store, tier_plan(MODEL), who, staging=1 << 20, timeout=30.0)


def bytes_of(store: Any, name: str) -> bytes:
    found = np.empty(store.size(name), np.uint8)
    assert store.get([(name, [found])]) == [found.nbytes]
    return found.tobytes()


@pytest.fixture(scope="module")
def world() -> World:
    return World(MODEL, TOKENS)


def test_stored_bytes_are_aes_gcm_of_the_plain_objects(world: World, tmp_path: Path) -> None:
    """As another program would read them, by the specification of the format."""
    keys, inner, plain = KeyFolder(tmp_path / "keys"), HostStore(), HostStore()
    key = keys.create("acme").read_bytes()
    for store in (EncryptedStore(inner, keys), plain):
        world.store(tier_of(store), small(MODEL, tp=2))
    assert sorted(inner.names()) == sorted(plain.names())
    for name in plain.names():
        raw, right = bytes_of(inner, name), bytes_of(plain, name)
        assert len(raw) == len(right) + OVERHEAD
        assert right[64:128] not in raw
        own = blake2b(name.encode(), key=key, digest_size=32, person=b"kvatlas row key").digest()
        assert raw[0] == 1, "the version"
        reader = Cipher(algorithms.AES(own), modes.GCM(raw[1:13], raw[-16:])).decryptor()
        reader.authenticate_additional_data(b"\x01" + name.encode())
        assert reader.update(raw[13:-16]) + reader.finalize() == right
        assert bytes_of(EncryptedStore(inner, keys), name) == right


def test_every_topology_reads_encrypted_rows(world: World, tmp_path: Path) -> None:
    KeyFolder(tmp_path / "keys").create("acme")
    where = f"folder://{tmp_path}/store?keys={tmp_path}/keys&capacity=1GiB"
    with tier_of(open_store(where)) as tier:
        world.store(tier, small(MODEL, tp=2))
    with tier_of(open_store(where)) as tier:
        world.check(tier, small(MODEL, block_size=32))
    stat = said("tier", "stat", where)
    assert said("tier", "verify", where) == {"sound": stat["objects"], "damaged": []}


def test_deleting_a_key_makes_the_rows_of_its_tenant_unreadable(
    world: World, tmp_path: Path
) -> None:
    keys, inner = KeyFolder(tmp_path / "keys"), FolderStore(tmp_path / "store")
    paths = {tenant: keys.create(tenant) for tenant in ("acme", "other")}
    store = EncryptedStore(inner, keys)
    tiers = {tenant: tier_of(store, tenant) for tenant in paths}
    for tier in tiers.values():
        world.store(tier, small(MODEL))
    (mine, theirs) = (list(store.names(t.namespace.prefix)) for t in tiers.values())
    paths["acme"].unlink()
    assert not any(store.exists(mine))
    assert all(store.exists(theirs))
    keys.create("acme")
    for name in mine:  # another key does not read them either
        into = np.zeros(store.size(name), np.uint8)
        assert store.get([(name, [into])]) == [0]
        assert not into.any(), "no byte of it"
    world.check(tiers["other"], small(MODEL))
    paths["acme"].unlink()
    for act in (
        lambda: store.get([(mine[0], [np.zeros(store.size(mine[0]), np.uint8)])]),
        lambda: store.put([(mine[0], [np.zeros(4, np.uint8)])]),
    ):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is Code.ROW_UNREADABLE
    assert tiers["acme"].drop_tenant() >= len(mine)
    assert not inner.exists(mine)[0]


def test_changed_swapped_and_cut_objects_are_never_read(world: World, tmp_path: Path) -> None:
    keys, inner = KeyFolder(tmp_path), HostStore()
    keys.create("acme")
    store = EncryptedStore(inner, keys)
    tier = tier_of(store)
    world.store(tier, small(MODEL))
    first, second = sorted(store.names(tier.namespace.prefix))[:2]
    right = bytes_of(inner, first)
    changed = [right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :] for at in (0, 1, 40, -1)]
    for wrong in (*changed, bytes_of(inner, second)):
        inner.remove([first])
        inner.put([(first, [np.frombuffer(wrong, np.uint8)])])
        into = np.zeros(store.size(first), np.uint8)
        assert store.get([(first, [into])]) == [0]
        assert store.ranges(first, [(0, into)]) == 0
        assert not into.any()
    inner.remove([first])
    inner.put([(first, [np.frombuffer(right[:20], np.uint8)])])
    assert store.get([(first, [np.zeros(len(right) - OVERHEAD, np.uint8)])]) == [0]
    assert store.ranges(first, [(0, np.zeros(4, np.uint8))]) == 0
    inner.remove([first])
    inner.put([(first, [np.frombuffer(right, np.uint8)])])
    part = np.zeros(10, np.uint8)
    assert store.ranges(first, [(5, part)]) == 10
    assert part.tobytes() == bytes_of(store, first)[5:15]


def replace(store: Any, name: str, content: bytes) -> None:
    store.remove([name])
    assert store.put([(name, [np.frombuffer(content, np.uint8)])]) == [True]


@pytest.mark.parametrize("at", [0, 1, 20, -1])
def test_a_damaged_object_is_a_miss_and_the_next_store_heals_it(
    world: World, tmp_path: Path, at: int
) -> None:
    keys, inner = KeyFolder(tmp_path), HostStore()
    keys.create("acme")
    with tier_of(EncryptedStore(inner, keys)) as tier:
        world.store(tier, small(MODEL))
        name = min(inner.names(tier.namespace.prefix))
        changed = bytearray(bytes_of(inner, name))
        changed[at] ^= 1
        replace(inner, name, bytes(changed))
        with pytest.raises(AtlasError) as refusal:
            world.check(tier, small(MODEL))
        assert refusal.value.code is Code.CHECKSUM
        assert tier.misses["damaged"] == 1
        assert inner.exists([name]) == [False], "the tier removed it"
        world.store(tier, small(MODEL))
        world.check(tier, small(MODEL))


def test_damaged_objects_are_listed_and_removed_and_not_exported(
    world: World, tmp_path: Path
) -> None:
    keys, inner = KeyFolder(tmp_path / "keys"), HostStore()
    keys.create("acme")
    store = EncryptedStore(inner, keys)
    tier = tier_of(store)
    world.store(tier, small(MODEL))
    name, count = min(inner.names(tier.namespace.prefix)), len(list(inner.names()))
    changed = bytearray(bytes_of(inner, name))
    changed[30] ^= 1
    replace(inner, name, bytes(changed))
    assert verify(store) == (count - 1, [name])
    assert export_objects(store, tmp_path / "all.tar") == count - 1
    assert verify(store, remove=True) == (count - 1, [name])
    assert verify(store) == (count - 1, [])


def test_rows_of_a_key_that_was_created_again_are_stored_again(
    world: World, tmp_path: Path
) -> None:
    keys, inner = KeyFolder(tmp_path), HostStore()
    path = keys.create("acme")
    store = EncryptedStore(inner, keys)
    with tier_of(store) as tier:
        world.store(tier, small(MODEL))
    store = EncryptedStore(inner, keys)
    names = sorted(inner.names())
    path.unlink()
    with pytest.raises(AtlasError) as refusal:
        verify(store)
    assert refusal.value.code is Code.ROW_UNREADABLE, "without a key nothing is known to be damaged"
    keys.create("acme")
    tier = tier_of(store)
    with pytest.raises(AtlasError) as refusal:
        world.check(tier, small(MODEL))
    assert refusal.value.code is Code.CHECKSUM
    removed = set(names) - set(inner.names())
    assert removed, "what was read is removed"
    sound, damaged = verify(store, remove=True)
    assert (sound, {*damaged} | removed) == (0, {*names})
    tier = tier_of(store)
    world.store(tier, small(MODEL))
    world.check(tier, small(MODEL))
    assert verify(store) == (len(names), [])


def test_bad_keys_and_stores_without_encryption_are_refused(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path)
    path = keys.create("acme")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(AtlasError) as refusal:
        keys.create("acme")
    assert refusal.value.code is Code.UNWRITABLE
    path.write_bytes(b"short")
    with pytest.raises(AtlasError) as refusal:
        keys.key(path.stem)
    assert refusal.value.code is Code.ROW_UNREADABLE
    with pytest.raises(AtlasError) as refusal:
        open_store(f"mooncake://127.0.0.1:1?keys={tmp_path}")
    assert refusal.value.code is Code.CONTRADICTORY


def test_a_key_appears_whole_and_on_disk_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "keys"
    synced = []
    fsync = os.fsync

    def record(file: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(file).st_mode))
        assert synced[-1] == bool(list(folder.glob("*.key"))), "the key is on disk before its name"
        fsync(file)

    monkeypatch.setattr(os, "fsync", record)
    path = KeyFolder(folder).create("acme")
    assert synced == [False, True]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == [path]

    def full(file: int) -> None:
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AtlasError) as refusal:
        KeyFolder(folder).create("other")
    assert refusal.value.code is Code.UNWRITABLE
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    keys = KeyFolder(tmp_path)
    path = keys.create("acme")
    path.chmod(mode)
    with pytest.raises(AtlasError, match="chmod 600") as refusal:
        keys.key(path.stem)
    assert refusal.value.code is Code.ROW_UNREADABLE
    assert not keys.has(path.stem), "so that rows are not found that cannot be read"
    path.chmod(0o400)
    assert keys.key(path.stem) == path.read_bytes()
