"""Checkpoints where requests diverge, and at the end of prompts."""

from __future__ import annotations

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


class BranchPoints(Checkpoints):
    """Keep a checkpoint where a prompt diverges from earlier ones, and at its end.

    For example, the second request with the same system prompt keeps a checkpoint at its end.
    """

    asks_for_seen = True

    def positions(self, prompt: Prompt) -> Positions:
        """Return the end of the seen prefix and the end of the prompt, if they are computed."""
        chosen = [prompt.seen, prompt.end] if prompt.seen < prompt.end else [prompt.end]
        return np.array([end for end in chosen if end > prompt.hit], np.int64)
