"""Read traces in four formats: Mooncake's, plain token ids, agent conversations and KV events.

Mooncake's format and token ids have one JSON object per line. A conversation is one JSON object per
file, and a folder of conversations is one trace, ordered by time. Requests of a running engine are
inferred from its KV events, in a recording or as JSON lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.pool.event_recording import is_recording, recorded_batches
from kvatlas.simulate.traces.content_ids import ids_of
from kvatlas.simulate.traces.conversations import read_conversations
from kvatlas.simulate.traces.event_lines import batch_of_line, is_event_line
from kvatlas.simulate.traces.event_trace import EventTraceBuilder
from kvatlas.simulate.traces.trace import (
    LONGEST_LINE,
    Progress,
    Trace,
    TraceBuilder,
    bad_trace,
    check_block,
)

MOONCAKE_BLOCK = 512
TOKEN_BLOCK = 16
"""Default number of tokens per block when prompts of plain token ids are compared."""


class _Mooncake(msgspec.Struct, forbid_unknown_fields=True):
    input_length: int
    hash_ids: list[int]
    output_length: int = 0
    timestamp: float = 0.0
    """Arrival time in milliseconds."""
    block_size: int | None = None


class _TokenIds(msgspec.Struct, forbid_unknown_fields=True):
    token_ids: list[int]
    output_length: int = 0
    timestamp: float = 0.0


def read_trace(
    path: str | Path, *, block: int | None = None, progress: Progress | None = None
) -> Trace:
    """Return the trace in a file or a folder. The format is detected.

    The meaning of `block` depends on the format. For Mooncake's format it is the number of tokens
    per id, 512 by default. For plain token ids it is the block size in which prompts are compared,
    16 by default. For KV events it selects the events of one block size.
    """
    path = Path(path)
    if block is not None:
        check_block(block, path.name)
    try:
        if path.is_file() and is_recording(path):  # a pipe cannot be read twice
            return _read_recording(path, block, progress)
        if path.is_dir() or path.suffix == ".json":
            files = sorted(path.glob("*.json")) if path.is_dir() else [path]
            return read_conversations(path.name, files, progress)
        return _read_lines(path, block, progress)
    except OSError as problem:
        got = f"{path}: {problem.strerror}"
        problem_text, hint = "The trace cannot be read", "Pass a readable trace file or folder"
        raise AtlasError(Code.UNREADABLE, problem_text, got=got, hint=hint) from problem


def _read_lines(path: Path, block: int | None, progress: Progress | None) -> Trace:
    builder: TraceBuilder | None = None
    decoder: msgspec.json.Decoder[Any] | None = None
    lines = _lines(path, progress)
    first = list(islice(lines, 1))
    if first and is_event_line(first[0][1]):
        return _read_event_lines(path, block, chain(first, lines))
    for number, line in chain(first, lines):
        where = f"{path.name}, line {number}"
        if decoder is None:
            kind: Any = _TokenIds if b'"token_ids"' in line else _Mooncake
            decoder = msgspec.json.Decoder(kind)
        try:
            request = decoder.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
            raise bad_trace(
                where,
                "this is not a valid request",
                problem,
                "Write timestamp, input_length, output_length and hash_ids, or token_ids",
            ) from None
        if isinstance(request, _TokenIds):
            if builder is None:
                builder = _begin(path, block or TOKEN_BLOCK, where)
            try:
                ids = ids_of(request.token_ids, builder.block)
            except OverflowError as problem:
                raise bad_trace(
                    where, "this is not a valid request", problem, "Use numbers of at most 64 bits"
                ) from None
            length = len(request.token_ids)
        else:
            if builder is None:
                builder = _begin(path, block or request.block_size or MOONCAKE_BLOCK, where)
            if request.block_size not in (None, builder.block):
                raise bad_trace(
                    where,
                    "the block size differs from earlier requests",
                    f"block_size {request.block_size}, expected {builder.block}",
                    "Write the same block_size in all requests",
                )
            ids, length = request.hash_ids, request.input_length
        builder.add(number, ids, length, request.output_length, request.timestamp / 1000)
    return (builder or _begin(path, MOONCAKE_BLOCK, path.name)).finish()


def _read_event_lines(path: Path, block: int | None, lines: Iterator[tuple[int, bytes]]) -> Trace:
    found = _infer(path, block, "line")
    for number, line in lines:
        found.take(number, batch_of_line(f"{path.name}, line {number}", line))
    return found.finish()


def _read_recording(path: Path, block: int | None, progress: Progress | None) -> Trace:
    total, found = max(path.stat().st_size, 1), _infer(path, block, "batch")
    for number, (done, received) in enumerate(recorded_batches(path), 1):
        found.take(number, received.batch, gap=received.gap)
        if progress and not number % 256:
            progress(done / total)
    return found.finish()


def _infer(path: Path, block: int | None, unit: str) -> EventTraceBuilder:
    return EventTraceBuilder(path.stem, path.name, block=block, unit=unit)


def _begin(path: Path, block: int, where: str) -> TraceBuilder:
    check_block(block, where)
    builder = TraceBuilder(path.stem, block)
    builder.begin(path.name)
    return builder


def _lines(path: Path, progress: Progress | None) -> Iterator[tuple[int, bytes]]:
    """Yield the number and text of each non-empty line; raise an error if a line is too long."""
    total, done, number = max(path.stat().st_size, 1), 0, 0
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            number += 1
            done += len(line)
            if len(line) == LONGEST_LINE:
                raise bad_trace(
                    f"{path.name}, line {number}",
                    f"the line is too long: it must be shorter than {LONGEST_LINE:,} bytes",
                    f"{len(line):,} bytes or more",
                    "Write one request per line",
                )
            if line.strip():
                yield number, line
            if progress and not number % 256:
                progress(done / total)
