"""Read conversations of coding agents in kv-cache-tester's format: one JSON object per file.

A sub-agent is an element of `requests` that itself contains requests. The times of those requests
count from the start of the sub-agent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvatlas.errors import AtlasError
from kvatlas.simulate.traces.line_format import BAD_JSON, fields_of, unknown_fields
from kvatlas.simulate.traces.trace import (
    LONGEST_LINE,
    Progress,
    Trace,
    bad_trace,
    check_block,
)
from kvatlas.simulate.traces.trace_builder import TraceBuilder, TraceRequest
from kvatlas.simulate.traces.trace_files import opened

_NAMED = 3
"""Number of invalid files that are named in a remark."""


class _AgentRequest(msgspec.Struct):
    t: float
    tokens: int = msgspec.field(name="in", default=0)
    out: int = 0
    hash_ids: list[int | str] = []
    requests: list[msgspec.Raw] | None = None
    """The requests of a sub-agent."""


class _Conversation(msgspec.Struct):
    block_size: int
    requests: list[msgspec.Raw]
    """Requests as JSON text. Each is decoded separately, so that an error can name the request."""
    hash_id_scope: str = "local"


_CONVERSATION = msgspec.json.Decoder(_Conversation)
_REQUEST = msgspec.json.Decoder(_AgentRequest)
_UNUSED = (
    "id models totals tool_tokens system_tokens type model agent_id subagent_type duration_ms "
    "total_tokens tool_use_count status input_types output_types stop api_time think_time ttft"
)
_KNOWN = {
    *_Conversation.__struct_encode_fields__,
    *_AgentRequest.__struct_encode_fields__,
    *_UNUSED.split(),
}


class _Reader:
    """Reads conversations into one trace."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.builder: TraceBuilder | None = None
        self.unknown: Counter[str] = Counter()
        self._files = 0

    def add(self, path: Path) -> None:
        """Add the requests of a file. If one of them is invalid, none is added."""
        text, found = _read_file(path)
        check_block(found.block_size, path.name)
        builder = self.builder or TraceBuilder(self.name, found.block_size)
        if found.block_size != builder.block:
            raise bad_trace(
                path.name,
                "the block size differs from earlier files",
                f"{found.block_size} tokens, after {builder.block} tokens in earlier files",
                "Use conversations with the same block_size",
            )
        self._files += 1
        scope = self._files if found.hash_id_scope == "local" else 0
        unknown = Counter(fields_of(text).keys() - _KNOWN)
        requests = self._requests(path.name, text, found.requests, unknown)
        builder.add_all([(where, one._replace(scope=scope)) for where, one in requests])
        self.builder = builder
        self.unknown += unknown

    def _requests(
        self, name: str, text: bytes, raws: list[msgspec.Raw], unknown: Counter[str]
    ) -> Iterator[tuple[str, TraceRequest]]:
        """Yield (place, request) for each request of a file.

        The place is a text with the file, the line and the number of the request.
        """
        end, line, counted = max(text.find(b'"requests"'), 0), 1, 0
        for number, raw in enumerate(raws, 1):
            begin = text.find(raw, end)  # `raw` is a part of `text`, after the previous one
            line += text.count(b"\n", counted, begin)
            counted, end = begin, begin + memoryview(raw).nbytes
            where = f"{name}, line {line}, request {number}"
            for request in _decoded(where, raw, 0.0, unknown):
                yield where, request


def read_conversations(name: str, files: list[Path], progress: Progress | None) -> Trace:
    """Return a trace of the requests of all files, ordered by time.

    If there are several files, invalid ones are left out, and the remarks of the trace name them.
    """
    reader, refused = _Reader(name), []
    for place, path in enumerate(files):
        try:
            reader.add(path)
        except AtlasError as problem:
            if len(files) == 1:
                raise
            refused.append(problem)
        if progress:
            progress((place + 1) / len(files))
    if reader.builder is None and refused:
        raise refused[0]
    remarks = []
    if refused:
        named = "; ".join(f"{one.problem}, got {one.got}" for one in refused[:_NAMED])
        more = f"; and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
        remarks.append(f"{len(refused):,} of {len(files):,} files are left out: {named}{more}.")
    remarks += unknown_fields(reader.unknown)
    return (reader.builder or TraceBuilder(name, 1)).finish(remarks)


def _decoded(
    where: str, raw: msgspec.Raw, start: float, unknown: Counter[str]
) -> Iterator[TraceRequest]:
    """Decode an element of a conversation and yield its requests.

    The element is a request, or a sub-agent with several requests. The times in the element count
    from `start`, in seconds since the start of the conversation.
    """
    try:
        one = _REQUEST.decode(raw)
        fields = fields_of(bytes(raw))
        if one.requests is None and not {"in", "hash_ids"} <= fields.keys():
            raise ValueError("a request without `in` or `hash_ids`")
    except BAD_JSON as problem:
        raise bad_trace(
            where,
            "this is not a valid request",
            problem,
            "Use requests in the format of kv-cache-tester",
        ) from None
    unknown.update(fields.keys() - _KNOWN)
    if one.requests is None:
        yield TraceRequest(one.tokens, one.hash_ids, one.out, start + one.t)
        return
    for inner in one.requests:
        yield from _decoded(where, inner, start + one.t, unknown)


def _read_file(path: Path) -> tuple[bytes, _Conversation]:
    """Return the text of a file, and its conversation. The requests are not decoded yet."""
    with opened(path) as (content, _):
        text = content.read(LONGEST_LINE + 1).removeprefix(b"\xef\xbb\xbf")
    if len(text) > LONGEST_LINE:
        raise bad_trace(
            path.name,
            f"the file is too long: the limit is {LONGEST_LINE:,} bytes",
            f"more than {LONGEST_LINE:,} bytes",
            "Write one conversation per file",
        )
    try:
        return text, _CONVERSATION.decode(text)
    except BAD_JSON as problem:
        where = _place_of(path, text, problem)
        raise bad_trace(
            where,
            "this is not a valid conversation",
            problem,
            "Use a conversation in the format of kv-cache-tester",
        ) from None


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
