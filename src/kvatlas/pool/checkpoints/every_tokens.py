"""Checkpoints at a fixed interval of tokens, and at the end of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvatlas.geometry.integers import positive
from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


@dataclass(frozen=True, kw_only=True)
class EveryTokens(Checkpoints):
    """Keep a checkpoint every `tokens` tokens, and one at the end of the prompt.

    A checkpoint that would be inside a block is moved back to the beginning of that block.

    >>> EveryTokens(tokens=100).positions(Prompt(block=16, hit=0, seen=0, end=19, stop=20))
    array([ 6, 12, 18, 19])
    """

    tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self.tokens, "the number of tokens between checkpoints")

    def positions(self, prompt: Prompt) -> Positions:
        """Return the positions of checkpoints after the cached prefix, without duplicates."""
        step = max(self.tokens, prompt.block)
        ends = np.arange(step, prompt.stop * prompt.block + 1, step) // prompt.block
        chosen = np.unique(np.append(ends, prompt.end))
        return chosen[chosen > prompt.hit].astype(np.int64)
