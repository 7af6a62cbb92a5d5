"""`LineFormat`: the base of the formats with one JSON object per request or conversation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, ClassVar

import msgspec

from kvatlas.simulate.traces.content_ids import ids_of
from kvatlas.simulate.traces.text_tokens import TextTokens
from kvatlas.simulate.traces.trace import bad_trace
from kvatlas.simulate.traces.trace_builder import TraceRequest

Fields = Mapping[str, msgspec.Raw]
BAD_JSON = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def fields_of(text: bytes) -> Fields:
    """Return the fields of a JSON object as undecoded text, or no fields for other JSON.

    >>> sorted(fields_of(b'{"b": 1, "a": [2]}')), fields_of(b"[1]")
    (['a', 'b'], {})
    """
    try:
        return _FIELDS.decode(text)
    except BAD_JSON:
        return {}


def counted(names: Counter[str]) -> str:
    """Return the most frequent names as text, each with its count.

    >>> counted(Counter(a=3, b=1))
    'a (3), b (1)'
    """
    some = [f"{name} ({count:,})" for name, count in names.most_common(8)]
    more = [f"and {len(names) - len(some)} others"] if len(names) > len(some) else []
    return ", ".join(some + more)


def unknown_fields(names: Counter[str]) -> list[str]:
    """Return a sentence that lists unknown fields, or nothing if there are none."""
    return [f"Unknown fields were ignored: {counted(names)}."] if names else []


def seconds(time: float | str | None, unit: float = 1.0) -> float | None:
    """Return a time in seconds. `time` is a multiple of `unit` seconds, or an ISO date and time.

    >>> seconds(1500, 0.001), seconds("1970-01-01T00:00:02Z"), seconds(None)
    (1.5, 2.0, None)
    """
    if isinstance(time, str):
        return datetime.fromisoformat(time.strip()).timestamp()
    return None if time is None else time * unit


class LineFormat:
    """A format of traces. A subclass defines the type of a row and converts rows into requests."""

    row: ClassVar[Any]
    """The `msgspec.Struct` of one line."""
    unused: ClassVar[str] = ""
    """The names of fields that are known and not needed."""
    usual_block: ClassVar[int] = 16
    example: ClassVar[str]
    """The fields of a request, for error messages."""

    def __init__(self, block: int | None, text: TextTokens) -> None:
        self.block, self.text = block or self.usual_block, text
        self.given_block = block
        self._unknown: Counter[str] = Counter()
        self._names = {*self.row.__struct_encode_fields__, *self.unused.split()}
        self._decoder = msgspec.json.Decoder(self.row)

    @classmethod
    def fits(cls, fields: Fields) -> bool:
        """Return whether the first row of a file has this format."""
        raise NotImplementedError

    def read(self, where: str, line: bytes) -> list[TraceRequest]:
        """Return the requests of a line. `where` is the file and line, for error messages."""
        try:
            row = self._decoder.decode(line)
            self._unknown.update(fields_of(line).keys() - self._names)
            return list(self.requests(where, row))
        except BAD_JSON as problem:
            hint = f"Write {self.example}"
            raise bad_trace(where, "this is not a valid request", problem, hint) from None

    def requests(self, where: str, row: Any) -> Iterable[TraceRequest]:
        """Yield the requests of a decoded line."""
        raise NotImplementedError

    def rest(self) -> Iterable[TraceRequest]:
        """Yield the requests that are incomplete at the end of the file."""
        return ()

    def remarks(self) -> list[str]:
        """Return sentences for the user about the rows that were read, such as ignored fields."""
        return self.text.remarks() + unknown_fields(self._unknown)

    def of_tokens(
        self, tokens: list[int], output: int = 0, time: float | None = None
    ) -> TraceRequest:
        """Return the request with these prompt tokens."""
        return TraceRequest(len(tokens), ids_of(tokens, self.block), output, time)
