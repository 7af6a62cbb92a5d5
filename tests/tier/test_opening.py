"""One door to all tiers: what an address leads to, and which are refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.models import CacheIdentity, Model
from kvatlas.tier import (
    Converting,
    FolderStore,
    HostStore,
    KeyFolder,
    StoreTier,
    Tier,
    TierClient,
    open_store,
    open_tier,
    prefix_keys,
)
from kvatlas.tier.addresses import without_secrets
from kvatlas.tier.any_tier import AnyTier
from kvatlas.tier.chained_keys import PrefixChain
from tests.tier.test_store_topologies import OURS
from tests.tier.test_topologies import MODELS
from tests.tier.world import MAX_LEN, World, small

MODEL = MODELS["dense"]
ROWS = small(MODEL, layout="BHLNC")


def opened(where: str | Path, model: Model = MODEL, **options: Any) -> AnyTier:
    about = {"block_size": 16, "max_len": MAX_LEN, "memory": "1MiB", **options}
    return open_tier(where, model, OURS, **about)


def test_a_request_goes_through_every_kind_of_tier(tmp_path: Path) -> None:
    world, made = World(MODEL, 70), small(MODEL, tp=2)
    kinds = {
        "memory": Tier,
        str(tmp_path / "tier"): Tier,
        "host://?capacity=1MiB&quota=1MiB": StoreTier,
        f"folder://{tmp_path}/folder?capacity=8MiB": StoreTier,
    }
    for where, kind in kinds.items():
        with opened(where) as tier:
            assert isinstance(tier, kind)
            world.store(tier, made)
            world.check(tier, small(MODEL))
    for where in (str(tmp_path / "tier"), f"folder://{tmp_path}/folder"):
        with opened(where) as tier:  # what was stored before is there again
            world.check(tier, made)


def test_addresses_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    def refusal(act: Any) -> Code:
        with pytest.raises(AtlasError) as refused:
            act()
        return refused.value.code

    assert refusal(lambda: open_store("memcached://host")) is Code.BAD_CONFIG
    assert refusal(lambda: opened("memcached://host")) is Code.BAD_CONFIG, "no file of that name"
    assert refusal(lambda: open_store("folder://")) is Code.BAD_CONFIG, "not wherever one is"
    absent = tmp_path / "absent"
    assert refusal(lambda: open_store(f"folder://{absent}", create=False)) is Code.UNREADABLE
    assert not absent.exists()
    assert refusal(lambda: open_store("host://?colour=red")) is Code.BAD_CONFIG
    assert refusal(lambda: open_store("host://?capacity=much")) is Code.BAD_QUANTITY
    assert refusal(lambda: open_store(7)) is Code.BAD_CONFIG  # type: ignore[arg-type]
    assert refusal(lambda: open_store("folder:///tmp/\0")) is Code.BAD_CONFIG
    assert refusal(lambda: opened("host://", timeout=math.nan)) is Code.BAD_QUANTITY
    assert refusal(lambda: prefix_keys(ROWS, [1], lora=None)) is Code.BAD_CONFIG  # type: ignore[arg-type]
    assert refusal(lambda: prefix_keys(ROWS, [1], salt="a")) is Code.BAD_CONFIG  # type: ignore[arg-type]
    assert refusal(lambda: PrefixChain(ROWS, range(9)).key_at(10)) is Code.BAD_TOKENS
    assert refusal(lambda: PrefixChain(ROWS, range(9)).keys(10)) is Code.BAD_TOKENS
    assert refusal(lambda: HostStore(capacity=-1)) is Code.NEGATIVE
    assert refusal(lambda: FolderStore(tmp_path, quota=1.5)) is Code.NOT_AN_INTEGER  # type: ignore[arg-type]
    assert refusal(lambda: Tier("Qwen3-8B")) is Code.BAD_PLAN  # type: ignore[arg-type]
    assert refusal(lambda: TierClient(tmp_path / "no.sock", timeout=math.nan)) is Code.BAD_QUANTITY
    assert refusal(lambda: open_tier("host://", MODEL)) is Code.CONTRADICTORY
    assert refusal(lambda: opened(tmp_path / "x", timeout=1.0)) is Code.CONTRADICTORY
    assert refusal(lambda: opened("host://", shards=0)) is Code.OUT_OF_RANGE
    several = Converting("bf16->fp8, fp32->bf16")
    assert refusal(lambda: opened("host://", convert=several)) is Code.BAD_CONVERSION
    assert refusal(lambda: opened("memory", convert=several)) is Code.CONTRADICTORY
    assert refusal(lambda: CacheIdentity(weights="")) is Code.BAD_CONFIG
    opened(tmp_path / "of another model").close()
    for shared in (False, True):
        again = partial(opened, tmp_path / "of another model", MODELS["six"], shared=shared)
        assert refusal(again) is Code.UNLIKE_MODELS
    (tmp_path / "a file").write_bytes(b"")
    assert refusal(lambda: FolderStore(tmp_path / "a file")) is Code.UNREADABLE


def test_a_name_of_weights_or_of_a_tenant_that_is_no_text_is_refused_with_a_code() -> None:
    for about in ({"weights": "\ud800"}, {"weights": "w", "tenant": "\ud800"}):
        with pytest.raises(AtlasError) as refusal:
            CacheIdentity(**about)
        assert refusal.value.code is Code.BAD_CONFIG


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("redis://user:hidden@[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://:hid@den@host/0#hidden", "redis://host/0"),
        ("redis://user:hid/den@host:1", "redis://host:1"),
        ("redis://user:hid?den@host:1", "redis://..."),
        ("redis://user:hid#den@host:1", "redis://host:1"),
        ("redis:user:hidden@host", "redis:..."),
        ("s3://bucket/a?endpoint=http://u@h&secret_access_key=hidden", "s3://bucket/a"),
        ("folder:///mnt/a@b?keys=/etc/keys", "folder:///mnt/a@b"),
        (Path("/mnt/a@b?c"), "/mnt/a@b?c"),
        ("memory", "memory"),
    ],
)
def test_addresses_are_shown_without_secrets(where: str | Path, shown: str) -> None:
    assert without_secrets(where) == shown


@pytest.mark.parametrize("secret", ["user:hidden@host/0?", "host?secret_access_key=hidden&"])
def test_no_refusal_of_an_address_contains_its_secrets(secret: str) -> None:
    def configured(**about: Any) -> ConnectorSettings:
        return ConnectorSettings.read({"transport": "none", **about})

    refused: list[Callable[[], object]] = [
        lambda: open_store(f"redis://{secret}replicas=2"),
        lambda: open_store(f"mooncake://{secret}keys=/etc/keys"),
        lambda: open_store(f"memcached://{secret}"),
        lambda: open_store(f"redis:{secret}"),
        lambda: open_tier(f"redis://{secret}", MODEL),
        lambda: opened(f"memcached://{secret}"),
        lambda: opened(f"memcached://{secret}", timeout=1.0),
        lambda: configured(tier=f"memcached://{secret}"),
        lambda: configured(tier=f"host://{secret}"),
    ]
    for act in refused:
        with pytest.raises(AtlasError) as refusal:
            act()
        assert "hidden" not in str(refusal.value)
        assert refusal.value.code in (Code.BAD_CONFIG, Code.CONTRADICTORY)


def test_a_store_that_cannot_be_encrypted_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KeyFolder(tmp_path / "keys").create("acme")
    closed: list[FolderStore] = []
    monkeypatch.setattr(FolderStore, "close", lambda store: closed.append(store))
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(AtlasError) as refusal:
        open_store(f"folder://{tmp_path}/store?keys={tmp_path}/keys")
    assert refusal.value.code is Code.MISSING_EXTRA
    assert len(closed) == 1
