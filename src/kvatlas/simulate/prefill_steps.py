"""The steps in which vLLM computes a prompt.

A step computes up to a fixed number of tokens. A recurrent state can be kept only at the end of a
step. If only some states are kept, steps also end at their positions and at the ends of blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvatlas.planning import Plan

BATCHED_TOKENS = 8192
"""vLLM's default number of tokens per step."""


def batched_tokens(plan: Plan) -> int:
    """Return the maximum number of tokens per step that a plan assumes.

    It is `plan.in_flight` / (pp + 1), because one step for each of the pp pipeline stages and one
    more step are in flight.
    """
    return plan.in_flight // (plan.pp + 1) or BATCHED_TOKENS


@dataclass(frozen=True)
class PrefillSteps:
    """How vLLM divides prompts into steps."""

    tokens: int
    """Maximum number of tokens per step."""
    block: int
    """Number of tokens per block."""
    ends_at_blocks: bool
    """Whether steps end at blocks and kept states: if only some recurrent states are kept."""

    def between(self, start: int, stop: int, kept: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of each step: it computes tokens start .. stop - 1.

        `kept` are the numbers of tokens after which a recurrent state is kept, ascending.

        >>> list(PrefillSteps(100, 16, ends_at_blocks=True).between(32, 200, [64, 192]))
        [(32, 64), (64, 160), (160, 192), (192, 200)]
        >>> list(PrefillSteps(100, 16, ends_at_blocks=False).between(32, 200, [64, 192]))
        [(32, 132), (132, 200)]
        """
        while start < stop:
            end = min(start + self.tokens, stop)
            if self.ends_at_blocks:
                whole = end // self.block * self.block
                if end < stop and whole > start:
                    end = whole
                if start % self.block:
                    end = min(end, (start // self.block + 1) * self.block)
                later = bisect_right(kept, start)
                end = min(kept[later], end) if later < len(kept) else end
            yield start, end
            start = end
