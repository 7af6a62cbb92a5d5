"""Engines of several ranks around one tier, without vLLM: each rank and scheduler a client."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.copying import copy_request
from kvatlas.engines.vllm import (
    ConnectorSettings,
    describe_stage,
    prefix_tier,
    tier_scheduler,
    tier_worker,
)
from kvatlas.engines.vllm.describe import described_model, join_stages
from kvatlas.engines.vllm.ended_requests import Ended, EndedRequests
from kvatlas.engines.vllm.engine_tier import find_tier, open_tier
from kvatlas.engines.vllm.fleet_tier import find_fleet_tier, open_fleet_tier
from kvatlas.engines.vllm.prefix_tier import PrefixTier
from kvatlas.engines.vllm.scheduler_side import SchedulerSide
from kvatlas.engines.vllm.tier_worker import TierWorker
from kvatlas.models import CacheIdentity
from kvatlas.routing import route
from kvatlas.tier import FolderStore
from kvatlas.tier.opening import is_store, rows_of
from kvatlas.wire import Memory
from tests.vllm.shapes import Blocks, Config, FullAttentionSpec, Group, vllm_config
from tests.vllm.test_prefix_tier import LAYERS, MEMORY, TOKENS, asking

OURS = CacheIdentity(weights="weights")
HEADS = 2
"""Of the whole model."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the scheduler wait for answers that it can do without, on a busy machine too."""
    monkeypatch.setattr(prefix_tier, "_SOON", 10.0)


class Ranks:
    """An engine's ranks, each with memory and a tier's client of its own, and its scheduler."""

    def __init__(self, where: Path | str, name: str, *, tp: int, block: int, **about: Any) -> None:
        spec = FullAttentionSpec(block_size=block, num_kv_heads=HEADS // tp)
        config = Config([Group(spec, LAYERS[0])], num_blocks=24)
        stages = [describe_stage(vllm_config(tp=tp), config)]
        self.plan = join_stages(stages)
        rng = np.random.default_rng([tp, block])
        size = self.plan.pools[0].nbytes
        self.pools = [rng.integers(0, 256, size, np.uint8) for _ in range(tp)]
        self.ended = [EndedRequests() for _ in range(tp)]
        self.workers = []
        given = {"tier": str(where), "tier_options": {"staging": 1 << 16}, "transport": "none"}
        fleet = ConnectorSettings.read(given | about) if is_store(where) else None
        weights = CacheIdentity(weights="weights of the fleet")
        rows = b""
        for rank, pool in enumerate(self.pools):
            if fleet is None:
                tier: Any = open_tier(str(where), MEMORY, described_model(stages), self.plan, name)
            else:
                tier = open_fleet_tier(fleet, self.plan, weights)
                rows = tier.plan.to_json()
            held = Memory(pool.ctypes.data, size, owner=pool)
            self.workers.append(TierWorker(tier, self.plan, rank, held, self.ended[rank]))
        self.scheduler = SchedulerSide(vllm_config(tp=tp), config, alone=True)
        asked: Any = find_tier(str(where), name) if fleet is None else None
        if fleet is not None:
            asked = find_fleet_tier(fleet, rows, weights)
        assert asked is not None
        self.asked = asked
        identity = b"weights" if fleet is None else b""
        used = PrefixTier(asked, self.plan.max_len, identity, events_from="STORAGE")
        self.scheduler.use_tier(used, about.get("lookup_seconds", 20.0))

    def carry_out(self, ranks: Any = None) -> None:
        orders = self.scheduler.take_orders()
        for rank in range(len(self.workers)) if ranks is None else ranks:
            self.workers[rank].carry_out(orders)

    def wait(self, rank: int) -> Ended:
        until = time.monotonic() + 20
        while not ((ended := self.ended[rank].take()).sent or ended.received):
            assert time.monotonic() < until
            time.sleep(0.001)
        return ended

    def matched(self, request: Any) -> int | None:
        until = time.monotonic() + 20
        while (found := self.scheduler.matched_tokens(request, 0)[0]) is None:
            assert time.monotonic() < until
        return found

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()


def kept_by(engine: Ranks, table: list[int], ranks: Any = None) -> None:
    request = asking(TOKENS[:300])
    request.num_computed_tokens = 300
    assert engine.scheduler.finished(request, (table,))[0]
    engine.carry_out(ranks)
    for rank in range(len(engine.workers)) if ranks is None else ranks:
        assert engine.wait(rank).sent == {"r"}


def expected_at(src: Ranks, dst: Ranks, rows: list[int], into: list[int]) -> list[Any]:
    """What the pools of the other engine should be, by a route that meets no tier."""
    pools = [pool.copy() for pool in dst.pools]
    copy_request(
        route(src.plan, dst.plan),
        {rank: {0: pool} for rank, pool in enumerate(src.pools)},
        {rank: {0: pool} for rank, pool in enumerate(pools)},
        source_blocks={0: rows}, destination_blocks={0: into}, tokens=256,
    )  # fmt: skip
    return pools


@pytest.mark.parametrize("kind", ["file", "store"])
@pytest.mark.parametrize(("first", "second"), [((2, 64), (1, 128)), ((1, 32), (2, 64))])
def test_ranks_of_unlike_engines_share_a_tier_and_a_prefix_is_found_when_all_have_stored(
    first: tuple[int, int], second: tuple[int, int], kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "tier" if kind == "file" else f"folder://{tmp_path}/store"
    one = Ranks(path, "one", tp=first[0], block=first[1])
    other = Ranks(path, "other", tp=second[0], block=second[1])
    table = [3, 9, 1, 7, 5, 11, 2, 8, 10, 4]
    if first[0] > 1:
        kept_by(one, table, [0])
        assert other.matched(asking(TOKENS, "early")) == 0, "one rank's part is not there"
    kept_by(one, table)
    request = asking(TOKENS, "found")
    assert other.matched(request) == 256
    expected = expected_at(one, other, table, [6, 2, 12, 14])
    other.scheduler.allocated(request, Blocks([6, 2, 12, 14]), 256)
    orders = other.scheduler.take_orders()
    for rank, worker in enumerate(other.workers):
        worker.carry_out(orders)
        assert other.wait(rank).failed == set(), "the pin is there for every rank"
    other.scheduler.received({"found"})
    for got, right in zip(other.pools, expected, strict=True):
        np.testing.assert_array_equal(got, right)
    other.close()
    one.close()


def test_before_sleep_the_tier_is_left_alone_and_afterwards_it_is_used_again(
    tmp_path: Path,
) -> None:
    """Caches whose memory has gone are neither read nor written; what was stored is found."""
    one = Ranks(tmp_path / "tier", "one", tp=1, block=64)
    table = [3, 9, 1, 7, 5]
    request = asking(TOKENS[:300])
    request.num_computed_tokens = 300
    assert one.scheduler.finished(request, (table,))[0]
    one.carry_out()
    one.workers[0].finish()
    assert one.ended[0].take().sent == {"r"}, "the store was waited for"
    expected = expected_at(one, one, table, [6, 2, 12, 14])
    found = asking(TOKENS, "found")
    assert one.matched(found) == 256
    one.scheduler.allocated(found, Blocks([6, 2, 12, 14]), 256)
    one.carry_out()
    assert one.wait(0).failed == set()
    np.testing.assert_array_equal(one.pools[0], expected[0])
    one.close()


def test_what_was_found_is_read_when_the_engine_that_served_the_tier_has_gone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tier"
    one = Ranks(path, "one", tp=1, block=64)
    other = Ranks(path, "other", tp=2, block=64)
    kept_by(one, [3, 9, 1, 7, 5])
    request, table = asking(TOKENS, "found"), [6, 2, 12, 14]
    assert other.matched(request) == 256
    one.close()
    expected = expected_at(one, other, [3, 9, 1, 7, 5], table)
    other.scheduler.allocated(request, Blocks(table), 256)
    other.carry_out()
    for rank in range(2):
        assert other.wait(rank).failed == set()
    for got, right in zip(other.pools, expected, strict=True):
        np.testing.assert_array_equal(got, right)
    other.scheduler.received({"found"})
    # A worker of this engine serves it now: its scheduler finds that, sooner or later.
    until = time.monotonic() + 20
    while not other.matched(asking(TOKENS, f"again {time.monotonic()}")):
        assert time.monotonic() < until
    other.close()


def test_a_store_that_is_slow_holds_a_request_up_for_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"folder://{tmp_path}"
    one = Ranks(where, "one", tp=1, block=64)
    kept_by(one, [3, 9, 1, 7, 5])
    assert one.matched(asking(TOKENS, "quick")) == 256
    # The scheduler's own limit, and not the tier's, which begins a little later.
    monkeypatch.setattr(one.scheduler._tier, "_timeout", 0.3)
    answering, store = threading.Event(), one.asked._traffic.store
    exists = store.exists

    def slow(names: list[str]) -> list[bool]:
        answering.wait(20)
        return list(exists(names))

    store.exists = slow
    monkeypatch.setattr(prefix_tier, "_SOON", 0.001)
    monkeypatch.setattr(tier_scheduler, "_PAUSE", 60.0)  # longer than a busy machine takes
    begun = time.monotonic()
    waiting = asking(TOKENS, "slow")
    assert one.scheduler.matched_tokens(waiting, 0)[0] is None, "vLLM goes on with others"
    assert one.matched(waiting) == 0
    assert 0.2 < time.monotonic() - begun < 10
    answering.set()
    assert one.matched(waiting) == 0, "it is being computed"
    begun = time.monotonic()
    assert one.scheduler.matched_tokens(asking(TOKENS, "next"), 0)[0] == 0, "nobody else waits"
    # The store answers again; a busy machine may take longer than the short limit of above.
    monkeypatch.setattr(one.scheduler._tier, "_timeout", 20.0)
    one.scheduler._tier._asked_from = begun  # type: ignore[union-attr]
    assert one.matched(asking(TOKENS, "later")) == 256
    one.scheduler.allocated(waiting, Blocks([6, 2, 12, 14, 15]), 0)
    assert not one.scheduler.take_orders().loads
    one.close()


def test_what_a_store_has_lost_since_it_was_found_fails_that_request_alone(tmp_path: Path) -> None:
    where = f"folder://{tmp_path}"
    one = Ranks(where, "one", tp=2, block=64)
    kept_by(one, [3, 9, 1, 7, 5])
    request = asking(TOKENS, "found")
    assert one.matched(request) == 256
    for path in tmp_path.rglob("0.0-64/1"):  # of the second rank
        path.unlink()
    one.scheduler.allocated(request, Blocks([6, 2, 12, 14]), 256)
    one.carry_out()
    assert [one.wait(rank).failed for rank in range(2)] == [{"found"}, {"found"}]
    one.scheduler.received({"found"})
    assert one.matched(asking(TOKENS, "again")) == 0
    one.close()


def test_tenants_and_weights_of_one_store_find_nothing_of_each_other(tmp_path: Path) -> None:
    where = f"folder://{tmp_path}"
    one = Ranks(where, "one", tp=1, block=64, tenant="one")
    kept_by(one, [3, 9, 1, 7, 5])
    other = Ranks(where, "other", tp=1, block=64, tenant="other")
    assert other.matched(asking(TOKENS)) == 0
    assert other.asked.misses == {"other_tenant": 1}
    settings = ConnectorSettings.read({"tier": where, "tenant": "one", "transport": "none"})
    stranger = find_fleet_tier(
        settings, one.asked.plan.to_json(), CacheIdentity(weights="other weights")
    )
    assert stranger is not None
    asked = PrefixTier(stranger, one.plan.max_len, b"")
    assert asked.find(asked.chain(TOKENS, None)).result(20).tokens == 0
    assert stranger.misses == {"other_weights": 1}
    for engine in (one, other, asked):
        engine.close()


def test_a_store_that_cannot_be_reached_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "a file").write_bytes(b"")
    for where in (f"folder://{tmp_path}/a file", "mooncake://127.0.0.1:1"):
        settings = ConnectorSettings.read({"tier": where, "transport": "none"})
        config = Config([Group(FullAttentionSpec(block_size=64), LAYERS[0])], num_blocks=24)
        plan = join_stages([describe_stage(vllm_config(), config)])
        assert open_fleet_tier(settings, plan, OURS) is None
        assert find_fleet_tier(settings, plan.to_json(), OURS) is None
    settings = ConnectorSettings.read({"tier": "folder:///tmp/x?colour=red", "transport": "none"})
    with pytest.raises(AtlasError, match="unknown option"):
        open_fleet_tier(settings, plan, OURS)


def test_a_store_that_hangs_holds_the_blocks_of_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_worker, "_SLOW", 0.05)
    options = {"staging": 1 << 16, "deadline": 0.3}
    one = Ranks(f"folder://{tmp_path}", "one", tp=1, block=64, tier_options=options)
    answering = threading.Event()
    [worker] = one.workers
    store = worker._tier._traffic.store  # type: ignore[union-attr]
    exists = store.exists
    monkeypatch.setattr(store, "exists", lambda names: answering.wait(20) and exists(names))
    begun = time.monotonic()
    for _ in range(30):
        kept_by(one, [3, 9, 1, 7, 5])
    assert time.monotonic() - begun < 6, "not 30 deadlines"
    assert one.workers[0].take_counts().tier_failures == 30
    answering.set()
    worker._store_from = 0.0
    kept_by(one, [3, 9, 1, 7, 5])
    assert one.matched(asking(TOKENS, "found")) == 256
    one.close()


def test_what_all_ranks_have_stored_is_told_to_routers_and_what_is_gone_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tier, "_ASK_AGAIN", 0.0)

    def next_event() -> Any:
        until = time.monotonic() + 20
        while not (events := one.scheduler.take_events()):
            assert time.monotonic() < until
        (event,) = events
        return event

    for where in (tmp_path / "tier", f"folder://{tmp_path}/store"):
        one = Ranks(where, "one", tp=2, block=64)
        kept_by(one, [3, 9, 1, 7, 5])
        one.scheduler.sent({"r"})
        stored = next_event()
        assert (stored.token_ids, stored.block_size) == (TOKENS[:256], 64)
        place = "REMOTE" if is_store(where) else "LOCAL"
        assert (stored.medium, stored.locality) == ("STORAGE", place)
        keys = one.scheduler._tier._tier.chain(TOKENS[:256], None).keys()  # type: ignore[union-attr]
        one.asked.drop({0: keys[0][3:]})
        removed = next_event()
        assert removed.block_hashes == stored.block_hashes[3:]
        assert one.scheduler.reset_tier()
        assert not one.scheduler.take_events(), "vLLM itself says that nothing is found any more"
        one.close()
    assert SchedulerSide(vllm_config(), Config([], num_blocks=1)).take_events() == []


def test_routers_are_told_nothing_of_other_weights_and_an_engine_waits_for_no_tier_then(
    tmp_path: Path,
) -> None:
    one = Ranks(tmp_path / "tier", "one", tp=1, block=64)
    kept_by(one, [3, 9, 1, 7, 5])
    one.scheduler.sent({"r"})
    prefixes = one.scheduler._tier._tier  # type: ignore[union-attr]
    assert not one.scheduler.take_events(), "it is being asked"
    events, telling = prefixes._events, prefixes._telling
    assert events is not None
    assert telling is not None
    telling.result(20)
    answering = threading.Event()
    one.asked.kept_ends = lambda _, ends, **__: [answering.wait(20)] * len(ends)
    events.note(prefixes.chain(TOKENS[:64], "others"), 64)
    under_way = prefixes._asking.submit(events.tell)
    begun = time.monotonic()
    assert one.scheduler.reset_tier()
    assert time.monotonic() - begun < 10
    answering.set()
    under_way.result(20)
    assert not one.scheduler.take_events(), "what was found is nothing to the new weights"
    one.close()


def test_a_store_that_cannot_be_used_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[FolderStore] = []
    monkeypatch.setattr(FolderStore, "close", lambda store: closed.append(store))
    gone = AtlasError(Code.WIRE_FAILED, got="no memory for the store", hint="")
    monkeypatch.setattr(FolderStore, "register", lambda *_: (_ for _ in ()).throw(gone))
    settings = ConnectorSettings.read({"tier": f"folder://{tmp_path}", "transport": "none"})
    config = Config([Group(FullAttentionSpec(block_size=64), LAYERS[0])], num_blocks=24)
    plan = join_stages([describe_stage(vllm_config(), config)])
    rows = rows_of(described_model([describe_stage(vllm_config(), config)]), 64, 512, "1GiB")
    assert find_fleet_tier(settings, rows.to_json(), OURS) is None
    assert open_fleet_tier(settings, plan, OURS) is None
    assert len(closed) == 2
