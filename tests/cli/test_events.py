"""`kvatlas events`: a running engine recorded, and simulated from its recording."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from kvatlas.pool import BlockEvent, BlockStored, EventPublisher
from kvatlas.pool.event_recording import FIRST_LINE
from kvatlas.pool.events import EventBatch, encode_batch
from tests.cli.helpers import kvatlas, said, shown

zmq = pytest.importorskip("zmq")


@contextmanager
def meanwhile(what: Callable[[], object]) -> Iterator[None]:
    """Do something every now and then, in another thread."""
    ended = Event()

    def run() -> None:
        while not ended.wait(0.02):
            what()

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def prompt(number: int) -> list[BlockEvent]:
    """20 blocks, of which prompts share 10, and each has the last to itself."""
    parent, new = (1009, range(10)) if number else (None, range(20))
    hashes = [(number + 1) * 1000 + n for n in new]
    return [BlockStored(list(hashes), parent, [h for h in hashes for _ in range(16)], 16)]


def test_a_running_engine_is_recorded_and_simulated(tmp_path: Path) -> None:
    events, replay, path = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r", tmp_path / "mine.events"
    options = ["events", events, "--replay", replay, "-o", str(path)]
    with EventPublisher(events, replay=replay, data_parallel_rank=0) as publisher:
        for number in range(3):  # before anybody listens
            publisher(prompt(number))
        with meanwhile(lambda: publisher([])):
            told = said(*options, "--batches", "4")
    assert (told["batches"], told["events"], told["gaps"]) == (4, 3, 0)
    assert told["bytes"] == path.stat().st_size
    simulation = ["Llama-3.1-8B", "--memory", "2GiB", "--max-len", "8K", "--trace", str(path)]
    answer = said("simulate", *simulation)
    (row,) = answer["rows"]
    assert (row["requests"], row["found"]) == (3, 2 * 10 * 16)
    assert answer["unseen"] == {"requests": 0, "tokens": 0, "gaps": 0, "ranks": 1}
    assert "Note: Requests were inferred" in shown("simulate", *simulation)
    chosen = said("plan", *simulation, "--block-size", "16")
    assert chosen["unseen"]["ranks"] == 1
    assert chosen["tried"][0]["requests"] == 3
    refused = kvatlas(*options)
    assert "unwritable" in refused.stderr
    assert len(path.read_bytes()) == told["bytes"], "what was recorded stays"


def test_an_interrupt_ends_a_recording_that_says_what_it_lacks(tmp_path: Path) -> None:
    events, path = f"ipc://{tmp_path}/e", tmp_path / "late.events"
    with EventPublisher(events) as publisher:
        publisher(prompt(0))

        def go_on() -> None:
            publisher([])
            if path.exists() and path.stat().st_size > len(FIRST_LINE):
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *_: None)  # those that come when it has ended
        try:
            with meanwhile(go_on):
                text = shown("events", events, "-o", str(path))
        finally:
            signal.signal(signal.SIGINT, before)
    assert "Press Ctrl-C to stop" in text
    assert "missing at 1 place" in text


def test_a_recording_of_nothing_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "none.events"
    result = kvatlas("events", f"ipc://{tmp_path}/e", "-o", str(path), "--seconds", "0.1")
    assert result.exit_code == 2
    assert "deadline" in result.stderr
    assert not path.exists()


def test_a_message_that_is_no_batch_does_not_end_a_recording(tmp_path: Path) -> None:
    events, path = f"ipc://{tmp_path}/e", tmp_path / "mine.events"
    good = encode_batch(EventBatch(1.0, prompt(0)))
    with zmq.Context.instance().socket(zmq.XPUB) as liar:
        liar.linger, liar.rcvtimeo = 0, 5000
        liar.bind(events)

        def send(*payloads: bytes) -> None:
            while liar.recv() != b"\x01":  # until somebody listens
                pass
            for number, payload in enumerate(payloads):
                liar.send_multipart([b"", number.to_bytes(8, "big"), payload])

        sender = Thread(target=send, args=(good, b"nonsense", good))
        sender.start()
        told = said("events", events, "-o", str(path), "--batches", "2", "--seconds", "5")
        sender.join()
        assert (told["batches"], told["gaps"], told["refused"]) == (2, 1, 1)
        # From the first on, it is an engine that is not understood: that is said at once.
        path.unlink()
        sender = Thread(target=send, args=(b"nonsense",))
        sender.start()
        refused = kvatlas("events", events, "-o", str(path), "--seconds", "5")
        sender.join()
    assert "bad_handshake" in refused.stderr
    assert not path.exists()
