"""`Bundle`: alike groups of a plan, which a replay processes together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvatlas.simulate.layer_classes import LayerClass
from kvatlas.simulate.prompt_spans import Spans
from kvatlas.simulate.traces import Ints

ABSENT = -1
"""The value of a missing block in tables of block ids."""


@dataclass
class Bundle:
    """Alike groups: all groups of one layer class."""

    one: LayerClass
    groups: int
    block: int
    """Number of tokens per block."""
    spans: Spans
    """The prompts, cut at the ends of blocks."""
    base: int
    """The index in `_where` of the first element of these groups."""
    width: int
    """Number of elements of each group, or number of rows."""
    keeps_all: bool
    state: bool
    sparse: bool
    """Whether only the last block of each step is allocated, as vLLM does for recurrent groups."""
    rank: int
    """Groups with lower ranks release blocks of one position first."""
    bases: Ints
    """[group, 1]: the index in `ReplayCache._where` of the first element of each group."""
    row_of: NDArray[np.int32]
    """For recurrent groups, the row of each prefix, or `ABSENT`."""
    prefix_of: Ints
    """For recurrent groups, the number of the prefix of each row."""
    rows: list[int]
    """Free rows."""
    each: Ints
    """The numbers of the groups, from 0."""

    def names(self, numbers: Ints) -> Ints:
        """Return the elements of `_where` for these prefixes, as an array [group, number]."""
        return self.bases + numbers

    def first(self, tokens: int) -> int:
        """Return the first token that the token at position `tokens` sees."""
        return min(int(self.one.visibility.first(tokens)), tokens)

    def window_runs(
        self, ends: list[int], before: int, *, joined: bool = True
    ) -> list[tuple[int, int]]:
        """Return (start, stop) of the table entries that windows need to continue after `ends`.

        Entries before `before` are left out. Adjacent ranges are joined if `joined` is true.
        """
        runs: list[tuple[int, int]] = []
        firsts = self.firsts(np.array(ends, np.int64)).tolist()
        for first, end in zip(firsts, ends, strict=True):
            stop = end // self.block
            start = max(min(first, stop), before)
            if start < stop:
                if runs and joined and runs[-1][1] == start:
                    start = runs.pop()[0]
                runs.append((start, stop))
                before = stop
        return runs

    def firsts(self, ends: Ints) -> Ints:
        """Return, for each of `ends` in tokens, the first block needed to continue."""
        first: Ints = np.minimum(self.one.visibility.first(ends), ends) // self.block
        return first
