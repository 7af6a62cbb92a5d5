"""The policies of a replay, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvatlas.pool.checkpoints import Checkpoints, EveryBlock
from kvatlas.simulate.traces import Ints

Progress = Callable[[float], None]


@dataclass(frozen=True)
class ReplayPolicy:
    """The eviction, the checkpoints and the engine's rules of a replay."""

    eviction: str = "lru"
    checkpoints: Checkpoints = field(default_factory=EveryBlock)
    by_group: bool = False
    """Whether vLLM's rules apply: groups allocate and release their blocks one after the other, and
    states at each step. Recomputed blocks then do not replace their cached copies."""


@dataclass
class Outcome:
    """The hits of each request, and statistics of the pools."""

    hits: Ints
    """Number of spans that each request found."""
    refused: int = 0
    """Number of requests that do not fit even into empty pools."""
    evictions: int = 0
    """Number of evicted blocks."""
    peak: int = 0
    """Maximum number of blocks in use, including kept ones."""
