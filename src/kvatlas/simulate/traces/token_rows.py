"""Rows with the token ids of a prompt, as vLLM and SGLang name them; and vLLM's debug log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from kvatlas.simulate.traces.line_format import Fields, LineFormat, seconds
from kvatlas.simulate.traces.trace_builder import TraceRequest


class _Row(msgspec.Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    input_ids: list[int] | None = None
    output_length: int | None = None
    output_token_ids: list[int] = []
    timestamp: float | str | None = None
    """Arrival time in milliseconds, or in ISO format."""
    arrival_time: float | None = None
    """Arrival time in seconds."""


_NAMES = ("token_ids", "prompt_token_ids", "input_ids")


class TokenRows(LineFormat):
    """A format with one request per line: the token ids of its prompt."""

    row = _Row
    unused = "request_id prompt model"
    example = "token_ids or prompt_token_ids; also timestamp (ms) and output_length"

    @classmethod
    def fits(cls, fields: Fields) -> bool:
        """Return whether a row has the token ids of a prompt."""
        return not fields.keys().isdisjoint(_NAMES)

    def requests(self, where: str, row: Any) -> Iterable[TraceRequest]:  # noqa: ARG002
        """Yield the request of a row."""
        found = [ids for name in _NAMES if (ids := getattr(row, name)) is not None]
        if not found:
            raise ValueError(f"the row has no token ids; expected one of {', '.join(_NAMES)}")
        output = len(row.output_token_ids) if row.output_length is None else row.output_length
        time = seconds(row.timestamp, 0.001)
        yield self.of_tokens(found[0], output, row.arrival_time if time is None else time)


_LOGGED = re.compile(rb"Request (\S+) details: prompt: .*, prompt_token_ids: (\[[\d, ]*\])")
_DATE = re.compile(rb"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")


def is_vllm_log(line: bytes) -> bool:
    """Return whether a line is from the log of vLLM.

    >>> is_vllm_log(b"INFO 11-18 10:00:00 [api_server.py:1] ready")
    True
    """
    return bool(re.match(rb"\W*(\(\w+[^)]*\) )?(DEBUG|INFO|WARNING) \d\d-\d\d \d\d:", line))


class VllmLog(LineFormat):
    """vLLM's log with `--enable-log-requests` and the log level DEBUG. Other lines are skipped."""

    row = _Row
    example = "logs at level DEBUG with --enable-log-requests"

    def read(self, where: str, line: bytes) -> list[TraceRequest]:  # noqa: ARG002
        """Return the request of a log line, if it has one."""
        found = _LOGGED.search(line)
        if found is None:
            return []
        tokens = msgspec.json.decode(found[2], type=list[int])
        date = _DATE.search(line)
        time = None
        if date is not None:
            month, day, hour, minute, second = map(int, date.groups())
            # The log has no year. 31 days per month keep the order; gaps at month ends grow.
            time = float((((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second)
        return [self.of_tokens(tokens, 0, time)]
