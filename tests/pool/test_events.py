"""Events over ZeroMQ: a listener knows what can be found, misses nothing, and trusts nobody."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.pool import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    EventSubscriber,
    PrefixIdentity,
)
from kvatlas.pool.event_stream import END
from kvatlas.pool.events import EventBatch, decode_batch, encode_batch
from tests.pool.engine import PLANS

zmq = pytest.importorskip("zmq")

WAIT = 20.0
"""Seconds for what comes at once, unless the machine is busy."""
PACK = msgspec.msgpack.encode


@pytest.fixture
def addresses(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


def connected(publisher: EventPublisher, subscriber: EventSubscriber) -> None:
    """Send until something comes: what is sent before a listener is there is lost."""
    for _ in range(200):
        publisher([])
        if subscriber._socket.poll(100):
            return
    raise AssertionError("nothing comes")


def all_of(subscriber: EventSubscriber, last: int) -> Iterator[Any]:
    """Every batch up to a number."""
    while True:
        received = subscriber.read(WAIT)
        assert received is not None
        yield received
        if received.number == last:
            return


def test_a_listener_finds_what_the_pool_finds(addresses: tuple[str, str]) -> None:
    dice = Random(5)  # noqa: S311
    events, replay = addresses
    known: dict[tuple[int, Any], list[int]] = {}
    with EventPublisher(events, replay=replay, data_parallel_rank=3) as publisher:
        pools = [BlockPool(PLANS[name], events=publisher) for name in ("sliding", "hybrid")]
        with EventSubscriber(events, replay=replay) as subscriber:
            for pool in pools:
                publisher([AllBlocksCleared()])
                for number in range(60):
                    prompt = [dice.randint(0, 1) for _ in range(2)] * 16 + [number] * 20
                    identity = PrefixIdentity(lora="adapter", salt=b"s", media=((3, b"i"),))
                    pool.admit(number, prompt, identity)
                    for stop in [*pool.stops(number, len(prompt)), len(prompt)]:
                        pool.reserve(number, stop)
                        pool.computed(number, stop)
                    pool.free(number)
                connected(publisher, subscriber)
                batches = list(all_of(subscriber, publisher.sent - 1))
                assert not any(one.gap for one in batches)
                assert {one.batch.data_parallel_rank for one in batches} == {3}
                for event in (event for one in batches for event in one.batch.events):
                    listen(known, event)
                found = {
                    (index.number, int.from_bytes(digest[-8:], "big"))
                    for index in pool._index.groups
                    for digest in index.blocks
                }
                assert known.keys() == found
                assert len(found) > 10


def listen(known: dict[tuple[int, Any], list[int]], event: Any) -> None:
    if isinstance(event, AllBlocksCleared):
        known.clear()
    elif isinstance(event, BlockRemoved):
        for one in event.block_hashes:
            del known[event.group_idx or 0, one]
    else:
        assert event.lora_name == "adapter"
        assert event.kv_cache_spec_kind in ("full_attention", "sliding_window", "mamba")
        assert (event.kv_cache_spec_sliding_window is None) == (
            event.kv_cache_spec_kind != "sliding_window"
        )
        first = ["adapter", [b"i".hex(), 3], b"s".hex()] if not event.parent_block_hash else None
        assert event.extra_keys is not None
        assert first is None or list(map(_listed, event.extra_keys[0] or ())) == first
        for one in event.block_hashes:
            known[event.group_idx or 0, one] = event.token_ids


def _listed(key: Any) -> Any:
    return list(key) if isinstance(key, tuple | list) else key


def test_missed_batches_come_again_in_order(addresses: tuple[str, str]) -> None:
    events, replay = addresses
    with EventPublisher(events, replay=replay, topic="kv@me") as publisher:
        for number in range(50):
            publisher([BlockRemoved([number])])
        with EventSubscriber(events, replay=replay, topic="kv@") as subscriber:
            connected(publisher, subscriber)
            received = list(all_of(subscriber, publisher.sent - 1))
    assert [one.number for one in received] == list(range(publisher.sent))
    assert not any(one.gap for one in received)
    assert received[7].batch.events == [BlockRemoved([7])]
    sent = publisher.sent
    publisher([])  # it is closed
    assert publisher.sent == sent


def test_a_listener_is_told_of_what_it_cannot_have_again(addresses: tuple[str, str]) -> None:
    events, replay = addresses
    publisher = EventPublisher(events, replay=replay, kept=5)
    for _ in range(300):  # of which the last are kept
        publisher([])
    with EventSubscriber(events, replay=replay, replay_timeout=1.0) as subscriber:
        connected(publisher, subscriber)
        received = list(all_of(subscriber, publisher.sent - 1))
        assert [one.gap for one in received] == [True] + [False] * (len(received) - 1)
        assert received[0].number > 0
        publisher.close()
        with EventPublisher(events, replay=replay) as publisher:  # it was started anew
            connected(publisher, subscriber)
            received = list(all_of(subscriber, publisher.sent - 1))
            assert [one.gap for one in received] == [True] + [False] * (len(received) - 1)
            assert received[0].number == 0


def test_a_publisher_that_was_started_anew_unseen_is_a_gap(addresses: tuple[str, str]) -> None:
    """It has come past the number that a listener expects when that hears of it."""
    events, replay = addresses
    publisher = EventPublisher(events, replay=replay)
    with EventSubscriber(events, replay=replay) as subscriber:
        connected(publisher, subscriber)
        heard = list(all_of(subscriber, publisher.sent - 1))
        publisher.close()
        with EventPublisher(events, replay=replay) as other:
            for number in range(len(heard) + 5):
                other([BlockRemoved([number])])
            connected(other, subscriber)
            received = list(all_of(subscriber, other.sent - 1))
            for _ in range(3):
                other([])
                received += all_of(subscriber, other.sent - 1)
    subscriber.close()  # once more, which is nothing
    assert (received[0].number, received[0].gap) == (0, True)
    gaps = [place for place, one in enumerate(received) if one.gap]
    assert len(gaps) <= 2, "what had come when the loss was seen, and what came then"
    known = received[gaps[-1] :]
    assert [one.number for one in known] == list(range(other.sent))
    assert known[3].batch.events == [BlockRemoved([3])]


def stored(**changed: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": None, "medium": "GPU",
        "lora_name": None,
    }  # fmt: skip
    return fields | changed


def test_what_is_no_batch_is_refused() -> None:
    good = decode_batch(PACK([1.0, [stored(new_field="of a later version")]]))
    assert good.events == [BlockStored([1, 2], None, [1, 2, 3, 4], 2)]
    ahead = decode_batch(PACK([1.0, [stored(lookahead_token_ids=[[5], [6]])]]))
    assert ahead.events[0].lookahead_token_ids == [[5], [6]]  # type: ignore[union-attr]
    sparse = decode_batch(PACK([1, [stored(block_hashes=[b"x"], token_ids=[0] * 8)], 2]))
    assert sparse.data_parallel_rank == 2
    bad: list[Any] = [
        [1.0], {}, [1.0, [], -1], ["now", []], [float("nan"), []], [float("inf"), []], [1.0, [{}]],
        [1.0, [stored(type="BlockStolen")]], [1.0, [stored(token_ids=[1, 2, 3])]],
        [1.0, [stored(lookahead_token_ids=[[5]])]],
        [1.0, [stored(lookahead_token_ids=[[-1], [2]])]],
        [1.0, [stored(token_ids=[1, 2])]], [1.0, [stored(block_size=0)]],
        [1.0, [stored(block_size=1 << 60)]], [1.0, [stored(token_ids=[1, 2, 3, -4])]],
        [1.0, [stored(token_ids=[1, 2, 3, 4.5])]], [1.0, [stored(block_hashes="ab")]],
        [1.0, [stored(group_idx=-1)]], [1.0, [stored(extra_keys=[None])]],
        [1.0, [{"type": "BlockRemoved"}]], [1.0, [stored(block_hashes=[None, 2])]],
    ]  # fmt: skip
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    payloads = [*map(PACK, bad), b"", b"\xc1", PACK([1.0, [stored(extra_keys=[deep, None])]])[:-9]]
    payloads += [b"\x91" * 200_000, b"\x92\x01\xdd\xff\xff\xff\xff"]  # deep; 4 billion events
    whole = encode_batch(EventBatch(1.0, [BlockStored([1], 7, [1, 2], 2)], 0))
    payloads += [whole[:cut] for cut in range(len(whole))]
    for payload in payloads:
        with pytest.raises(AtlasError) as refusal:
            decode_batch(payload)
        assert refusal.value.code is Code.BAD_HANDSHAKE
    dice = Random(1)  # noqa: S311
    for _ in range(500):
        changed = bytearray(whole)
        changed[dice.randrange(len(whole))] = dice.randrange(256)
        try:
            decode_batch(bytes(changed))
        except AtlasError as refusal:
            assert refusal.code is Code.BAD_HANDSHAKE


def test_a_publisher_that_lies_stops_no_listener(addresses: tuple[str, str]) -> None:
    events, replay = addresses
    good = encode_batch(EventBatch(1.0, []))
    context = zmq.Context.instance()
    with context.socket(zmq.XPUB) as liar, context.socket(zmq.ROUTER) as repeater:
        liar.linger = repeater.linger = 0
        liar.bind(events)
        repeater.bind(replay)
        with EventSubscriber(events, replay=replay, replay_timeout=0.3) as subscriber:
            assert liar.poll(int(WAIT * 1000))  # a listener is there
            liar.recv()
            number = (5).to_bytes(8, "big")
            for frames in ([b""], [b"", number], [b"", b"1", good], [b"", END, good],
                           [b"", number, b"no batch"], [b"", number, good, good]):  # fmt: skip
                liar.send_multipart(frames)
                with pytest.raises(AtlasError) as refusal:
                    subscriber.read(WAIT)
                assert refusal.value.code is Code.BAD_HANDSHAKE
            liar.send_multipart([b"", number, good])  # nobody answers for those before
            received = subscriber.read(WAIT)
            assert received is not None
            assert received[::2] == (5, True)
            identity = repeater.recv_multipart()[0]
            repeater.send_multipart([identity, b"", b"", number, b"nonsense"])
            assert subscriber.read(0.01) is None


def test_only_questions_in_the_right_form_are_answered(addresses: tuple[str, str]) -> None:
    events, replay = addresses
    with EventPublisher(events, replay=replay) as publisher:
        publisher([])
        with zmq.Context.instance().socket(zmq.DEALER) as asks:
            asks.linger = 0
            asks.connect(replay)
            for frames in ([b""], [b"", b"1"], [b"x", bytes(8)], [b"", bytes(8), b""]):
                asks.send_multipart(frames)
            asks.send_multipart([b"", bytes(8)])
            assert asks.poll(int(WAIT * 1000))
            assert asks.recv_multipart()[2] == bytes(8)
            assert asks.recv_multipart() == [b"", b"", END, b""]
            assert not asks.poll(300)


def test_addresses_that_cannot_be_used_are_refused() -> None:
    bad: list[Callable[[], object]] = [
        lambda: EventPublisher("nowhere"),
        lambda: EventPublisher("inproc://here", replay="nowhere"),
        lambda: EventSubscriber("nowhere"),
        lambda: EventSubscriber("inproc://here", replay="nowhere"),
        lambda: EventSubscriber("tcp://\udc80:1"),
    ]
    for call in bad:
        with pytest.raises(AtlasError) as refusal:
            call()
        assert refusal.value.code is Code.WIRE_FAILED
    with EventPublisher("tcp://127.0.0.1:*") as publisher:
        assert int(publisher.endpoint.rpartition(":")[2]) > 0


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    for call in (EventPublisher, EventSubscriber):
        with pytest.raises(AtlasError) as refusal:
            call("inproc://anywhere")
        assert refusal.value.code is Code.MISSING_EXTRA
        assert "kvatlas[wire]" in refusal.value.hint
