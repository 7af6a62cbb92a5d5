"""`read_trace`: detect the format of a trace and read it.

Most formats have one JSON object per line. A conversation of a coding agent is one JSON object per
file, and a folder of conversations is one trace. Requests of a running engine are inferred from its
KV events, in a recording or as JSON lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from kvatlas.errors import AtlasError, Code
from kvatlas.pool.event_recording import is_recording, recorded_batches
from kvatlas.simulate.traces.chat_rows import ChatRows
from kvatlas.simulate.traces.conversations import read_conversations
from kvatlas.simulate.traces.event_lines import batch_of_line, is_event_line
from kvatlas.simulate.traces.event_trace import EventTraceBuilder
from kvatlas.simulate.traces.length_tables import LengthTable, is_length_table
from kvatlas.simulate.traces.line_format import LineFormat, fields_of
from kvatlas.simulate.traces.mooncake import Bailian, Mooncake
from kvatlas.simulate.traces.sglang_log import SglangLog
from kvatlas.simulate.traces.sharegpt import ShareGpt
from kvatlas.simulate.traces.text_tokens import TextTokens
from kvatlas.simulate.traces.token_rows import TokenRows, VllmLog, is_vllm_log
from kvatlas.simulate.traces.trace import Progress, Trace, bad_trace, check_block
from kvatlas.simulate.traces.trace_builder import TraceBuilder
from kvatlas.simulate.traces.trace_files import SUFFIXES, TraceFile, opened, stem

FORMATS: tuple[type[LineFormat], ...] = (
    SglangLog, Bailian, Mooncake, TokenRows, ShareGpt, ChatRows,
)  # fmt: skip
"""The formats with one JSON object per row. A file has the first one that fits its first row."""

Rows = Iterator[tuple[int, bytes]]
"""Number and text of each line, or of each element of an array."""


def read_trace(
    path: str | Path,
    *,
    block: int | None = None,
    tokenizer: str | Path | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Return the trace in a file or a folder. The format is detected; `.gz` and `.zst` are read.

    The meaning of `block` depends on the format. If the file contains ids, `block` is the number of
    tokens per id: 512 by default in Mooncake's format, 16 in Bailian's. If the file contains tokens
    or text, `block` is the block size in which prompts are compared, 16 by default. For KV events,
    `block` selects the events of one block size. `tokenizer` is a `tokenizer.json`, its folder or a
    hub id, for traces that contain text. Without a tokenizer, the lengths of texts are estimated.
    """
    path = Path(path)
    if block is not None:
        check_block(block, path.name)
    text = TextTokens(tokenizer)
    try:
        if path.is_dir():
            files = [one for one in sorted(path.iterdir()) if _is_json(one)]
            return read_conversations(path.name, files, progress)
        if path.is_file() and is_recording(path):  # a pipe cannot be read twice
            return _read_recording(path, block, progress)
        return _read_file(path, block, text, progress)
    except OSError as problem:
        got = f"{path}: {problem.strerror or problem}"
        problem_text, hint = "The trace cannot be read", "Pass a readable trace file or folder"
        raise AtlasError(Code.UNREADABLE, problem_text, got=got, hint=hint) from problem


def _is_json(path: Path) -> bool:
    """Return whether a file is a conversation, by its name.

    >>> _is_json(Path("a.json.gz")), _is_json(Path("a.jsonl"))
    (True, False)
    """
    return (path.with_suffix("") if path.suffix in SUFFIXES else path).suffix == ".json"


def _read_file(path: Path, block: int | None, text: TextTokens, progress: Progress | None) -> Trace:
    """Detect the format of a file from its beginning, and read it."""
    with opened(path) as (content, raw):
        file = TraceFile(path, content, raw, progress)
        start = file.beginning()
        array = start.lstrip().startswith(b"[") and not is_event_line(start)
        rows = file.elements() if array else file.lines()
        number, first = next(rows, (0, b""))
        rows = chain([(number, first)], rows) if first else rows
        if not array and is_event_line(first):
            return _read_event_lines(path, block, rows)
        if is_length_table(first):
            return _read_rows(path, LengthTable(block, text), rows)
        if is_vllm_log(first):
            return _read_rows(path, VllmLog(block, text), rows)
        fields = fields_of(first)
        if "requests" not in fields and (fields or not _is_json(path)):
            return _read_rows(path, _format(path, first, block, text), rows)
    return read_conversations(stem(path), [path], progress)


def _format(path: Path, row: bytes, block: int | None, text: TextTokens) -> LineFormat:
    """Return the format of a file from its first row. An unknown format is read as Mooncake's."""
    fields = fields_of(row)
    found = next((one for one in FORMATS if one.fits(fields)), None)
    if found is None and fields:
        raise bad_trace(
            path.name,
            "the format of the trace is unknown",
            f"a first row with the fields {', '.join(list(fields)[:8])}",
            "Write input_length and hash_ids, token_ids, or messages. "
            "The documentation of `simulate` lists all formats",
        )
    return (found or Mooncake)(block, text)


def _read_rows(path: Path, form: LineFormat, rows: Rows) -> Trace:
    """Read a file with one object per line, or an array of objects."""
    builder: TraceBuilder | None = None
    for number, row in rows:
        where = f"{path.name}, line {number}"
        for request in form.read(where, row):
            builder = builder or TraceBuilder(stem(path), form.block)
            builder.add(where, request)
    builder = builder or TraceBuilder(stem(path), form.block)
    for request in form.rest():
        builder.add(path.name, request)
    return builder.finish(form.remarks())


def _read_event_lines(path: Path, block: int | None, lines: Rows) -> Trace:
    found = EventTraceBuilder(stem(path), path.name, block=block, unit="line")
    for number, line in lines:
        found.take(number, batch_of_line(f"{path.name}, line {number}", line))
    return found.finish()


def _read_recording(path: Path, block: int | None, progress: Progress | None) -> Trace:
    total = max(path.stat().st_size, 1)
    found = EventTraceBuilder(path.stem, path.name, block=block, unit="batch")
    for number, (done, received) in enumerate(recorded_batches(path), 1):
        found.take(number, received.batch, gap=received.gap)
        if progress and not number % 256:
            progress(done / total)
    return found.finish()
