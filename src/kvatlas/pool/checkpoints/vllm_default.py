"""What vLLM 0.32 keeps by default: `prefix_cache_retention_interval=0`.

One checkpoint at the last whole block before a prompt's last token, where the same prompt starts
when it comes again, and one where attention's cached prefix ends, if states or windows could not
be taken up there: the place at which this request left an earlier one.
"""

from __future__ import annotations

import numpy as np

from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt


class VllmDefault(Checkpoints):
    """At the end of prompts, and where attention has more than checkpoints do.

    >>> VllmDefault().positions(Prompt(block=16, hit=2, seen=0, end=9, stop=9, attention=5))
    array([5, 9])
    """

    asks_for_seen = True

    def positions(self, prompt: Prompt) -> Positions:
        """At most two. Where attention's prefix is unknown, what was seen stands for it."""
        shared = prompt.seen if prompt.attention is None else prompt.attention
        last = prompt.end if prompt.resend is None else min(prompt.end, prompt.resend)
        chosen = sorted({min(shared, last), last})
        return np.array([end for end in chosen if end > prompt.hit], np.int64)
