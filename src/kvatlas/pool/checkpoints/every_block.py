"""A checkpoint at every block: vLLM's dense retention.

vLLM 0.32 does this with `prefix_cache_retention_interval=None`. Its default, 0, keeps checkpoints
only at the ends of prompts and of shared prefixes.
"""

from __future__ import annotations

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


class EveryBlock(Checkpoints):
    """Keep a checkpoint at the end of every computed block."""

    def positions(self, prompt: Prompt) -> Positions:
        """Return the end of every block after the cached prefix."""
        return np.arange(prompt.hit + 1, prompt.stop + 1)
