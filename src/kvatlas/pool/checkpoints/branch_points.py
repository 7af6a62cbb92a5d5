"""Checkpoints where requests were seen to part, and at the end of prompts."""

from __future__ import annotations

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


class BranchPoints(Checkpoints):
    """Where a prompt leaves what earlier ones began with, and at its end.

    The tree of what was seen says where: a system prompt's end becomes a checkpoint when the
    second request comes past it.
    """

    asks_for_seen = True

    def positions(self, prompt: Prompt) -> Positions:
        """At most two."""
        chosen = [prompt.seen, prompt.end] if prompt.seen < prompt.end else [prompt.end]
        return np.array([end for end in chosen if end > prompt.hit], np.int64)
