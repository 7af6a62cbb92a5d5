"""Mooncake's format, with the fields that AIPerf and Dynamo add; and Bailian's format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvatlas.simulate.traces.line_format import Fields, LineFormat, seconds
from kvatlas.simulate.traces.text_tokens import TextTokens
from kvatlas.simulate.traces.trace import bad_trace, check_block
from kvatlas.simulate.traces.trace_builder import TraceRequest


class _Row(msgspec.Struct):
    input_length: int
    hash_ids: list[int | str] | None = None
    output_length: int | None = None
    timestamp: float | None = None
    """Arrival time in milliseconds."""
    delay: float | None = None
    """Milliseconds after the previous request of the session."""
    session_id: str | int | None = None
    block_size: int | None = None


class Mooncake(LineFormat):
    """A format with one request per line: its length, and one id per 512 tokens of the prompt."""

    row = _Row
    unused = "priority extra type turn"
    usual_block = 512
    example = "timestamp, input_length, output_length and hash_ids"

    def __init__(self, block: int | None, text: TextTokens) -> None:
        super().__init__(block, text)
        self._sessions: dict[str | int, tuple[float, int | str | None]] = {}
        """The time of the last request of each session, and its first id."""
        self._new_beginnings = 0
        self._block_size: int | None = None
        """The block size, after the first row."""

    @classmethod
    def fits(cls, fields: Fields) -> bool:
        """Return whether a row has a length."""
        return "input_length" in fields

    def requests(self, where: str, row: Any) -> Iterable[TraceRequest]:
        """Yield the request of a row."""
        if self._block_size is None:
            self.block = self._block_size = self.given_block or row.block_size or self.block
            check_block(self.block, where)
        if row.block_size not in (None, self.block):
            raise bad_trace(
                where,
                "the block size differs from earlier requests",
                f"block_size {row.block_size}, expected {self.block}",
                "Write the same block_size in all requests",
            )
        yield TraceRequest(row.input_length, row.hash_ids, row.output_length or 0, self._time(row))

    def _time(self, row: Any) -> float | None:
        """Return the arrival time of a row in seconds; None if the row has no time.

        The time is stored for the row's session, because a later row of the session may have only a
        delay after this time.
        """
        time = seconds(row.timestamp, 0.001)
        if row.session_id is None:
            return time
        first = row.hash_ids[0] if row.hash_ids else None
        before, begun = self._sessions.get(row.session_id, (0.0, first))
        self._new_beginnings += first != begun
        if time is None:
            time = before + (row.delay or 0.0) / 1000
        self._sessions[row.session_id] = time, begun
        return time

    def remarks(self) -> list[str]:
        """Return sentences for the user about the rows that were read."""
        told = super().remarks()
        if self._new_beginnings:
            told.append(
                f"{self._new_beginnings:,} requests begin with another id than their session. "
                "Each row is read as a whole prompt; if rows contain only the new part of a "
                "conversation, hit rates are too low."
            )
        return told


class _BailianRow(msgspec.Struct):
    input_length: int
    hash_ids: list[int | str]
    output_length: int = 0
    timestamp: float | None = None
    """Arrival time in seconds."""


class Bailian(LineFormat):
    """A format with one request per line: times in seconds, and one id per 16 prompt tokens."""

    row = _BailianRow
    unused = "chat_id parent_chat_id turn type"
    example = "chat_id, timestamp, input_length, output_length and hash_ids"

    @classmethod
    def fits(cls, fields: Fields) -> bool:
        """Return whether a row has the id of a chat."""
        return {"hash_ids", "chat_id"} <= fields.keys()

    def requests(self, where: str, row: Any) -> Iterable[TraceRequest]:  # noqa: ARG002
        """Yield the request of a row."""
        yield TraceRequest(row.input_length, row.hash_ids, row.output_length, row.timestamp)
