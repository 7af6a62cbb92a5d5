"""Checkpoints where requests diverge, and at the end of prompts."""

from __future__ import annotations

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


class BranchPoints(Checkpoints):
    """Keep a checkpoint where a prompt diverges from earlier prompts, and one at the prompt's end.

    For example, the second request that begins with a system prompt keeps a checkpoint where the
    system prompt ends.
    """

    asks_for_seen = True

    def positions(self, prompt: Prompt) -> Positions:
        """Return the end of the prefix that was seen before, and the end of the prompt.

        A position whose prefix is already cached is omitted.
        """
        chosen = [prompt.seen, prompt.end] if prompt.seen < prompt.end else [prompt.end]
        return np.array([end for end in chosen if end > prompt.hit], np.int64)
