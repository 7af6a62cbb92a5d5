"""Events from lines of JSON, as other tools log them.

A line is a batch, as `[time, events, rank]` or an object with `ts`, `events` and
`data_parallel_rank`; or one event, as vLLM names its type and fields, with `ts` where the logger
wrote it. Hashes that are bytes are base64 in JSON.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from kvatlas.pool.events import BlockEvent, EventBatch
from kvatlas.pool.traces.trace import bad_trace

_ARRAY = re.compile(rb"\s*\[\s*[-\d]")
"""How a batch begins: with its time."""
_TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class _Stamped(msgspec.Struct):
    """What a line has beside its event, or instead of it."""

    ts: float = 0.0
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] | None = None
    events: msgspec.Raw = msgspec.Raw(b"")
    type: str = ""


_STAMPED = msgspec.json.Decoder(_Stamped)
_BATCH = msgspec.json.Decoder(EventBatch)
_EVENT = msgspec.json.Decoder(BlockEvent)
_EVENTS = msgspec.json.Decoder(list[BlockEvent])


def is_event_line(line: bytes) -> bool:
    """Whether a line of JSON is a batch of events, or one of them.

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
    """The batch of a line, checked."""
    try:
        if _ARRAY.match(line):
            return _BATCH.decode(line)
        found = _STAMPED.decode(line)
        events = _EVENTS.decode(found.events) if found.events else [_EVENT.decode(line)]
        return EventBatch(found.ts, events, found.data_parallel_rank)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        hint = "Write batches, or events with their type, as vLLM 0.32 names them"
        raise bad_trace(where, "this is no event", problem, hint) from None
