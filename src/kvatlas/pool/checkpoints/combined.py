"""The union of the checkpoints of several policies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


@dataclass(frozen=True, kw_only=True)
class Combined(Checkpoints):
    """Keep each checkpoint that at least one of several policies keeps.

    >>> from kvatlas.pool.checkpoints import checkpoint_policy
    >>> policy = checkpoint_policy("vllm-default+every-64")
    >>> policy.positions(Prompt(16, hit=2, seen=0, end=9, stop=9, attention=5, resend=9))
    array([4, 5, 8, 9])
    """

    asks_for_seen = True
    parts: tuple[Checkpoints, ...]

    def positions(self, prompt: Prompt) -> Positions:
        """Return the positions of all policies, without duplicates."""
        found = [part.positions(prompt) for part in self.parts]
        return np.unique(np.concatenate(found)).astype(np.int64)
