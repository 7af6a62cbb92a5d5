"""Read conversations of coding agents in kv-cache-tester's format: one JSON object per file."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kvatlas.simulate.traces.trace import (
    LONGEST_LINE,
    Progress,
    Trace,
    TraceBuilder,
    bad_trace,
    check_block,
)

_BAD_JSON = (msgspec.MsgspecError, ValueError, RecursionError)


class _AgentRequest(msgspec.Struct, forbid_unknown_fields=True):
    t: float
    tokens: int = msgspec.field(name="in")
    out: int
    hash_ids: list[int]
    type: str = ""
    model: str = ""
    input_types: msgspec.Raw = msgspec.Raw(b"")
    output_types: msgspec.Raw = msgspec.Raw(b"")
    stop: msgspec.Raw = msgspec.Raw(b"")
    api_time: msgspec.Raw = msgspec.Raw(b"")
    think_time: msgspec.Raw = msgspec.Raw(b"")
    ttft: msgspec.Raw = msgspec.Raw(b"")


class _Conversation(msgspec.Struct, forbid_unknown_fields=True):
    block_size: int
    requests: list[msgspec.Raw]
    """Requests as JSON text. Each is decoded separately, so that an error can name the request."""
    hash_id_scope: str = "local"
    id: str = ""
    models: msgspec.Raw = msgspec.Raw(b"")
    tool_tokens: int = 0
    system_tokens: int = 0
    totals: msgspec.Raw = msgspec.Raw(b"")


_CONVERSATION = msgspec.json.Decoder(_Conversation)
_REQUEST = msgspec.json.Decoder(_AgentRequest)


def read_conversations(name: str, files: list[Path], progress: Progress | None) -> Trace:
    """Return a trace of the requests of all files, ordered by time."""
    builder: TraceBuilder | None = None
    first = 0
    for place, path in enumerate(files):
        text, found = _read_file(path)
        if builder is None:
            check_block(found.block_size, path.name)
            builder = TraceBuilder(name, found.block_size, numbered=True)
        elif found.block_size != builder.block:
            raise bad_trace(
                path.name,
                "the block size differs from earlier files",
                f"{found.block_size} tokens, after {builder.block} tokens in earlier files",
                "Use conversations with the same block_size",
            )
        builder.begin(path.name)
        shift = first if found.hash_id_scope == "local" else 0
        first += _add_requests(builder, text, found.requests, shift) + 1
        if progress:
            progress((place + 1) / len(files))
    return (builder or TraceBuilder(name, 1)).finish(by_time=True)


def _read_file(path: Path) -> tuple[bytes, _Conversation]:
    """Return the text of a file, and its conversation. The requests are not decoded yet."""
    if path.stat().st_size > LONGEST_LINE:
        raise bad_trace(
            path.name,
            f"the file is too long: the limit is {LONGEST_LINE:,} bytes",
            f"{path.stat().st_size:,} bytes",
            "Write one conversation per file",
        )
    text = path.read_bytes()
    try:
        return text, _CONVERSATION.decode(text)
    except _BAD_JSON as problem:
        where = _place_of(path, text, problem)
        raise bad_trace(
            where,
            "this is not a valid conversation",
            problem,
            "Use a conversation in the format of kv-cache-tester",
        ) from None


def _add_requests(
    builder: TraceBuilder, text: bytes, requests: list[msgspec.Raw], shift: int
) -> int:
    """Add a file's requests and return the largest of their ids, before `shift` is added."""
    greatest, end = -1, max(text.find(b'"requests"'), 0)
    line, counted = 1, 0
    for raw in requests:
        begin = text.find(raw, end)  # `raw` is a part of `text`, after the previous one
        line += text.count(b"\n", counted, begin)
        counted, end = begin, begin + memoryview(raw).nbytes
        where = builder.place(line)
        try:
            one = _REQUEST.decode(raw)
        except _BAD_JSON as problem:
            raise bad_trace(
                where,
                "this is not a valid request",
                problem,
                "Use requests in the format of kv-cache-tester",
            ) from None
        if min(one.hash_ids, default=0) < 0:
            raise bad_trace(
                where,
                "hash_ids contains a negative id",
                f"id {min(one.hash_ids)}",
                "Use only integers of at least 0 in hash_ids",
            )
        greatest = max(greatest, max(one.hash_ids, default=-1))
        ids = [shift + each for each in one.hash_ids] if shift else one.hash_ids
        builder.add(line, ids, one.tokens, one.out, one.t)
    return greatest


def _place_of(path: Path, text: bytes, problem: Exception) -> str:
    """Return the file name and, if its JSON is malformed, the line.

    >>> _place_of(Path("a.json"), b"{" + bytes([10]) + b'"b": }', ValueError("(byte 7)"))
    'a.json, line 2'
    """
    byte = re.search(r"\(byte (\d+)\)", str(problem))
    if byte is None and "truncated" not in str(problem):
        return path.name
    stop = len(text.rstrip()) if byte is None else int(byte[1])
    line = text.count(b"\n", 0, stop) + 1
    return f"{path.name}, line {line}"
