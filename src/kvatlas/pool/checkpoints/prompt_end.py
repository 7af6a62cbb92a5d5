"""One checkpoint a request: at the end of its prompt."""

from __future__ import annotations

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


class PromptEnd(Checkpoints):
    """At the last whole block of a prompt: what the conversation's next turn starts from."""

    def positions(self, prompt: Prompt) -> Positions:
        """The end alone, where it is computed at all."""
        return np.arange(max(prompt.hit + 1, prompt.end), prompt.end + 1)
