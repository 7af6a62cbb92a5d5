"""Read events from lines of JSON, as other tools log them.

A line has one of three forms: a batch `[time, events, rank]`, a batch as an object with `ts`,
`events` and `data_parallel_rank`, or a single event with vLLM's type and field names and optionally
`ts`. Hashes of type bytes are base64-encoded.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from kvatlas.pool.events import BlockEvent, EventBatch
from kvatlas.simulate.traces.trace import bad_trace

_ARRAY = re.compile(rb"\s*\[\s*[-\d]")
"""The beginning of a batch in array form: its time."""
_TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class _Stamped(msgspec.Struct):
    """The batch fields of a JSON object. Events are decoded separately."""

    ts: float = 0.0
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] | None = None
    events: msgspec.Raw = msgspec.Raw(b"")
    type: str = ""


_STAMPED = msgspec.json.Decoder(_Stamped)
_BATCH = msgspec.json.Decoder(EventBatch)
_EVENT = msgspec.json.Decoder(BlockEvent)
_EVENTS = msgspec.json.Decoder(list[BlockEvent])


def is_event_line(line: bytes) -> bool:
    """Return whether a line of JSON is a batch of events or a single event.

    >>> is_event_line(b'[1.5, [], 0]'), is_event_line(b'{"token_ids": [1]}')
    (True, False)
    """
    if _ARRAY.match(line):
        return True
    try:
        found = _STAMPED.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return bool(found.events) or found.type in _TAGS


def batch_of_line(where: str, line: bytes) -> EventBatch:
    """Decode and validate the batch in a line of JSON. `where` names the line in errors."""
    try:
        if _ARRAY.match(line):
            return _BATCH.decode(line)
        found = _STAMPED.decode(line)
        events = _EVENTS.decode(found.events) if found.events else [_EVENT.decode(line)]
        return EventBatch(found.ts, events, found.data_parallel_rank)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        raise bad_trace(
            where,
            "this is not a valid event",
            problem,
            "Each line must be a batch of events of vLLM 0.32, or one event with its type",
        ) from None
