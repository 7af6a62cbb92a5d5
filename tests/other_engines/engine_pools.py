"""Requests that move between an engine's memory and a plan of kvatlas, along a compiled route."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.engines.engine_memory import EngineMemory
from kvatlas.engines.request_copy import CopiedRequest, copy_request
from kvatlas.planning import Plan

Bytes = NDArray[np.uint8]
End = EngineMemory | tuple[Plan, list[Bytes]]
"""An engine's memory, or a plan with the bytes of its pools."""


def move(
    source: End, destination: End, blocks: Any, tokens: int, rank: int = 0, layers: Any = None
) -> CopiedRequest:
    """Copy a request from rank `rank` of the source."""
    return copy_request(
        memory_of(source), memory_of(destination), source_blocks=blocks[0],
        destination_blocks=blocks[1], tokens=tokens, source_rank=rank, layers=layers,
    )  # fmt: skip


def memory_of(end: End) -> EngineMemory:
    if isinstance(end, EngineMemory):
        return end
    return EngineMemory.of_pools(end[0], dict(enumerate(end[1])))
