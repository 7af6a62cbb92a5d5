"""The default checkpoints of vLLM 0.32: `prefix_cache_retention_interval=0`.

The first checkpoint is at the last complete block before the prompt's last token, where the same
prompt could continue if it were sent again. The second is at the end of the prefix that full
attention has cached, where this request diverges from an earlier one. The second checkpoint is kept
only if states or windows are missing there.
"""

from __future__ import annotations

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


class VllmDefault(Checkpoints):
    """Keep a checkpoint at the end of the prompt and one where full attention's cached prefix ends.

    The second is kept only if states or windows of other layers are missing there.

    >>> VllmDefault().positions(Prompt(16, hit=2, seen=0, end=9, stop=9, attention=5, resend=9))
    array([5, 9])
    """

    def positions(self, prompt: Prompt) -> Positions:
        """Return the end of the prefix that full attention has cached, and the end of the prompt.

        Positions up to `prompt.hit` are omitted.
        """
        last = min(prompt.end, prompt.resend)
        chosen = sorted({min(prompt.attention, last), last})
        return np.array([end for end in chosen if end > prompt.hit], np.int64)
