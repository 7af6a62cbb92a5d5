"""`Checkpoints`: at which ends of blocks a request leaves what later ones can start from.

Full attention keeps every block, and can be taken up anywhere. A recurrent layer can only be
taken up where a copy of its state was kept, and a window only where its last blocks were: a
checkpoint is both. Each costs memory, so which to keep is a policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code

Positions = NDArray[np.int64]


class Prompt(msgspec.Struct, frozen=True):
    """What is known of a prompt when checkpoints are chosen. All but `block` counts blocks."""

    block: int
    """Tokens of a block."""
    hit: int
    """Blocks that need not be computed."""
    seen: int
    """The longest prefix that an earlier request began with, too."""
    end: int
    """The last place that a later request can be known to come past."""
    stop: int
    """Whole blocks of the prompt."""
    attention: int | None = None
    """The longest prefix that layers which keep every block have, where it is known."""
    resend: int | None = None
    """The last place at which the same prompt can start when it comes again, where it is known."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where checkpoints are kept."""

    share: float | None = None
    """Part of the memory that checkpoints may take at most; all of it where nothing is said."""
    asks_for_seen: ClassVar[bool] = False
    """Whether it chooses by what earlier requests began with."""

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share < 1:
            problem = "Checkpoints take a part of the memory"
            hint = "Give a share between 0 and 1"
            raise AtlasError(Code.BAD_SIZE, problem, got=f"a share of {self.share}", hint=hint)

    def positions(self, prompt: Prompt) -> Positions:
        """The ends of blocks to keep one at, ascending: more than `hit`, at most `stop`."""
        raise NotImplementedError
