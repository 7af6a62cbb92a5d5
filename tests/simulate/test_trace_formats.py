"""Hand-written samples of the public formats: lengths, times, shared prefixes and remarks."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code, MissingExtraError
from kvatlas.simulate import Trace, read_trace
from kvatlas.simulate.traces import TraceBuilder, TraceRequest, trace_builder

ESTIMATE = "Lengths are estimates: 4 bytes of text count as one token"


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in rows))
    return path


def shared(trace: Trace, one: int, two: int) -> int:
    """Number of leading ids that two requests have in common."""
    a, b = (trace.ids[trace.starts[n] : trace.starts[n + 1]].tolist() for n in (one, two))
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def noted(trace: Trace, words: str) -> bool:
    return any(words in note for note in trace.notes())


def test_mooncake_rows_as_aiperf_and_dynamo_write_them(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "timestamp": 1000, "input_length": 600, "output_length": 5,
         "hash_ids": [1, 2], "priority": 3},
        {"session_id": "b", "timestamp": 1500, "input_length": 512, "output_length": 5,
         "hash_ids": [9]},
        {"session_id": "a", "delay": 2000, "input_length": 1100, "output_length": 5,
         "hash_ids": [1, 3, 4]},
    ]  # fmt: skip
    trace = read_trace(written(tmp_path / "a.jsonl", *rows))
    assert trace.times.tolist() == [1.0, 1.5, 3.0]
    assert trace.lengths.tolist() == [600, 512, 1100]
    assert shared(trace, 0, 2) == 1
    assert trace.notes() == []
    rows[2]["hash_ids"] = [5, 6, 7]
    assert noted(read_trace(written(tmp_path / "b.jsonl", *rows)), "only the new part")


def test_ids_that_are_no_prefixes_are_read_as_content(tmp_path: Path) -> None:
    """The examples in AIPerf's documentation: [0, 3, 4, 5] and [1, 4, 6], and 655 and 672."""
    rows = [
        {"timestamp": 0, "input_length": 1800, "hash_ids": [0, 3, 4, 5]},
        {"timestamp": 1, "input_length": 1300, "hash_ids": [1, 4, 6]},
        {"timestamp": 2, "input_length": 655, "hash_ids": [46, 47]},
        {"timestamp": 3, "input_length": 672, "hash_ids": [46, 47]},
    ]
    trace = read_trace(written(tmp_path / "a.jsonl", *rows))
    assert shared(trace, 0, 1) == 0
    assert shared(trace, 2, 3) == 1, "the incomplete blocks differ"
    assert noted(trace, "2 ids follow different ids")


def test_shared_prefixes_are_those_of_the_ids_whatever_the_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By brute force over all pairs of prompts, whose ids repeat anywhere."""
    dice = Random(5)  # noqa: S311
    for chunk in (1, 7, 50, 1 << 20):
        monkeypatch.setattr(trace_builder, "CHUNK", chunk)
        kinds: tuple[Any, ...] = (
            dice.randrange,
            lambda n: f"id {dice.randrange(n)}",
            lambda n: (1 << 64) - 1 - dice.randrange(n),
            lambda n: -1 - dice.randrange(n),
        )
        for kind in kinds:
            prompts = [[kind(3) for _ in range(dice.randrange(6))] for _ in range(30)]
            builder = TraceBuilder("drawn", 4)
            lengths = [max(4 * len(ids) - dice.randrange(4), 0) for ids in prompts]
            for ids, length in zip(prompts, lengths, strict=True):
                builder.add("line 1", TraceRequest(length, ids[: -(-length // 4)]))
            trace = builder.finish()
            assert sorted(set(trace.ids.tolist())) == [*range(trace.distinct)]
            for one in range(30):
                for two in range(one):
                    a, b = (
                        [(*prompts[n][: d + 1], min(lengths[n] - 4 * d, 4))
                         for d in range(-(-lengths[n] // 4))]
                        for n in (one, two)
                    )  # fmt: skip
                    equal = [x == y for x, y in zip(a, b, strict=False)]
                    assert shared(trace, one, two) == ([*equal, False].index(False)), (a, b)


def test_bailian(tmp_path: Path) -> None:
    row = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 35,
           "output_length": 132, "type": "text", "turn": 2,
           "hash_ids": [1089, 1090, 6326]}  # fmt: skip
    other = row | {"timestamp": 62.0, "hash_ids": [1089, 1090, 7000], "input_length": 48}
    trace = read_trace(written(tmp_path / "qwen_traceA_blksz_16.jsonl", row, other))
    assert (trace.block, trace.times.tolist()) == (16, [61.114, 62.0])
    assert shared(trace, 0, 1) == 2
    assert trace.notes() == []


def test_agents_with_sub_agents(tmp_path: Path) -> None:
    inner = [
        {"t": 0.0, "type": "n", "in": 64, "out": 1, "hash_ids": [9]},
        {"t": 5.0, "type": "n", "in": 128, "out": 1, "hash_ids": [9, 10]},
    ]
    agent = {
        "t": 100.0, "type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore",
        "duration_ms": 9000, "total_tokens": 7, "tool_use_count": 1, "status": "completed",
        "models": [], "tool_tokens": 1, "system_tokens": 2, "requests": inner,
    }  # fmt: skip
    first = {"t": 0.0, "type": "s", "in": 64, "out": 1, "hash_ids": [1], "agent_id": "x"}
    last = {"t": 103.0, "type": "n", "in": 128, "out": 1, "hash_ids": [1, 2], "surprise": 0}
    talk = {"block_size": 64, "requests": [first, agent, last]}
    written(tmp_path / "a.json", talk)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(talk).encode()))
    (tmp_path / "c.json").write_text('{"block_size": 64, "requests": [')
    trace = read_trace(tmp_path)
    assert trace.times.tolist() == [0, 0, 100, 100, 103, 103, 105, 105]
    assert [shared(trace, 0, n) for n in range(1, 8)] == [0, 0, 0, 1, 0, 0, 0]
    assert shared(trace, 2, 6) == 1
    assert noted(trace, "1 of 3 files are left out: c.json")
    assert noted(trace, "Unknown fields were ignored: surprise (2)")


def test_sharegpt(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "How are you today, my friend?"},
             {"from": "gpt", "value": "Well!" * 10},
             {"from": "human", "value": "Good."}, {"from": "gpt", "value": "Yes."}]  # fmt: skip
    rows = [{"id": "a", "conversations": turns}, {"id": "b", "conversations": turns[:2]}]
    path = tmp_path / "share.json"
    for text in (json.dumps(rows), json.dumps(rows, indent=2), "\ufeff" + json.dumps(rows)):
        path.write_text(text, "utf-8")
        trace = read_trace(path, block=4)
        assert len(trace) == 3
        prompt = "human\nHow are you today, my friend?\n"
        assert trace.lengths[0] == trace.lengths[2] == -(-len(prompt) // 4)
        assert shared(trace, 0, 2) == len(trace.ids[: trace.starts[1]])
        assert shared(trace, 0, 1) == trace.lengths[0] // 4
        assert noted(trace, ESTIMATE)
        assert noted(trace, "no arrival times")
    many = [{"id": str(n), "conversations": turns} for n in range(20_000)]
    path.write_text(json.dumps(many))
    assert path.stat().st_size > 3 << 20, "several pieces"
    assert len(read_trace(path)) == 40_000
    path.write_text(json.dumps(many)[:-100])
    with pytest.raises(AtlasError, match="element 20000: this is not valid JSON"):
        read_trace(path)


def test_openai_chats_and_batches(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are kind. " * 20}
    parts = [{"type": "text", "text": "Hello"}, {"type": "image_url", "image_url": {"url": "x"}}]
    ask = {"role": "user", "content": parts}
    reply = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    chats = [{"messages": [system, ask], "seed": 1}, {"messages": [system, ask, reply], "seed": 2}]
    trace = read_trace(written(tmp_path / "chat.jsonl", *chats))
    assert shared(trace, 0, 1) == len(trace.ids) / 2
    assert trace.outputs[0] == 0 < trace.outputs[1]
    assert noted(trace, "image_url (2)")
    assert noted(trace, "Unknown fields were ignored: seed (2)")
    batch = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions",
              "body": {"model": "m", **chat}} for n, chat in enumerate(chats)]  # fmt: skip
    same = read_trace(written(tmp_path / "batch.jsonl", *batch))
    assert same.lengths.tolist() == trace.lengths.tolist()
    prompts = [{"body": {"prompt": "abcd" * 8}}, {"body": {"prompt": [1, 2, 3]}}]
    assert read_trace(written(tmp_path / "p.jsonl", *prompts)).lengths.tolist() == [8, 3]
    tools = [{"messages": [ask], "tools": [{"type": "function"}]}, {"messages": [ask]}]
    lengths = read_trace(written(tmp_path / "t.jsonl", *tools)).lengths
    assert lengths[0] > lengths[1]


def test_text_with_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: n for n, word in enumerate(["[UNK]", "user", "to", "be", "or", "not"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    row = {"messages": [{"role": "user", "content": "to be or not to be"}]}
    path = written(tmp_path / "chat.jsonl", row)
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        trace = read_trace(path, tokenizer=place)
        assert trace.lengths.tolist() == [7]
        assert noted(trace, "Text was tokenised with")
    with pytest.raises(AtlasError) as refusal:
        read_trace(path, tokenizer=written(tmp_path / "bad.json", "{}"))
    assert refusal.value.code is Code.UNREADABLE


def test_a_tokenizer_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"kvatlas\[traces\]"):
        read_trace(written(tmp_path / "a.jsonl", {"prompt": "x"}), tokenizer="some/model")


def test_lmcache_and_sglang_rows(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "abc " * 40}]
    rows = [
        {"timestamp": 2.0, "session_id": "s", "input": messages, "output_length": 7, "pre_gap": 0},
        {"session_id": "s", "input": [*messages, messages[0]], "output_length": 7, "pre_gap": 1.5},
    ]
    trace = read_trace(written(tmp_path / "lmcache.jsonl", *rows))
    assert trace.times.tolist() == [2.0, 3.5]
    assert shared(trace, 0, 1) == trace.lengths[0] // 16
    prompts = [{"timestamp": 1500, "prompt": "Hello there", "output_length": 9}]
    trace = read_trace(written(tmp_path / "sglang.jsonl", *prompts))
    assert (trace.times.tolist(), trace.lengths.tolist()) == ([1.5], [3])


def test_sglang_request_log(tmp_path: Path) -> None:
    def event(name: str, rid: str, second: int, **more: Any) -> dict[str, Any]:
        return {"timestamp": f"2026-01-01T00:00:0{second}", "event": name, "rid": rid, **more}

    done = {"meta_info": {"prompt_tokens": 40, "completion_tokens": 8, "id": "x"}}
    rows = [
        event("request.received", "a", 1, obj={"input_ids": [*range(40)], "stream": True}),
        event("request.received", "b", 2, obj={"text": "abcd" * 4}),
        event("request.finished", "b", 3, out=done),
        event("request.finished", "a", 4, out=done),
        event("request.received", "c", 5, obj={"input_ids": [*range(32), 7]}),
        event("request.finished", "d", 6, out=done),
    ]
    trace = read_trace(written(tmp_path / "requests.log", *rows))
    assert trace.times.tolist() == [0.0, 1.0, 4.0, 5.0]
    assert trace.lengths.tolist() == [40, 4, 33, 40]
    assert trace.outputs.tolist() == [8, 8, 0, 8]
    assert shared(trace, 0, 2) == 2
    assert noted(trace, "1 requests have no ids")


def test_vllm_token_rows_and_its_log(tmp_path: Path) -> None:
    rows = [
        {"prompt_token_ids": [*range(40)], "request_id": "a", "arrival_time": 1.7e9},
        {"prompt_token_ids": [*range(33)], "arrival_time": 1.7e9 + 2, "output_token_ids": [1, 2]},
    ]
    trace = read_trace(written(tmp_path / "vllm.jsonl", *rows))
    assert (trace.times.tolist(), trace.outputs.tolist()) == ([0.0, 2.0], [0, 2])
    assert shared(trace, 0, 1) == 2
    head = "(APIServer pid=7) {} 11-18 10:00:0{} [request_logger.py:52] "
    log = [
        head.format("INFO", 1) + "Starting",
        head.format("DEBUG", 2) + "Request cmpl-1 details: prompt: 'a, b', prompt_token_ids: "
        f"{[*range(40)]}, prompt_embeds shape: None.",
        head.format("INFO", 2) + "Received request cmpl-1: params: None, lora_request: None.",
        head.format("DEBUG", 5) + "Request cmpl-2 details: prompt: None, prompt_token_ids: "
        f"{[*range(33)]}, prompt_embeds shape: None.",
    ]
    logged = read_trace(written(tmp_path / "vllm.log", *log))
    assert logged.ids.tolist() == trace.ids.tolist()
    assert np.diff(logged.times).tolist() == [3.0]


def test_tables_of_lengths_have_unknown_hits(tmp_path: Path) -> None:
    azure = written(
        tmp_path / "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\r",
        "2023-11-16 18:15:46.6805900,374,44\r",
        "2023-11-16 18:15:50.9951690,396,109\r",
    )
    trace = read_trace(azure)
    assert trace.lengths.tolist() == [374, 396]
    assert np.round(trace.times, 3).tolist() == [0.0, 4.315]
    burst = written(
        tmp_path / "burst.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "45,GPT-4,1087,230,1317,API log",
    )
    other = read_trace(burst)
    assert (other.times.tolist(), other.outputs.tolist()) == ([5.0, 45.0], [18, 230])
    lengths = written(tmp_path / "l.jsonl", {"input_length": 9, "output_length": 1, "timestamp": 0})
    for one in (trace, other, read_trace(lengths)):
        assert not one.content_known
        assert noted(one, "Hit rates are unknown")
    written(tmp_path / "bad.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2")
    with pytest.raises(AtlasError, match=r"bad.csv, line 2: this is not a valid row"):
        read_trace(tmp_path / "bad.csv")


ROW = {"timestamp": 0, "input_length": 512, "hash_ids": [1]}


def test_compressed_files_marks_and_line_ends(tmp_path: Path) -> None:
    text = (json.dumps(ROW) + "\r\n").encode() * 3
    path = tmp_path / "a.jsonl.gz"
    for content in (gzip.compress(b"\xef\xbb\xbf" + text), gzip.compress(text) * 2, text):
        path.write_bytes(content)
        trace = read_trace(path)
        assert (trace.name, trace.distinct) == ("a", 1)
    path.write_bytes(gzip.compress(text * 50)[:-20])
    with pytest.raises(AtlasError, match="the compressed file is truncated or corrupt") as refusal:
        read_trace(path)
    assert refusal.value.code is Code.BAD_TRACE


def zstd(text: bytes) -> bytes:
    program = shutil.which("zstd")
    if program is None:
        pytest.skip("no program zstd to compress a sample")
    return subprocess.run([program, "-q"], input=text, capture_output=True, check=True).stdout


def test_zstandard(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    text = (json.dumps(ROW) + "\n").encode() * 3
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstd(text) + zstd(text))
    assert len(read_trace(path)) == 6
    path.write_bytes(zstd(text)[:-20])
    with pytest.raises(AtlasError) as refusal:
        read_trace(path)
    assert refusal.value.code is Code.BAD_TRACE


def test_zstandard_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(MissingExtraError, match=r"kvatlas\[traces\].*zstd -d"):
        read_trace(path)


def test_requests_beyond_a_limit_are_set_aside(tmp_path: Path) -> None:
    rows = [{"timestamp": n, "input_length": 512 * (n + 1), "output_length": 600,
             "hash_ids": [*range(n + 1)]} for n in range(4)]  # fmt: skip
    trace = read_trace(written(tmp_path / "a.jsonl", *rows))
    kept = trace.within(1536)
    assert kept.lengths.tolist() == [512, 1024], "1536 tokens leave no room for an output token"
    assert kept.outputs.tolist() == [600, 512]
    assert kept.ids.tolist() == [0, 0, 1]
    assert kept.set_aside == 2
    assert noted(kept, "2 requests are set aside and not replayed")
    assert trace.within(None) is trace
    assert trace.within(1536) is kept, "simulations of one trace share what they compute"
    assert trace.within(10_000).set_aside == 0


def test_an_unknown_format_is_refused_with_its_fields(tmp_path: Path) -> None:
    with pytest.raises(AtlasError, match=r"the format of the trace is unknown.*colour, taste"):
        read_trace(written(tmp_path / "a.jsonl", {"colour": 1, "taste": 2}))
