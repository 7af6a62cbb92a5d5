"""Events of a tier as vLLM's own, for its publisher to send."""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from kvatlas.pool import BlockEvent

_DECODER = msgspec.msgpack.Decoder(list[BlockStored | BlockRemoved | AllBlocksCleared])


def as_vllm_events(events: list[BlockEvent]) -> list[Any]:
    """Make vLLM's own events of ours, which have the same form."""
    return _DECODER.decode(msgspec.msgpack.encode(events))
