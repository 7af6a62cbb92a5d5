"""Tables of lengths without content: Azure's LLM inference traces, and BurstGPT."""

from __future__ import annotations

import msgspec

from kvatlas.simulate.traces.line_format import LineFormat, seconds
from kvatlas.simulate.traces.text_tokens import TextTokens
from kvatlas.simulate.traces.trace import bad_trace
from kvatlas.simulate.traces.trace_builder import TraceRequest

_COLUMNS = {
    "timestamp": "time",
    "contexttokens": "prompt",
    "request tokens": "prompt",
    "generatedtokens": "output",
    "response tokens": "output",
}
"""The names of columns in lower case, and their meaning."""
_LONGEST_HEADER = 4096


def is_length_table(line: bytes) -> bool:
    """Return whether a line is the header of a table with prompt lengths.

    >>> is_length_table(b"TIMESTAMP,ContextTokens,GeneratedTokens")
    True
    """
    return "prompt" in _meanings(line)


def _meanings(header: bytes) -> dict[str, int]:
    """Return the index of each column whose name is known, by its meaning."""
    names = [cell.lower() for cell in _cells(header[:_LONGEST_HEADER])]
    return {_COLUMNS[name]: place for place, name in enumerate(names) if name in _COLUMNS}


class LengthTable(LineFormat):
    """A CSV table with one request per line: arrival time, prompt tokens and output tokens."""

    row = msgspec.defstruct("_NoFields", [])
    example = "columns TIMESTAMP, ContextTokens and GeneratedTokens"

    def __init__(self, block: int | None, text: TextTokens) -> None:
        super().__init__(block, text)
        self._places: dict[str, int] = {}

    def read(self, where: str, line: bytes) -> list[TraceRequest]:
        """Return the request of a line. The first line is the header."""
        if not self._places:
            self._places = _meanings(line)
            return []
        cells = _cells(line)
        try:
            values = {name: cells[place] for name, place in self._places.items()}
            length, output = (int(float(values.get(name) or 0)) for name in ("prompt", "output"))
            time = _time(values["time"]) if values.get("time") else None
        except (IndexError, ValueError, OverflowError) as problem:
            hint = f"Write {self.example}, or those of BurstGPT"
            raise bad_trace(where, "this is not a valid row", problem, hint) from None
        return [TraceRequest(length, None, output, time)]


def _cells(line: bytes) -> list[str]:
    return [cell.strip(' "\r\n') for cell in line.decode("utf-8", "replace").split(",")]


def _time(cell: str) -> float | None:
    """Return a time in seconds from a number of seconds or a date.

    >>> _time("5.5"), _time("1970-01-01 00:00:01.5000000+00:00")
    (5.5, 1.5)
    """
    try:
        return float(cell)
    except ValueError:
        return seconds(cell)
