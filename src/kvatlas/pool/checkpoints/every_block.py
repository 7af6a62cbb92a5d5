"""A checkpoint at every block: vLLM's dense retention.

vLLM 0.32 does so with `prefix_cache_retention_interval=None`; its default, 0, keeps the ends
of prompts and shared prefixes alone.
"""

from __future__ import annotations

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


class EveryBlock(Checkpoints):
    """At the end of every block that is computed."""

    def positions(self, prompt: Prompt) -> Positions:
        """All of them."""
        return np.arange(prompt.hit + 1, prompt.stop + 1)
