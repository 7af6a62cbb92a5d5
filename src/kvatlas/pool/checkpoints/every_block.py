"""A checkpoint at every block, as vLLM keeps them."""

from __future__ import annotations

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


class EveryBlock(Checkpoints):
    """At the end of every block that is computed."""

    def positions(self, prompt: Prompt) -> Positions:
        """All of them."""
        return np.arange(prompt.hit + 1, prompt.stop + 1)
