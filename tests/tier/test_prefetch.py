"""Prefixes that are copied to another store before requests need them there."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvatlas import AtlasError
from kvatlas.tier import (
    EncryptedStore,
    FolderStore,
    HostStore,
    KeyFolder,
    PrefixFinder,
    StoreTier,
)
from kvatlas.tier.namespaces import parse_name
from kvatlas.tier.store_inspection import copy_prefix
from tests.cli.helpers import kvatlas, said
from tests.tier.lying_store import LyingStore
from tests.tier.test_store_topologies import OURS, tier_in
from tests.tier.test_topologies import MODELS
from tests.tier.world import every_block, pools, small

MODEL = MODELS["sliding"]
PREFIX, OTHERS = list(range(500, 596)), [*range(500, 532), *range(64)]
"""Two requests that share their first 32 tokens."""


def filled(tier: StoreTier, tokens: list[int], salt: bytes = b"") -> StoreTier:
    """A tier with one more request of random bytes, of which it stores each whole row."""
    made, finder = small(MODEL), PrefixFinder(tier)
    memory, blocks = pools(made, 0, len(salt)), every_block(made, len(tokens))
    for stop in range(finder.step, len(tokens) + 1, finder.step):
        keys = finder.chain(tokens, salt).keys(stop)
        start = finder.start_for(stop - finder.step, stop)
        assert not tier.store(memory, made, blocks=blocks, tokens=(start, stop), keys=keys).no_room
    return tier


def found(tier: StoreTier, tokens: list[int], salt: bytes = b"") -> int:
    finder = PrefixFinder(tier)
    return finder.longest(finder.chain(tokens, salt))


def test_a_prefetched_prefix_is_found_with_the_same_bytes_and_no_other_is() -> None:
    source, other = HostStore(), HostStore()
    with tier_in(source, MODEL) as tier, tier_in(other, MODEL) as there:
        filled(filled(filled(tier, PREFIX), OTHERS), PREFIX, b"salt")
        copied = tier.prefetch(PREFIX, other)
        assert copied.copied == len(list(other.names())) > 0
        assert (copied.existing, copied.refused) == (0, [])
        assert found(there, PREFIX) == len(PREFIX)
        assert found(there, OTHERS) == found(tier, OTHERS[:32] + [7] * 64) == 32
        assert found(there, PREFIX, b"salt") == 0
        made, read = small(MODEL), []
        finder, blocks = PrefixFinder(tier), every_block(made, len(PREFIX))
        for one in (tier, there):
            read.append({index: pool * 0 for index, pool in pools(made, 0, 9).items()})
            keys = finder.chain(PREFIX).keys()
            one.fetch(read[-1], made, blocks=blocks, tokens=len(PREFIX), keys=keys)
        assert all(np.array_equal(read[0][index], read[1][index]) for index in read[0])
        assert any(pool.any() for pool in read[0].values())
        assert tier.prefetch(PREFIX, other)[:3] == (0, 0, copied.copied)


def test_a_cancelled_copy_leaves_whole_objects_and_is_continued() -> None:
    source, other = HostStore(), HostStore()
    with tier_in(source, MODEL) as tier, tier_in(other, MODEL) as there:
        filled(tier, PREFIX)
        told: list[float] = []
        part = tier.prefetch(PREFIX, other, progress=told.append, cancelled=lambda: len(told) >= 20)
        assert part.copied == len(told) == 20
        assert told == sorted(told)
        assert 0 < told[-1] < 1
        assert 0 < found(there, PREFIX) < len(PREFIX), "the first tokens come first"
        rest = tier.prefetch(PREFIX, other, progress=told.append)
        assert rest.existing == 20
        assert told[-1] == 1
        assert found(there, PREFIX) == len(PREFIX)


@pytest.mark.parametrize("harm", ["damaged", "full"])
def test_damaged_objects_and_those_without_space_are_reported(harm: str, tmp_path: Path) -> None:
    with tier_in(FolderStore(tmp_path / "one"), MODEL) as tier:
        filled(tier, PREFIX)
    source = FolderStore(tmp_path / "one")
    rows = [name for name in source.names() if parse_name(name)]
    other = HostStore(capacity=1 if harm == "full" else 1 << 30)
    if harm == "damaged":
        size = source.size(rows[0])
        source.remove(rows[:1])
        source.put([(rows[0], [np.ones(size, np.uint8)])])
    done = copy_prefix(source, other, PREFIX)
    if harm == "damaged":
        assert done.refused == rows[:1]
        assert other.exists(rows) == [False] + [True] * (len(rows) - 1)
    else:
        assert done.copied == 0
        assert set(rows) <= set(done.refused)


def test_the_command_line_copies_a_prefix(tmp_path: Path) -> None:
    with tier_in(FolderStore(tmp_path / "one"), MODEL) as tier:
        filled(tier, PREFIX)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(PREFIX))
    where, to = f"folder://{tmp_path}/one", f"folder://{tmp_path}/two"
    asked = ("tier", "copy", where, "--prefix", str(tokens), "--to", to)
    done = said(*asked)
    assert done["copied"] > 0
    assert said(*asked)["existing"] == done["copied"]
    with tier_in(FolderStore(tmp_path / "two"), MODEL) as there:
        assert found(there, PREFIX) == len(PREFIX)
    tokens.write_text("{}")
    result = kvatlas(*asked)
    assert result.exit_code == 2
    assert "cannot be read" in " ".join(result.stderr.split())


def test_a_copy_reports_an_encrypted_object_that_is_damaged(tmp_path: Path) -> None:
    keys, inner, other = KeyFolder(tmp_path), HostStore(), HostStore()
    keys.create(OURS.tenant)
    with tier_in(EncryptedStore(inner, keys), MODEL) as tier:
        filled(tier, PREFIX)
        name = min(inner.names(tier.namespace.prefix))
        raw = np.empty(inner.size(name), np.uint8)
        assert inner.get([(name, [raw])]) == [raw.nbytes]
        raw[40] ^= 1
        inner.remove([name])
        inner.put([(name, [raw])])
        done = tier.prefetch(PREFIX, other)
    assert done.refused == [name]
    assert done.copied == len(list(inner.names())) - 1


def test_closing_a_tier_does_not_wait_for_a_copy_from_a_store_that_hangs() -> None:
    store, other = LyingStore(), HostStore()
    tier = filled(tier_in(store, MODEL), PREFIX)
    copying, closed = threading.Event(), threading.Event()
    store.close = closed.set  # type: ignore[method-assign]

    def hang(_: float) -> None:
        store.fault = "get stalls"
        copying.set()

    tier.timeout = 0.2
    with ThreadPoolExecutor(1) as threads:
        copy = threads.submit(tier.prefetch, PREFIX, other, progress=hang)
        assert copying.wait(20)
        try:
            begun = time.monotonic()
            tier.close()
            assert time.monotonic() - begun < 5
            assert not closed.is_set(), "a call of it is still under way"
            assert not copy.done()
        finally:
            store.stalled.set()
        assert copy.result(20).copied <= 2, "cancelled, and ended after the object in flight"
    with pytest.raises(AtlasError, match="closed"):
        tier.prefetch(PREFIX, other)
    tier.close()
    assert closed.is_set()
