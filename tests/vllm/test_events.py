"""KV events beside vLLM's own classes: each reads what the other sends, and asks it again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.pool import BlockPool, BlockStored, EventPublisher, EventSubscriber, ReceivedBatch
from kvatlas.pool.events import AllBlocksCleared, EventBatch, decode_batch, encode_batch
from tests.pool.engine import PLANS

pytest.importorskip("vllm")

pytestmark = pytest.mark.each_release

WAIT = 30.0


def events_of_a_pool() -> list[Any]:
    """What a small pool sends while requests come, find each other, and are evicted."""
    sent: list[Any] = []
    for name in ("sliding", "hybrid"):
        pool = BlockPool(PLANS[name], events=sent.extend)
        for number in range(12):
            prompt = [*range(32), *[number] * 20]
            pool.admit(number, prompt)
            for stop in [*pool.stops(number, len(prompt)), len(prompt)]:
                pool.reserve(number, stop)
                pool.computed(number, stop)
            pool.free(number)
        pool.clear()
    return sent


def test_vllm_reads_what_a_pool_sends() -> None:
    from vllm.distributed.kv_events import KVEventBatch

    sent = EventBatch(12.5, events_of_a_pool(), 1)
    assert {type(event).__name__ for event in sent.events} == {
        "BlockStored", "BlockRemoved", "AllBlocksCleared",
    }  # fmt: skip
    read = msgspec.msgpack.decode(encode_batch(sent), type=KVEventBatch)
    assert (read.ts, read.data_parallel_rank, len(read.events)) == (12.5, 1, len(sent.events))
    for ours, theirs in zip(sent.events, read.events, strict=True):
        assert type(ours).__name__ == type(theirs).__name__
        for field in theirs.__struct_fields__:
            assert getattr(ours, field) == getattr(theirs, field), field
    # And the other way: the same fields come back, and no others.
    theirs = msgspec.msgpack.encode(read)
    assert decode_batch(theirs) == sent
    assert msgspec.msgpack.decode(encode_batch(decode_batch(theirs))) == msgspec.msgpack.decode(
        theirs
    )


def test_events_of_a_real_block_manager_are_read() -> None:
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from tests.vllm.made_up_groups import BLOCK, manager_of

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    for kinds in (["full"], ["full", "window"], ["full", "state"]):
        # vLLM 0.33 has no states at every block.
        kept = "vllm-default" if "state" in kinds else "every-block"
        manager = manager_of(kinds, 60, kept, enable_kv_cache_events=True)
        taken = []
        for number in range(8):
            manager.new_step_starts()
            tokens = list(range(3000)) if number % 2 else [number] * 3000
            params = SamplingParams(max_tokens=2)
            request = Request(str(number), tokens, params, None, block_hasher=hasher)
            computed, hit, _ = manager.get_computed_blocks(request)
            assert manager.allocate_slots(request, len(tokens) - hit, hit, computed) is not None
            manager.free(request)
            taken += manager.take_events()
        assert manager.reset_prefix_cache()
        taken += manager.take_events()
        read = decode_batch(msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=taken)))
        assert len(read.events) == len(taken) > 4
        assert read.events[-1] == AllBlocksCleared()
        groups = {event.group_idx for event in read.events if isinstance(event, BlockStored)}
        assert groups == set(range(len(kinds)))


def test_tokens_after_a_block_that_its_hash_covers_are_read() -> None:
    """As vLLM 0.33 sends them with a drafter; 0.32 has no such hashes."""
    from vllm.distributed import kv_events
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from tests.vllm.made_up_groups import BLOCK, manager_of

    if "lookahead_token_ids" not in kv_events.BlockStored.__struct_fields__:
        pytest.skip("this vLLM has no lookahead hashes")
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256, 2)
    about = {"enable_kv_cache_events": True, "num_hash_lookahead_tokens": 2}
    manager = manager_of(["full"], 60, "every-block", **about)
    manager.new_step_starts()
    tokens = [n % 7 for n in range(3 * BLOCK + 9)]
    request = Request("r", tokens, SamplingParams(max_tokens=2), None, block_hasher=hasher)
    computed, hit, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, len(tokens), hit, computed) is not None
    batch = kv_events.KVEventBatch(ts=1.0, events=manager.take_events())
    read = decode_batch(msgspec.msgpack.encode(batch))
    (stored,) = read.events
    assert isinstance(stored, BlockStored)
    ends = [BLOCK * (n + 1) for n in range(3)]
    assert stored.lookahead_token_ids == [tokens[end : end + 2] for end in ends]
    assert msgspec.msgpack.decode(encode_batch(read), type=kv_events.KVEventBatch).events


def test_batches_that_vllm_sent_before_are_asked_for_again(tmp_path: Path) -> None:
    from vllm.distributed.kv_events import BlockRemoved, KVEventBatch, ZmqEventPublisher

    addresses = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    publisher = ZmqEventPublisher(0, addresses[0], addresses[1], topic="kv")
    try:
        for number in range(20):
            publisher.publish(KVEventBatch(ts=1.0, events=[BlockRemoved([number], "GPU")]))
        with EventSubscriber(addresses[0], replay=addresses[1], topic="kv") as subscriber:
            received: list[ReceivedBatch] = []
            end = time.monotonic() + WAIT
            while not received and time.monotonic() < end:
                publisher.publish(KVEventBatch(ts=2.0, events=[]))
                received += filter(None, [subscriber.read(0.2)])
            while (one := subscriber.read(1.0)) is not None:
                received.append(one)
    finally:
        publisher.shutdown()
    assert [one.number for one in received] == list(range(len(received)))
    assert len(received) > 20
    assert not any(one.gap for one in received)
    assert received[19].batch.events[0].block_hashes == [19]  # type: ignore[union-attr]


def test_a_replay_of_ours_is_in_vllms_form(tmp_path: Path) -> None:
    """As vLLM's example of a subscriber asks for it."""
    import zmq
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

    addresses = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    with EventPublisher(addresses[0], replay=addresses[1]) as publisher:
        publisher(events_of_a_pool())
        publisher([])
        asks: Any
        with zmq.Context.instance().socket(zmq.REQ) as asks:
            asks.linger = 0
            asks.connect(addresses[1])
            asks.send((0).to_bytes(8, "big"))
            assert asks.poll(int(WAIT * 1000))
            topic, number, payload = asks.recv_multipart()
    assert (topic, number) == (b"", (0).to_bytes(8, "big"))
    assert msgspec.msgpack.decode(payload, type=KVEventBatch).events
    assert ZmqEventPublisher.END_SEQ == b"\xff" * 8
