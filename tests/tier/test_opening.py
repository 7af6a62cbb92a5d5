"""One door to all tiers: what an address leads to, and which are refused."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import CacheIdentity, Model
from kvatlas.tier import (
    Converting,
    FolderStore,
    HostStore,
    StoreTier,
    Tier,
    TierClient,
    open_store,
    open_tier,
    prefix_keys,
)
from kvatlas.tier.chained_keys import PrefixChain
from kvatlas.tier.prefix_finder import AnyTier
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
