"""Recordings of an engine's events, and lines of them: none is lost, and none fails uncoded."""

from __future__ import annotations

import resource
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.pool import BlockStored, EventBatch, EventRecording, ReceivedBatch
from kvatlas.pool import event_recording as recordings
from kvatlas.pool import events as event_classes
from kvatlas.simulate import read_trace
from kvatlas.simulate.traces.event_trace import EventTraceBuilder

FIRST = BlockStored([1], None, [5, 6], 2)


def received(number: int, *events: BlockStored) -> ReceivedBatch:
    return ReceivedBatch(number, EventBatch(100.0 + number, list(events)), False)


@contextmanager
def no_file_longer_than(nbytes: int) -> Iterator[None]:
    """What a full disk does to a file that grows."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_a_recording_with_a_code_and_leaves_whole_batches(tmp_path: Path) -> None:
    path = tmp_path / "mine.events"
    with EventRecording(path) as recording:
        recording.write(received(0, FIRST))
        whole = recording.bytes
        with no_file_longer_than(whole + 20), pytest.raises(AtlasError) as refusal:
            recording.write(received(1, BlockStored([2], None, [7] * 100, 100)))
        assert refusal.value.code is Code.UNWRITABLE
        assert (path.stat().st_size, recording.batches) == (whole, 1)
        assert len(read_trace(path)) == 1
        recording.write(received(1, BlockStored([2], None, [7, 8], 2)))  # there is room again
    assert len(read_trace(path)) == 2


def test_a_recording_is_one_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "monday.json"
    with EventRecording(path) as recording:
        recording.write(received(0, FIRST))
    assert len(read_trace(path)) == 1


def test_a_command_that_is_told_cuts_that_recording_alone(tmp_path: Path) -> None:
    """It is for a shell, and a name may be anything."""
    path = tmp_path / "-s 0;ls $(x).events"
    path.write_bytes(recordings.FIRST_LINE + b"cut")
    with pytest.raises(AtlasError) as refusal:
        read_trace(path)
    hint = refusal.value.hint.removeprefix("Run `").removesuffix("` to remove this batch")
    command = shlex.split(hint)
    assert command == ["truncate", "-s", str(len(recordings.FIRST_LINE)), "--", path.name]


def test_a_batch_that_is_too_long_is_not_said_to_be_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its reader would be told to cut off whatever is behind it."""
    path = tmp_path / "mine.events"
    with EventRecording(path) as recording:
        recording.write(received(0, BlockStored([1], None, [7] * 100, 100)))
    for module in (recordings, event_classes):
        monkeypatch.setattr(module, "MOST_BYTES", 40)
    with pytest.raises(AtlasError) as refusal:
        read_trace(path)
    assert refusal.value.code is Code.BAD_TRACE
    assert "this is not a valid batch of events. Got 41 bytes" in str(refusal.value)


def test_numbers_that_are_too_large_are_refused_with_their_line(tmp_path: Path) -> None:
    good: dict[str, Any] = msgspec.to_builtins(FIRST)
    large = "9" * 40
    lies = [
        good | {"token_ids": [5, large]},
        good | {"lora_id": large},
        good | {"extra_keys": [[large]]},
        {"token_ids": [5, large]},
        {"token_ids": [5, f"-{large}"]},
    ]
    path = tmp_path / "mine.jsonl"
    for lie in lies:
        path.write_bytes(
            msgspec.json.encode(lie).replace(b'"9', b"9").replace(b'9"', b"9").replace(b'"-', b"-")
        )
        with pytest.raises(AtlasError) as refusal:
            read_trace(path)
        assert refusal.value.code is Code.BAD_TRACE
        assert "mine.jsonl, line 1: this is not a valid" in str(refusal.value)


def test_prompts_in_blocks_of_one_token_are_known_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.events"
    with EventRecording(path) as recording:
        recording.write(received(0, BlockStored([1, 2, 3], None, [5, 6, 7], 1)))
    assert read_trace(path).lengths.tolist() == [3]


def test_many_requests_of_one_moment_are_read_in_time() -> None:
    """Lines without times, of requests that say what they found: all are of one moment."""
    found = EventTraceBuilder("mine", "mine.jsonl", block=None, unit="line")
    batch, many = EventBatch(0.0, [FIRST]), 15_000
    start = time.process_time()
    for number in range(many):
        found.take(number + 1, batch)
    assert len(found.finish()) == many
    assert time.process_time() - start < 3  # where each looks at all before it: 5
