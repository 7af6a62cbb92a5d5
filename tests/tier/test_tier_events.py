"""Events of what tiers have: a listener knows what can be found, and no more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.pool import BlockRemoved, BlockStored, EventPublisher, EventSubscriber
from kvatlas.pool.events import EventBatch, decode_batch, encode_batch
from kvatlas.tier import (
    PrefixFinder,
    StoreTier,
    Tier,
    TierEvents,
    open_tier,
    prefix_finder,
    tier_events,
)
from kvatlas.tier.any_tier import AnyTier
from kvatlas.tier.chained_keys import PrefixChain
from kvatlas.tier.tier_events import block_hash
from tests.tier.test_store_topologies import OURS
from tests.tier.test_topologies import MODELS
from tests.tier.world import MAX_LEN, World, small

BLOCK = 16
WORLDS = {name: World(MODELS[name], 70) for name in ("dense", "six hybrid")}


@contextmanager
def tiers(folder: Path, model: Any) -> Iterator[list[tuple[AnyTier, str, str]]]:
    """A tier of each kind with little room, its medium and its place."""
    about: dict[str, Any] = {"block_size": BLOCK, "max_len": MAX_LEN, "memory": "128KiB"}
    store: dict[str, Any] = {"block_size": BLOCK, "max_len": MAX_LEN, "staging": 1 << 18}
    with (
        open_tier("memory", model, **about) as memory,
        open_tier(folder / "file", model, shared=True, **about) as file,
        open_tier(f"folder://{folder}/s?capacity=120KiB", model, OURS, **store) as kept,
    ):
        kinds = (memory, "CPU", "LOCAL"), (file, "STORAGE", "LOCAL"), (kept, "STORAGE", "REMOTE")
        yield list(kinds)


def heard_of(known: dict[tuple[int, Any], list[int]], event: Any) -> None:
    if isinstance(event, BlockRemoved):
        for one in event.block_hashes:
            del known[event.group_idx or 0, one]
        return
    assert isinstance(event, BlockStored)
    size = event.block_size
    for number, one in enumerate(event.block_hashes):
        known[event.group_idx or 0, one] = event.token_ids[number * size : (number + 1) * size]


def kept_by(tier: AnyTier, chain: PrefixChain, stop: int) -> set[tuple[int, int]]:
    """What the tier has of a request, by its own word."""
    return {
        (number, block_hash(chain.key_at(end)))
        for number, group in enumerate(tier.plan.groups)
        for end in range(group.block, stop + 1, group.block)
        if tier.kept_ends(number, [(end, chain.key_at(end))], whole=True) == [True]
    }


@pytest.mark.parametrize("name", WORLDS)
def test_a_listener_knows_what_can_be_found_while_blocks_come_and_go(
    name: str, tmp_path: Path
) -> None:
    made, dice = small(MODELS[name]), Random(7)  # noqa: S311
    held, tables = WORLDS[name].holding(made, 0)
    with tiers(tmp_path, MODELS[name]) as kinds:
        for tier, medium, locality in kinds:
            heard: list[Any] = []
            finder, events = PrefixFinder(tier, b"ours"), TierEvents(tier, heard.extend)
            known: dict[tuple[int, Any], list[int]] = {}
            removed = 0
            chains: list[PrefixChain] = []
            for number in range(8):
                tokens = [*[dice.randint(0, 1)] * 32, *[number] * 38]
                chains.append(finder.chain(tokens, salt=b"mine", lora="adapter"))
                tier.store(held, made, blocks=tables, tokens=64, keys=chains[-1].keys(64))
                events.note(chains[-1], 64)
                events.tell()
                for event in decode_batch(encode_batch(EventBatch(1.0, heard))).events:
                    assert (event.medium, event.locality) == (medium, locality)  # type: ignore[union-attr]
                    heard_of(known, event)
                    removed += isinstance(event, BlockRemoved)
                heard.clear()
                found = set().union(*(kept_by(tier, chain, 64) for chain in chains))
                assert known.keys() == found
            assert known
            assert removed, "some have made room"
            for chain in chains:
                for end in range(BLOCK, 65, BLOCK):
                    told = known.get((0, block_hash(chain.key_at(end))))
                    assert told in (None, chain.tokens(end - BLOCK, end))


def test_what_is_on_its_way_is_told_of_when_it_is_there_and_a_tier_that_is_gone_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, made, heard = WORLDS["dense"], small(MODELS["dense"]), []  # type: ignore[var-annotated]
    where = f"folder://{tmp_path}"
    options: dict[str, Any] = {"block_size": BLOCK, "max_len": MAX_LEN, "staging": 1 << 18}
    with open_tier(where, MODELS["dense"], OURS, **options) as tier:
        assert isinstance(tier, StoreTier)
        chain, events = PrefixFinder(tier).chain(range(70)), TierEvents(tier, heard.extend)
        events.note(chain, 64)
        events.tell()
        assert not heard, "nothing can be found yet"
        world.store(tier, made, tokens=64, keys=chain.keys(64))
        with monkeypatch.context() as broken:
            gone = AtlasError(Code.WIRE_FAILED, got="a store that is gone", hint="")
            broken.setattr(tier._traffic.store, "exists", lambda _: (_ for _ in ()).throw(gone))
            events.tell()
        assert not heard
        events.tell()
        (stored,) = heard
        assert (stored.token_ids, stored.parent_block_hash) == (list(range(64)), None)
        assert stored.block_hashes == [block_hash(key) for key in chain.keys(64)[0] if key]
        monkeypatch.setattr(tier_events, "_MOST", 1)
        events.tell()
        assert [type(one) for one in heard] == [BlockStored, BlockRemoved]
        assert len(heard[1].block_hashes) == 3, "what is not remembered cannot be told of later"
        events.forget()
        tier.drop(chain.keys(64))
        events.tell()
        assert len(heard) == 2


def test_long_requests_that_wait_to_be_told_of_are_given_up_by_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their number says nothing of what they take: 4,096 of a million tokens do not fit."""
    monkeypatch.setattr(tier_events, "_NOTED_TOKENS", 200)
    world, made, heard = WORLDS["dense"], small(MODELS["dense"]), list[Any]()
    tier = Tier(small(MODELS["dense"], layout="BHLNC"))
    finder, events = PrefixFinder(tier), TierEvents(tier, heard.extend)
    chains = [finder.chain([number] * 64) for number in range(9)]
    world.store(tier, made, tokens=64, keys=chains[-1].keys(64))
    for chain in chains:
        events.note(chain, 64)
    kept = 200 // 64
    assert len(events._noted) == kept
    for _ in range(9):
        events.tell()
    assert [one.token_ids for one in heard] == [[8] * 64], "the latest was looked for"
    assert not len(events._noted)


def test_a_publisher_sends_what_a_tier_has(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    world, made = WORLDS["dense"], small(MODELS["dense"])
    about: dict[str, Any] = {"block_size": BLOCK, "max_len": MAX_LEN, "memory": "1MiB"}
    addresses = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    with (
        open_tier("memory", MODELS["dense"], **about) as tier,
        EventPublisher(addresses[0], replay=addresses[1]) as publisher,
        EventSubscriber(addresses[0], replay=addresses[1]) as subscriber,
    ):
        assert isinstance(tier, Tier)
        chain, events = PrefixFinder(tier).chain(range(70)), TierEvents(tier, publisher)
        world.store(tier, made, tokens=64, keys=chain.keys(64))
        events.note(chain, 64)
        events.tell()
        while (received := subscriber.read(timeout=0.1)) is None:
            publisher([])  # it sees from any later batch that it missed some
        (stored,) = received.batch.events
        assert isinstance(stored, BlockStored)
        assert (stored.medium, stored.token_ids) == ("CPU", list(range(64)))


def test_a_tier_that_is_slow_is_asked_for_so_long_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about: dict[str, Any] = {"block_size": BLOCK, "max_len": 1 << 14, "memory": "16MiB"}
    with open_tier("memory", MODELS["six hybrid"], **about) as tier:
        finder, asked = PrefixFinder(tier), []

        def slow(group: int, ends: list[Any], **_: Any) -> list[bool]:
            asked.append(len(ends))
            time.sleep(0.05)
            return [group == finder._keeping] * len(ends)

        monkeypatch.setattr(tier, "kept_ends", slow)
        monkeypatch.setattr(prefix_finder, "_SECONDS", 0.1)
        assert finder.longest(finder.chain(range(16_000))) == 0
        assert len(asked) < 8
        events = TierEvents(tier, lambda _: None)
        for number in range(50):
            events.note(finder.chain([number] * 20), 20)
        monkeypatch.setattr(tier_events, "_SECONDS", 0.0)
        asked.clear()
        events.tell()
        assert 1 <= len(asked) <= len(tier.plan.groups), "of one request; the others come later"
