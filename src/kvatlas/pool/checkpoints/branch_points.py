"""Checkpoints where requests diverge, and at the end of prompts."""

from __future__ import annotations

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


class BranchPoints(Checkpoints):
    """Keep a checkpoint where a prompt diverges from earlier ones, and at its end.

    The end of a system prompt thus becomes a checkpoint with the second request that uses it.
    """

    asks_for_seen = True

    def positions(self, prompt: Prompt) -> Positions:
        """Return at most two positions."""
        chosen = [prompt.seen, prompt.end] if prompt.seen < prompt.end else [prompt.end]
        return np.array([end for end in chosen if end > prompt.hit], np.int64)
