"""Convert a tier's events to vLLM's event types, for vLLM's publisher."""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from kvatlas.pool import BlockEvent

_DECODER = msgspec.msgpack.Decoder(list[BlockStored | BlockRemoved | AllBlocksCleared])


def as_vllm_events(events: list[BlockEvent]) -> list[Any]:
    """Convert kvatlas's events to vLLM's event types. Both have the same msgpack encoding."""
    return _DECODER.decode(msgspec.msgpack.encode(events))
