"""In which steps vLLM computes a prompt: so many tokens at a time, and states where they are kept.

A step ends where its tokens are used up. A recurrent state can only be kept at the end of a step:
where few are, steps end there, and else where blocks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvatlas.planning import Plan

BATCHED_TOKENS = 8192
"""What vLLM computes at a time where nobody says otherwise."""


def batched_tokens(plan: Plan) -> int:
    """Tokens that a step computes: a plan has room for one step more than it has stages."""
    return plan.in_flight // (plan.pp + 1) or BATCHED_TOKENS


@dataclass(frozen=True)
class PrefillSteps:
    """How prompts are divided."""

    tokens: int
    """Of a step at most."""
    block: int
    """Tokens of a block."""
    ends_at_blocks: bool
    """Whether there are states, of which few are kept."""

    def between(self, start: int, stop: int, kept: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(first, last + 1) token of each step; `kept` is where states are kept on the way.

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
                end = min((one for one in kept if start < one < end), default=end)
            yield start, end
            start = end
