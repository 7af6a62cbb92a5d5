"""SGLang's request log with `--log-requests --log-requests-format json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvatlas.simulate.traces.line_format import Fields, LineFormat, seconds
from kvatlas.simulate.traces.text_tokens import TextTokens
from kvatlas.simulate.traces.trace_builder import TraceRequest

_RECEIVED, _FINISHED = "request.received", "request.finished"


class _Prompt(msgspec.Struct, frozen=True):
    text: str | None = None
    input_ids: list[int] | None = None


class _Counts(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int = 0


class _Result(msgspec.Struct, frozen=True):
    meta_info: _Counts = _Counts()


class _Row(msgspec.Struct):
    event: str
    rid: str = ""
    timestamp: float | str | None = None
    obj: _Prompt = _Prompt()
    out: _Result = _Result()


class SglangLog(LineFormat):
    """A format with one event of a request per line, such as its arrival and its end.

    A request is read when its end is found.
    """

    row = _Row
    unused = "level message"
    example = "the events of --log-requests-format json"

    def __init__(self, block: int | None, text: TextTokens) -> None:
        super().__init__(block, text)
        self._open: dict[str, TraceRequest] = {}

    @classmethod
    def fits(cls, fields: Fields) -> bool:
        """Return whether a row is an event of a request."""
        return {"event", "rid"} <= fields.keys()

    def requests(self, where: str, row: Any) -> Iterable[TraceRequest]:  # noqa: ARG002
        """Yield the request that an event finishes, if any."""
        if row.event == _RECEIVED:
            self._open[row.rid] = self._request(row)
        elif row.event == _FINISHED:
            found = self._open.pop(row.rid, None) or self._request(row)
            counts = row.out.meta_info
            if found.ids is None:
                found = found._replace(length=counts.prompt_tokens or 0)
            yield found._replace(output=counts.completion_tokens)

    def _request(self, row: Any) -> TraceRequest:
        """Return the request of an event. Below log level 2, events have no prompt."""
        time = seconds(row.timestamp)
        if row.obj.input_ids is not None:
            return self.of_tokens(row.obj.input_ids, 0, time)
        if row.obj.text is not None:
            return self.of_tokens([*self.text.of(row.obj.text)], 0, time)
        return TraceRequest(0, None, 0, time)

    def rest(self) -> Iterable[TraceRequest]:
        """Yield the requests that have not finished at the end of the log."""
        return (found for found in self._open.values() if found.ids is not None)
