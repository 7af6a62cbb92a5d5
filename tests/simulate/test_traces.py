"""Traces from files: the forms that are read, and what is refused with its line."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.traces import read_trace, trace_files
from tests.pool.long_stream import token_line, write_lines
from tests.profiles import DEEP

SAMPLE = Path(__file__).parents[1] / "pool" / "sample_trace.jsonl"


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def mooncake(length: int, ids: list[Any], **more: Any) -> dict[str, Any]:
    return {"input_length": length, "hash_ids": ids, **more}


def test_the_forms_of_one_trace_are_the_same_trace(tmp_path: Path) -> None:
    first = [*range(40)]
    second = [*range(32), *range(100, 110)]
    plain = written(tmp_path / "plain.jsonl", {"token_ids": first}, {"token_ids": second})
    hashed = written(
        tmp_path / "hashed.jsonl",
        mooncake(40, [7, 8, 9], block_size=16, timestamp=0),
        mooncake(42, [7, 8, 10], block_size=16, timestamp=5000, output_length=3),
    )
    talk = {"id": "x", "block_size": 16, "hash_id_scope": "local"}
    turns = [
        {"t": 0.0, "in": 40, "out": 0, "hash_ids": [1, 2], "type": "n"},
        {"t": 5.0, "in": 42, "out": 3, "hash_ids": [1, 2], "type": "s", "ttft": 0.1},
    ]
    agents = written(tmp_path / "agents.json", {**talk, "requests": turns})
    one, two, three = (read_trace(path) for path in (plain, hashed, agents))
    assert one.ids.tolist() == two.ids.tolist() == [0, 1, 2, 0, 1, 3]
    assert three.ids.tolist() == [0, 1, 0, 1]
    assert two.times.tolist() == three.times.tolist() == [0.0, 5.0]
    for trace in (one, two, three):
        assert trace.lengths.tolist() == [40, 42]
        spans = Spans.of(trace, 8)
        shared = [spans.of_request(n)[:4].tolist() for n in (0, 1)]
        assert shared[0] == shared[1]


def test_conversations_of_a_folder_share_no_ids_and_come_by_time(tmp_path: Path) -> None:
    for name, time in (("a", 3.0), ("b", 1.0)):
        turn = {"t": time, "in": 64, "out": 1, "hash_ids": [1]}
        written(tmp_path / f"{name}.json", {"block_size": 64, "requests": [turn]})
    trace = read_trace(tmp_path)
    assert trace.times.tolist() == [1.0, 3.0]
    assert len(set(trace.ids.tolist())) == 2


def test_a_trace_that_lies_is_refused_with_its_line(tmp_path: Path) -> None:
    good = mooncake(1024, [1, 2])
    lies: list[tuple[Any, str]] = [
        (mooncake(1024, [1]), "line 2: the prompt must have one id for each block"),
        (mooncake(-5, []), "line 2: prompts and answers must have"),
        (mooncake(512, [1], output_length=-1), "line 2: prompts and answers must have"),
        (mooncake(512, [1], timestamp=-1), "line 2: the time of a request"),
        (mooncake(512, [1], timestamp=1e999), "line 2: this is not a valid request"),
        (mooncake(512, [1 << 70]), "line 2: an id has more than 64 bits"),
        (mooncake(512, [None]), "line 2: this is not a valid request"),
        (mooncake(512, [True]), "line 2: this is not a valid request"),
        (mooncake(512, [1], block_size=64), "line 2: the block size differs from earlier requests"),
        ('{"input_length": 512, "hash', "line 2: this is not a valid request"),
        ("[" * 100_000, "line 2: this is not a valid request"),
        ("\x00", "line 2: this is not a valid request"),
    ]
    for number, (lie, words) in enumerate(lies):
        path = written(tmp_path / f"{number}.jsonl", good, lie)
        with pytest.raises(AtlasError) as refusal:
            read_trace(path)
        assert refusal.value.code is Code.BAD_TRACE, lie
        assert words in str(refusal.value), (lie, str(refusal.value))


def test_a_conversation_that_lies_is_refused_with_its_line_and_request(tmp_path: Path) -> None:
    good = {"t": 0.0, "in": 128, "out": 1, "hash_ids": [1, 2]}
    lies: list[tuple[Any, str]] = [
        (good | {"in": 500}, "the prompt must have one id for each block"),
        (good | {"in": -5, "hash_ids": []}, "prompts and answers must have"),
        (good | {"t": -1.0}, "the time of a request"),
        (good | {"hash_ids": [None]}, "this is not a valid request"),
        (good | {"hash_ids": [1 << 70, 2]}, "an id has more than 64 bits"),
        ({"t": 0.0}, "this is not a valid request"),
        (128, "this is not a valid request"),  # which stands in the request before it, too
    ]
    other = {"block_size": 64, "requests": [good, good]}
    written(tmp_path / "a.json", json.dumps(other))
    for lie, words in lies:
        lines = ['{"block_size": 64, "requests": [', f"{json.dumps(good)},", json.dumps(lie), "]}"]
        path = written(tmp_path / "b.json", *lines)
        with pytest.raises(AtlasError) as refusal:
            read_trace(path)
        assert refusal.value.code is Code.BAD_TRACE, lie
        assert f"b.json, line 3, request 2: {words}" in str(refusal.value), lie
        folder = read_trace(tmp_path)
        assert len(folder) == 2, "the requests of the other file"
        (note,) = folder.notes()
        assert note.startswith(f"1 of 2 files are left out: b.json, line 3, request 2: {words}")
    for text, line in (('{"block_size": 64,\n"requests": [', 2), ('{\n\n"block_size": }', 3)):
        with pytest.raises(AtlasError) as refusal:
            read_trace(written(tmp_path / "b.json", text))
        assert f"b.json, line {line}: this is not a valid conversation" in str(refusal.value)


def test_other_files_that_are_no_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = {"block_size": 64, "requests": []}
    turn = {"t": 0.0, "in": 64, "out": 1}
    refused = [
        written(tmp_path / "empty.jsonl"),
        written(tmp_path / "no_requests.json", talk),
        written(tmp_path / "no_ids.json", {**talk, "requests": [turn]}),
        written(tmp_path / "unknown.jsonl", {"surprise": 1}),
        written(tmp_path / "block.jsonl", mooncake(10, [1], block_size=-3)),
    ]
    for path in refused:
        with pytest.raises(AtlasError) as refusal:
            read_trace(path)
        assert refusal.value.code is Code.BAD_TRACE, path
    for block in (0, -1):
        with pytest.raises(AtlasError) as refusal:
            read_trace(SAMPLE, block=block)
        assert "the block size must be" in str(refusal.value), block
    with pytest.raises(AtlasError) as refusal:
        read_trace(tmp_path / "missing.jsonl")
    assert refusal.value.code is Code.UNREADABLE
    monkeypatch.setattr(trace_files, "LONGEST_LINE", 100)
    with pytest.raises(AtlasError) as refusal:
        read_trace(written(tmp_path / "long.jsonl", mooncake(512 * 90, [*range(90)])))
    assert "too long" in str(refusal.value)


def test_a_trace_from_a_pipe_is_read_whole(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_bytes, args=[SAMPLE.read_bytes()])
    writer.start()
    assert read_trace(pipe).ids.tolist() == read_trace(SAMPLE).ids.tolist()
    writer.join()


def test_a_long_trace_is_read_in_memory_that_does_not_grow_with_it(tmp_path: Path) -> None:
    """Of 10 GB: make test-stream."""
    nbytes = (200 if DEEP else 1) << 20
    write_lines(tmp_path / "long.jsonl", token_line, nbytes)
    tracemalloc.start()
    trace = read_trace(tmp_path / "long.jsonl", block=512)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trace.tokens > nbytes // 8
    assert most < (1 << 19) + 100 * len(trace.ids)


def test_spans_are_shared_as_far_as_tokens_are() -> None:
    """Coarser and finer than the trace's blocks: by what every token is, one by one."""
    trace = read_trace(SAMPLE)
    ids = [trace.ids[trace.starts[n] : trace.starts[n + 1]] for n in range(len(trace))]
    for step in (16, 176, 512, 2096):
        spans = Spans.of(trace, step)
        for one in range(0, 40, 7):
            for two in range(one + 1, 60, 11):
                short = min(len(ids[one]), len(ids[two]))
                same = int(np.cumprod(ids[one][:short] == ids[two][:short]).sum()) * trace.block
                most = min(trace.lengths[one], trace.lengths[two], same) // step
                a, b = (spans.of_request(n)[: most + 1] for n in (one, two))
                assert (a[:most] == b[:most]).all()
                assert len(a) <= most or len(b) <= most or a[most] != b[most]


def test_a_repeated_trace_has_new_ids_each_time() -> None:
    trace = read_trace(SAMPLE)
    twice = trace.repeated(2)
    assert len(twice) == 2 * len(trace)
    assert twice.tokens == 2 * trace.tokens
    assert len(set(twice.ids.tolist())) == 2 * len(set(trace.ids.tolist()))
