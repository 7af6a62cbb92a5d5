"""Recordings of an engine's KV events: a file of batches in order of arrival.

The first line identifies the format. Each batch consists of its number (8 bytes), a flag that is 1
if batches before it are missing (1 byte), its length in bytes (4 bytes) and its msgpack encoding.
All integers are big-endian. The file contains the tokens of prompts, so it is as confidential as
the prompts.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Self

from kvatlas.errors import AtlasError, Code
from kvatlas.pool.event_stream import ReceivedBatch
from kvatlas.pool.events import MOST_BYTES, decode_batch, encode_batch

FIRST_LINE = b"kvatlas recording of KV events 1\n"
_HEAD = struct.Struct(">Q?I")


class EventRecording:
    """A new file to which batches are appended. Only the user who creates it may read it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.batches = self.events = self.gaps = self.bytes = 0
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        except OSError as problem:
            raise self._unwritable(problem) from None
        self._write(FIRST_LINE)

    def write(self, received: ReceivedBatch) -> None:
        """Append a batch and flush it to the file."""
        payload = encode_batch(received.batch)
        self._write(_HEAD.pack(received.number, received.gap, len(payload)) + payload)
        self.batches += 1
        self.events += len(received.batch.events)
        self.gaps += received.gap

    def _write(self, text: bytes) -> None:
        """Append all bytes. If that fails, restore the file's old length and raise an error."""
        left = memoryview(text)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as problem:
            with suppress(OSError):
                self._file.truncate(self.bytes)
            raise self._unwritable(problem) from None
        self.bytes += len(text)

    def _unwritable(self, problem: OSError) -> AtlasError:
        got = f"{self.path}: {problem.strerror}"
        hint = "Use a path that does not exist yet, on a disk with free space"
        return AtlasError(Code.UNWRITABLE, got=got, hint=hint)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_recording(path: Path) -> bool:
    """Return whether a file is a recording of KV events."""
    with path.open("rb") as file:
        return file.read(len(FIRST_LINE)) == FIRST_LINE


def recorded_batches(path: Path) -> Iterator[tuple[int, ReceivedBatch]]:
    """Yield (number of bytes read so far, batch) for each batch of a recording."""
    with path.open("rb") as file:
        done, count, expected = len(file.read(len(FIRST_LINE))), 0, None
        while head := file.read(_HEAD.size):
            count += 1
            where = f"{path.name}, batch {count}"
            number, gap, length = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
            payload = file.read(min(length, MOST_BYTES + 1))
            if len(head) < _HEAD.size or len(payload) < min(length, MOST_BYTES + 1):
                problem = f"{where}: the recording ends inside this batch"
                got = f"{len(head) + len(payload)} bytes"
                hint = f"Run `truncate -s {done} -- {quote(path.name)}` to remove this batch"
                raise AtlasError(Code.BAD_TRACE, problem, got=got, hint=hint)
            try:
                batch = decode_batch(payload)
            except AtlasError as refusal:
                problem = f"{where}: this is not a valid batch of events"
                hint = "Record the events again"
                raise AtlasError(Code.BAD_TRACE, problem, got=refusal.got, hint=hint) from None
            done += _HEAD.size + length
            yield done, ReceivedBatch(number, batch, gap or number != (expected or number))
            expected = number + 1
