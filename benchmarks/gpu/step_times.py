"""A decode step of transformers in each way, in milliseconds, and what it is held to."""

from __future__ import annotations

from typing import NamedTuple

BAR = 1.25
"""A captured step, as so many times its kernels, at most."""


class StepTimes(NamedTuple):
    """Milliseconds of a step, by the cache and the attention."""

    sequences: int
    tokens: int
    own: float
    gathered: float
    pages: float
    graph: float
    kernels: float

    @property
    def captured_ok(self) -> bool:
        """Whether a captured step takes little more than its kernels."""
        return self.graph <= BAR * self.kernels

    @property
    def gathered_ok(self) -> bool:
        """Whether rows that are gathered are no slower than transformers' own cache."""
        return self.gathered <= self.own

    def row(self) -> list[str]:
        """As a row of the table.

        >>> StepTimes(1, 4096, 52.0, 63.0, 23.0, 3.6, 3.4).row()[-3:]
        ['1.06x', 'ok', 'over']
        """
        times = [f"{n:.2f}" for n in self[2:]]
        verdicts = ["ok" if ok else "over" for ok in (self.captured_ok, self.gathered_ok)]
        size = f"{self.sequences} x {self.tokens:,}"
        return [size, *times, f"{self.graph / self.kernels:.2f}x", *verdicts]
