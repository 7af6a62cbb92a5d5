"""One checkpoint per request: at the end of its prompt."""

from __future__ import annotations

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


class PromptEnd(Checkpoints):
    """Keep a checkpoint at the last complete block of a prompt, where the next turn continues."""

    def positions(self, prompt: Prompt) -> Positions:
        """Return the end of the prompt's last complete block, unless it is cached."""
        return np.arange(max(prompt.hit + 1, prompt.end), prompt.end + 1)
